"""The images of the scenarios: built here, pushed to the local registry when they changed.

Each image's code is its last layer, so an edit costs one small layer. Nothing is pushed while the registry's manifest
already names the image's id.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import base_image, binaries, pip_settings, registry
from e2e.cluster.docker import build, image_exists, image_id
from e2e.cluster.settings import BIN, HERE, REGISTRY_PORT, ROOT
from e2e.cluster.shell import CommandFailed, print_line, run, stage, succeeds

REPOSITORY = f"localhost:{REGISTRY_PORT}/plimsoll"
TAG = "dev"


@dataclass(frozen=True)
class Image:
    """parts: the files and folders of the checkout that make the build context. programs: of other projects, built
    from their modules, which takes minutes, so the image is made only when it is named.
    """

    name: str
    dockerfile: Path
    parts: tuple[str, ...]
    programs: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """The name that Docker, Helm values and pods use."""
        return f"{REPOSITORY}/{self.name}:{TAG}"


_PROGRAMS = HERE / "programs.Dockerfile"
_PLIMSOLL_FILES = ("__init__.py", "engines", "sim/__init__.py", "sim/profiles.py", "sim/profiles", "sim/engine")
_SIMULATED_ENGINE = tuple(f"operator/plimsoll/{name}" for name in _PLIMSOLL_FILES)
IMAGES = (
    Image("operator", ROOT / "operator/Dockerfile", ("operator/plimsoll", "requirements/operator.txt")),
    Image("envoy", HERE / "envoy/Dockerfile", ("requirements/envoy.txt",)),
    Image("prometheus", HERE / "prometheus/Dockerfile", ()),
    Image("engine-cpu", ROOT / "engine-image/cpu.Dockerfile", ("engine-image/.",)),
    Image("engine-simulated", ROOT / "engine-image/simulated.Dockerfile", ("engine-image", *_SIMULATED_ENGINE)),
    Image("keda", _PROGRAMS, (), ("keda-operator", "keda-adapter")),
    Image("prometheus-adapter", _PROGRAMS, (), ("prometheus-adapter",)),
    Image("flux", _PROGRAMS, (), ("source-controller", "kustomize-controller")),
    Image("policies", HERE / "policies/Dockerfile", (), ("policy-controller",)),
)


def reference(name: str) -> str:
    """The name of an image that pods use."""
    return next(image.reference for image in IMAGES if image.name == name)


def ensure(names: Iterable[str]) -> None:
    """Build and push the named images, all of the project's own when none is named."""
    requested = set(names)
    if unknown := requested - {image.name for image in IMAGES}:
        raise CommandFailed(f"no such image: {', '.join(sorted(unknown))}")
    for image in IMAGES:
        if image.name in requested or not (requested or image.programs):
            binaries.ensure(image.programs)
            with stage(f"image {image.name}"):
                before = image_id(image.reference) if image_exists(image.reference) else None
                _build(image)
                if _registry_has(image):
                    print_line(f"image {image.name} is in the registry already")
                else:
                    run("docker", "push", image.reference)
                if before is not None and before != image_id(image.reference):
                    succeeds("docker", "image", "rm", before)  # else each edit leaves one; in use, it stays


def check_cuda() -> None:
    """Build the GPU engine's Dockerfile on the CPU engine's base: every line but FROM runs; nothing is pushed."""
    with (
        stage("cuda.Dockerfile on the CPU base"),
        _context(("engine-image/.",)) as context,
        pip_settings.settings() as args,
    ):
        args["DEBIAN"] = base_image.reference()
        build("plimsoll/vllm-cpu", context, file="cpu.Dockerfile", args=args, target="vllm", network="host")
        build("plimsoll/engine-cuda-lines", context, file="cuda.Dockerfile", args={"VLLM": "plimsoll/vllm-cpu"})


def _build(image: Image) -> None:
    with _context(image.parts) as context, pip_settings.settings() as args:
        shutil.copy2(image.dockerfile, context / "Dockerfile")
        for program in image.programs:
            (context / "programs").mkdir(exist_ok=True)
            shutil.copy2(BIN / program, context / "programs")
        args["DEBIAN"] = base_image.reference()
        build(image.reference, context, args=args, network="host")


@contextmanager
def _context(parts: Iterable[str]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            _copy(part, Path(folder))
        _normalize_modes(Path(folder))
        yield Path(folder)


def _copy(part: str, context: Path) -> None:
    """A folder under its own path, or, with `/.`, its content at the top."""
    source = ROOT / part
    target = context if part.endswith("/.") else context / part
    ignored = shutil.ignore_patterns("__pycache__")
    if source.is_dir():
        shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)


def _normalize_modes(context: Path) -> None:
    """Docker's cache looks at modes too, and git keeps of them only who may execute: two checkouts must be alike."""
    for path in context.rglob("*"):
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)


def _registry_has(image: Image) -> bool:
    """The registry's manifest names the config blob, whose digest is the image's id."""
    manifest = registry.manifest(f"plimsoll/{image.name}", TAG)
    return manifest is not None and image_id(image.reference).encode() in manifest
