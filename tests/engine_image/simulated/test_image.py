"""The simulated engine's image: the launcher's lines are the other images', every package is pinned."""

from __future__ import annotations

import re
from pathlib import Path

from e2e.cluster.images import IMAGES

IMAGE = Path(__file__).resolve().parents[3] / "engine-image"
LAUNCHER = "# The launcher: these lines are the same"


def test_image_launcher_lines_equal_other_images() -> None:
    simulated, cpu = ((IMAGE / f"{name}.Dockerfile").read_text() for name in ("simulated", "cpu"))
    launcher = simulated[simulated.index(LAUNCHER) :].replace("COPY engine-image/", "COPY ")
    assert launcher == cpu[cpu.index(LAUNCHER) :]


def pinned(name: str) -> list[tuple[str, str]]:
    """Packages of a lock file, by their normalized names, and their versions."""
    text = (IMAGE / f"{name}.lock").read_text()
    found = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.MULTILINE)
    assert len(found) == text.count("==")
    return [(re.sub(r"[-_.]+", "-", package).lower(), version) for package, version in found]


def test_image_lock_pins_each_package_and_has_imports() -> None:
    names = [package for package, _ in pinned("simulated")]
    assert len(names) == len(set(names))
    assert {"uvicorn", "httptools", "uvloop", "aiohttp", "prometheus-client"} <= {*names}


def test_image_lock_versions_equal_cpu_image() -> None:
    simulated, cpu = dict(pinned("simulated")), dict(pinned("cpu"))
    assert {name: cpu[name] for name in simulated} == simulated


def test_image_is_built_for_the_cluster() -> None:
    assert [image.dockerfile for image in IMAGES if image.name == "engine-simulated"] == [
        IMAGE / "simulated.Dockerfile"
    ]
