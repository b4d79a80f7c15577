"""The simulated engine's image: the launcher's lines are the other images', every package is pinned."""

from __future__ import annotations

import re
from pathlib import Path

from e2e.cluster.images import IMAGES

IMAGE = Path(__file__).resolve().parents[3] / "engine-image"
LAUNCHER = "# The launcher: these lines are the same"


def test_the_launcher_comes_by_the_same_lines_as_in_the_other_images() -> None:
    simulated, cpu = ((IMAGE / f"{name}.Dockerfile").read_text() for name in ("simulated", "cpu"))
    launcher = simulated[simulated.index(LAUNCHER) :].replace("COPY engine-image/", "COPY ")
    assert launcher == cpu[cpu.index(LAUNCHER) :]


def test_the_lock_pins_every_package_once_and_has_what_the_middleware_imports() -> None:
    lines = [line for line in (IMAGE / "simulated.lock").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9._-]+==[0-9.]+", line) for line in lines)
    names = [line.split("==")[0] for line in lines]
    assert len(names) == len(set(names))
    assert {"uvicorn", "httptools", "uvloop", "aiohttp", "prometheus_client"} <= {*names}


def test_packages_that_both_engines_have_are_the_same() -> None:
    locks = [
        dict(line.lower().split("==") for line in (IMAGE / f"{name}.lock").read_text().splitlines() if "==" in line)
        for name in ("simulated", "cpu")
    ]
    assert {name: locks[1][name] for name in locks[0]} == locks[0]


def test_the_cluster_builds_it() -> None:
    assert [image.dockerfile for image in IMAGES if image.name == "engine-simulated"] == [
        IMAGE / "simulated.Dockerfile"
    ]
