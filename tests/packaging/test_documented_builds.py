"""What the `docker build` lines of the pages say is what `make images` and CI build, but for the settings of pip."""

from __future__ import annotations

import contextlib
import filecmp
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from e2e.cluster import images

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"docker build ((?:--build-arg \w+ )*)-f (\S+)(?: --target (\S+))? -t \S+ ([\w.-]+)")


class Build(NamedTuple):
    """One build. args: names of the build arguments."""

    dockerfile: str
    args: frozenset[str]
    target: str
    context: str


def documented() -> dict[Build, str]:
    """The builds of the pages and of the Dockerfiles' comments, with one place of each."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    pages += [*(ROOT / "engine-image").glob("*.md"), *(ROOT / "engine-image").glob("*.Dockerfile")]
    pages.append(ROOT / "operator" / "Dockerfile")
    return {
        Build(file, frozenset(args.replace("--build-arg", "").split()), target, context): str(page.relative_to(ROOT))
        for page in pages
        for args, file, target, context in LINE.findall(page.read_text())
    }


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> set[Build]:
    """The builds that the cluster's scripts would run, without a builder."""
    found: set[Build] = set()

    def build(
        image: str,
        context: Path,
        *,
        file: str = "Dockerfile",
        args: Mapping[str, str] | None = None,
        target: str = "",
        network: str = "none",
    ) -> None:
        known = [*(ROOT / "engine-image").glob("*.Dockerfile"), ROOT / "operator" / "Dockerfile"]
        (same,) = (one for one in known if filecmp.cmp(one, context / file, shallow=False))
        folder = next(name for name in (".", "engine-image") if has_all(ROOT / name, context))
        found.add(Build(str(same.relative_to(ROOT)), frozenset(args or ()), target, folder))

    @contextlib.contextmanager
    def no_settings() -> Iterator[dict[str, str]]:
        yield {}

    monkeypatch.setattr(images, "build", build)
    monkeypatch.setattr(images.pip_settings, "settings", no_settings)
    monkeypatch.setattr(images.base_image, "reference", lambda: "debian")
    for image in images.IMAGES:
        if not image.dockerfile.is_relative_to(ROOT / "e2e"):
            images._build(image)
    images.check_cuda()
    return found


def has_all(folder: Path, context: Path) -> bool:
    """Whether a folder has all files of a build context, but for the Dockerfile at its top."""
    files = [path for path in context.rglob("*") if path.is_file() and path.name != "Dockerfile"]
    return all((folder / path.relative_to(context)).is_file() for path in files)


def test_documented_builds_are_those_that_run(ran: set[Build]) -> None:
    found = documented()
    assert {build: found[build] for build in found.keys() - ran} == {}
    assert ran - found.keys() == set()
