"""The engine's image, made where the GPUs are: its base is that machine, the rest cuda.Dockerfile's own lines.

Problem: an image with CUDA torch has many gigabytes, and can neither be pulled nor carried to a machine without a
network that has all of it already.
Idea: the base image has the machine's /etc and a virtual environment with the carried vLLM; /usr and the Python that
has torch are the machine's own, mounted read-only by the device plugin, as vendors' plugins do with driver libraries.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from bench.hardware import dummy_models
from bench.hardware.engine import STEPLOG
from e2e.gpu import oci
from e2e.gpu.processes import log_line, run
from e2e.gpu.settings import CHECKOUT, ENGINE, ENVIRONMENT, HUB_MODEL, MODELS, OFFLINE, ROOT, image

_SECRETS: Final = (
    "shadow*",
    "gshadow*",
    "ssh",
    "sudoers*",
    "private",
    "*.key",
    "mtab",
    "resolv.conf",
    "hosts",
    "hostname",
)
_PASSED_ON: Final = ("NCCL_", "TORCH_", "NVSHMEM_", "CUDA_", "LD_LIBRARY_PATH", "NVIDIA_")
_SIMULATED_PARTS: Final = ("__init__.py", "engines", "sim/__init__.py", "sim/profiles.py", "sim/profiles", "sim/engine")


def mounts() -> list[str]:
    """Folders of the machine that the engine's containers see: /usr, and where this Python and its packages lie."""
    folders = {"/usr"}
    for prefix in (sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parents[1])):
        if not Path(prefix).is_relative_to("/usr"):
            folders.add(prefix)
    return sorted(folder for folder in folders if not any(Path(folder).is_relative_to(o) for o in folders - {folder}))


def make(model: str, simulated: str) -> Path:
    """The image as a tar. `simulated`: arguments of the simulated engine in vLLM's place, or "" for vLLM."""
    root = ROOT / "engine-root"
    shutil.rmtree(root, ignore_errors=True)
    config = _make_base(root, simulated)
    dummy_models.write_model(root / str(MODELS).lstrip("/"), model)
    hub_model = root / str(MODELS).lstrip("/") / HUB_MODEL  # where an engine without a network finds the name
    hub_model.parent.mkdir(parents=True)
    hub_model.symlink_to(MODELS / model)
    with _mounted(root):
        lines = oci.apply_dockerfile(CHECKOUT / "engine-image/cuda.Dockerfile", CHECKOUT / "engine-image", root, config)
    log_line(f"engine image: {len(lines)} lines of cuda.Dockerfile carried out")
    target = ROOT / "engine.tar"
    oci.write_image(root, config, image("engine"), target)
    shutil.rmtree(root)
    return target


def _make_base(root: Path, simulated: str) -> dict[str, Any]:
    for name in (
        "dev/shm",  # for the semaphores of processes that compile
        "tmp",
        "home",
        "root",
        "run",
        "var",
        "proc",
        "sys",
        "dev",
        "opt",
        "mnt",
        *(m.lstrip("/") for m in mounts()),
    ):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    for path in Path("/").iterdir():
        if path.is_symlink() and path.name.startswith(("bin", "lib", "sbin")):
            (root / path.name).symlink_to(path.readlink())
    shutil.copytree(
        "/etc", root / "etc", symlinks=True, ignore=shutil.ignore_patterns(*_SECRETS), ignore_dangling_symlinks=True
    )
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    environment = root / str(ENVIRONMENT).lstrip("/")
    (environment / "bin").mkdir(parents=True)
    interpreter = Path(sys.executable).resolve()
    for name in ("python", "python3", version):
        (environment / "bin" / name).symlink_to(interpreter)
    (environment / "pyvenv.cfg").write_text(f"home = {interpreter.parent}\ninclude-system-site-packages = false\n")
    packages = environment / "lib" / version / "site-packages"
    own = [path for path in sys.path if path.startswith(sys.prefix) and path.endswith("site-packages")]
    shutil.copytree(ENGINE / "site", packages, symlinks=True, copy_function=os.link)
    (packages / "machine.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in own))
    if simulated:
        _add_simulated(root, environment, simulated)
    else:
        script = (
            f"#!{ENVIRONMENT}/bin/python3\nimport os\nimport sys\nfrom vllm.entrypoints.cli.main import main\n"
            f'if __name__ == "__main__":\n    os.chdir("{MODELS}")\n'
            '    sys.argv += ["--load-format", "dummy"]\n    sys.exit(main())\n'
        )
        (environment / "bin/vllm").write_text(script)
        shutil.copytree(STEPLOG, packages, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    (environment / "bin/vllm").chmod(0o755)
    for folder, _, _ in os.walk(root / "opt"):
        Path(folder).chmod(0o755)
    passed_on = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(_PASSED_ON)]
    return {"Env": [f"PATH={ENVIRONMENT}/bin:{os.environ['PATH']}", *OFFLINE, *passed_on]}


def _add_simulated(root: Path, environment: Path, arguments: str) -> None:
    """The simulated engine under vLLM's name: a rehearsal starts its pods as pods with GPUs are started."""
    target = root / "opt/plimsoll"
    for part in _SIMULATED_PARTS:
        source, place = CHECKOUT / "operator/plimsoll" / part, target / "plimsoll" / part
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, place)
    shutil.copytree(
        CHECKOUT / "engine-image/simulated", target / "simulated", ignore=shutil.ignore_patterns("__pycache__")
    )
    (environment / "bin/vllm").write_text(f'#!/bin/sh\nexec python3 -P -m simulated "$@" {arguments}\n')


@contextmanager
def _mounted(root: Path) -> Iterator[None]:
    """The machine's folders under the image's root while commands run in it."""
    done: list[Path] = []
    try:
        for folder in mounts():
            place = root / folder.lstrip("/")
            run("mount", "--bind", folder, place)
            done.append(place)
        yield
    finally:
        for place in reversed(done):
            subprocess.run(["umount", str(place)], check=True)
