"""Take CUDA out of an installed torch, so that a CPU engine image is small.

Problem: where the CPU wheel index cannot be reached, pip takes PyPI's torch, which is the CUDA build: 4.6 GB with its
NVIDIA packages, of which a CPU engine executes 0.5 GB. They cannot just be deleted: libtorch_cuda.so is linked to
cuBLAS, cuFFT, cuDNN, NCCL and more, libtorch_python.so to libtorch_cuda.so, and Python binds every symbol at load.

Idea: without a GPU none of NVIDIA's functions is ever called, they are only looked up. Each of NVIDIA's libraries is
replaced by a stub that exports just the names that torch's own libraries look up; a call would trap (SIGILL), never go
on with a wrong result. torch's own libraries stay real: their constructors do run.

Run with the Python that has torch installed; needs `nm`, `readelf`, `as` and `ld` (binutils) on x86-64. Does nothing
on a CPU build. Prints the distributions that nothing needs any more, one on each line, for `pip uninstall`.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

# Opened by name, and only on a GPU.
DROPPED = ("libtorch_cuda_linalg.so", "libcaffe2_nvrtc.so")
# Small, and really called while torch is loaded (registration of device code, profiler): kept as they are.
LINKED_LIBRARIES = ("libcudart.so.13", "libcupti.so.13")
CUDA_DISTRIBUTIONS = re.compile(r"^(nvidia|cuda|triton)([-_]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Symbol:
    """One exported name: `function` or data of `size` bytes; `version` is empty where it has none."""

    name: str
    function: bool
    size: int
    version: str


def run(*command: str) -> str:
    """Standard output of a command that must succeed."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def undefined(library: Path) -> set[str]:
    """Names that a library looks up in others, without their versions."""
    return {line.split()[-1].split("@")[0] for line in run("nm", "-D", "--undefined-only", str(library)).splitlines()}


def defined(library: Path) -> list[Symbol]:
    """Names that a library exports."""
    found = []
    for line in run("nm", "-D", "-S", "--defined-only", str(library)).splitlines():
        fields = line.split()
        if len(fields) == 4:  # address, size, kind, name; what has no size is the mark of a version
            name, _, version = fields[3].replace("@@", "@").partition("@")
            found.append(Symbol(name, fields[2] in "TWi", int(fields[1], 16), version))
    return found


def needed(library: Path) -> list[str]:
    """File names of the libraries that one is linked to."""
    return re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", "-W", str(library)))


def assembly(symbols: list[Symbol]) -> str:
    """x86-64 source of a stub: functions that trap and zeroed data of the real size."""
    lines = []
    for symbol in symbols:
        kind, section = ("function", ".text") if symbol.function else ("object", ".data")
        body = "ud2" if symbol.function else f".zero {max(symbol.size, 1)}"
        lines += [f".section {section}", ".balign 16", f".globl {symbol.name}", f".type {symbol.name},@{kind}"]
        lines += [f"{symbol.name}: {body}", f".size {symbol.name}, .-{symbol.name}"]
    return "\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""])


def versions(symbols: list[Symbol]) -> str:
    """Linker script that gives each name the version its users ask for; empty where no name has one."""
    by_version: dict[str, list[str]] = {}
    for symbol in symbols:
        if symbol.version:
            by_version.setdefault(symbol.version, []).append(symbol.name)
    return "".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in by_version.items())


def write_stub(target: Path, symbols: list[Symbol]) -> None:
    """Assembles and links a stub library; its soname is the file's name."""
    with tempfile.TemporaryDirectory() as folder:
        source, script, binary = (Path(folder) / name for name in ("stub.s", "stub.map", "stub.o"))
        source.write_text(assembly(symbols))
        script.write_text(versions(symbols))
        run("as", "-o", str(binary), str(source))
        with_versions = [f"--version-script={script}"] if script.stat().st_size else []
        run("ld", "-shared", "-soname", target.name, *with_versions, "-o", str(target), str(binary))


def slim(packages: Path) -> list[str]:
    """Replaces NVIDIA's libraries for the torch in `packages` (a site-packages folder); returns the names replaced."""
    folder = packages / "torch" / "lib"
    if not (folder / "libtorch_cuda.so").exists():
        return []
    for name in DROPPED:
        (folder / name).unlink(missing_ok=True)
    vendor = {path.name: path for path in (packages / "nvidia").glob("**/lib*.so*")}
    users = [*folder.glob("*.so"), *(packages / "torch").glob("_C.*.so")]
    symbols = set().union(*map(undefined, users))
    linked = set().union(*map(needed, users))
    for name in LINKED_LIBRARIES:
        shutil.copy(vendor[name], folder / name)  # torch's libraries look in their own folder first
    replaced = sorted(name for name in linked if name in vendor and name not in LINKED_LIBRARIES)
    for name in replaced:
        names = [
            symbol for symbol in defined(vendor[name]) if symbol.name in symbols and not symbol.name.startswith("_Z")
        ]
        write_stub(folder / name, names)  # NVIDIA's interfaces are C; what they export of C++ is libstdc++'s own
    return replaced


def main() -> None:
    """Slims the torch of this Python and prints the distributions that nothing needs any more."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("slim_torch: torch is not installed")
    slim(Path(spec.origin).parent.parent)
    names = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    print("\n".join(sorted(name for name in names if name and CUDA_DISTRIBUTIONS.match(name))))


if __name__ == "__main__":
    main()
