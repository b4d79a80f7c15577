"""What travels: archives cut into pieces of a call's size, put together and unpacked on the other side.

Problem: a call carries 64 MiB, the checkout included, and a node needs four times that.
Idea: each archive is one compressed tar, cut anywhere; `send` lays the pieces into numbered folders, `receive` keeps
those of one folder and starts to unpack every archive that is whole, while the next call is on its way.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from e2e.gpu.processes import log_line, start, wait_for
from e2e.gpu.settings import ARCHIVES, CHECKOUT, PARTS, PIECE_BYTES, ROOT

_MANIFEST: Final = "manifest.json"
_TOOLS: Final = ("zstd", "liblz4.so.1")  # travel unpacked with the pieces: nothing else could unpack them
_BLOCK: Final = 1 << 20


def send(archives: dict[str, Path], tools: Path, target: Path) -> list[Path]:
    """Cut archives into the folders 1, 2, ... below `target`; the folders. Each has the manifest."""
    shutil.rmtree(target, ignore_errors=True)
    folders: list[Path] = []
    room = 0
    sizes = {name: archives[name].stat().st_size for name in ARCHIVES}
    for name in ARCHIVES:
        with archives[name].open("rb") as file:
            number = 0
            while left := sizes[name] - file.tell():
                if room <= 0:
                    folders.append(target / str(len(folders) + 1))
                    folders[-1].mkdir(parents=True)
                    room = PIECE_BYTES - (
                        sum((tools / tool).stat().st_size for tool in _TOOLS) if len(folders) == 1 else 0
                    )
                size = min(room, left)
                with (folders[-1] / f"{name}.{number:02}").open("wb") as piece:
                    for begin in range(0, size, _BLOCK):
                        piece.write(file.read(min(_BLOCK, size - begin)))
                room -= size
                number += 1
    for tool in _TOOLS:
        shutil.copy2(tools / tool, folders[0] / tool)
    for folder in folders:
        (folder / _MANIFEST).write_text(json.dumps({"sizes": sizes, "folders": len(folders)}))
    return folders


def receive(folder: Path) -> dict[str, Any]:
    """Keep one folder's pieces and start to unpack what is whole; what there is so far."""
    PARTS.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        shutil.copy2(path, PARTS / path.name)
    if (PARTS / "zstd").exists():
        (PARTS / "zstd").chmod(0o755)
    _read_ahead()
    state: dict[str, Any] = {}
    for name, size in _sizes().items():
        pieces = sorted(PARTS.glob(f"{name}.[0-9][0-9]"))
        there = sum(piece.stat().st_size for piece in pieces)
        state[name] = f"{there / 1e6:.0f} of {size / 1e6:.0f} MB"
        begun = PARTS / f"{name}.begun"
        if there == size and not begun.exists():
            begun.write_text("")
            start(f"unpack-{name}", ["sh", "-c", _unpack(name, [str(piece) for piece in pieces])], ends=True)
            state[name] += ", unpacking"
    return state


def _read_ahead() -> None:
    """Read and compile the Python that has torch, while parts travel: the disk of a new machine is slow."""
    begun = PARTS / "read-ahead.begun"
    if begun.exists():
        return
    begun.write_text("")
    read = "find . -type f -print0 | xargs -0 -n 64 -P 8 cat > /dev/null"
    start("read-ahead", ["sh", "-c", f"cd {shlex.quote(sys.prefix)}/lib && {read}"], ends=True)
    script = CHECKOUT / "engine-image/image/compile_packages.py"  # as the image does it, but earlier
    start("compile-packages", [sys.executable, str(script)], ends=True)


def _sizes() -> dict[str, int]:
    document = json.loads((PARTS / _MANIFEST).read_text())
    return dict(document["sizes"])


def _unpack(name: str, pieces: list[str]) -> str:
    target = ROOT / name if name != "node" else ROOT
    zstd = f"LD_LIBRARY_PATH={PARTS} {PARTS}/zstd -d --long=27 -q"
    steps = [
        f"mkdir -p {target}",
        f"cat {' '.join(pieces)} | {zstd} | tar --numeric-owner -xpf - -C {target}",
        f"rm {' '.join(pieces)}",
        f"touch {PARTS}/{name}.done",
    ]
    return " && ".join(steps)


def await_unpacked(name: str, seconds: float) -> None:
    """Wait until an archive is unpacked. Raises StepFailed."""
    done = PARTS / f"{name}.done"
    if not done.exists():
        log_line(f"waits for the archive {name}")

    wait_for(done.exists, f"unpacking {name}", seconds)
