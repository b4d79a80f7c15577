"""The programs of the engine images start from the files that the Dockerfiles copy, and from no others."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPY = re.compile(r"^COPY (?!--from)(?P<sources>.+) (?P<target>/opt/plimsoll\S*)$", re.MULTILINE)


def copy_tree(dockerfile: Path, context: Path, folder: Path) -> None:
    """Copy what the image has below /opt/plimsoll, as the builder does."""
    for line in COPY.finditer(dockerfile.read_text()):
        target = folder / line["target"].removeprefix("/opt/plimsoll").lstrip("/")
        for source in map(context.joinpath, line["sources"].split()):
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
                continue
            is_folder = line["target"].endswith("/") or target.is_dir()
            place = target / source.name if is_folder else target
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place)


@pytest.mark.parametrize(
    ("name", "context", "modules"),
    [
        ("simulated", ROOT, ("simulated.server", "launcher.main", "launcher.asgi")),
        ("cpu", ROOT / "engine-image", ("launcher.main", "launcher.asgi")),
        ("cuda", ROOT / "engine-image", ("launcher.main", "launcher.asgi")),
    ],
)
def test_programs_import_only_what_the_image_copies(
    tmp_path: Path, name: str, context: Path, modules: tuple[str, ...]
) -> None:
    copy_tree(ROOT / "engine-image" / f"{name}.Dockerfile", context, tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    program = f"import {', '.join(modules)}"
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "contract.json").is_file()
