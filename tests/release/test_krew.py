"""The krew plugin of a release: its manifest, its archive, and its program, linked as krew does it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from release import krew

VERSION, URL = "1.2.3", "https://example.com/org/plimsoll/releases/download/v1.2.3"
ROOT = Path(__file__).parents[2]

# Answers as Python does: a version, a virtual environment that notes what pip is asked for, and all else for real.
PYTHON = """#!/bin/sh
case "$1 $2 $3" in
  "-P -m venv") test "$4" = --clear && rm -rf "$5" && mkdir -p "$5/bin" && cp "$0" "$5/bin/python" ;;
  "-P -m pip") echo "$@" >> "$NOTES" ;;
  *) exec {python} "$@" ;;
esac
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("dist")
    assert krew.main([VERSION, URL, str(made)]) == 0
    return made


@pytest.fixture
def program(folder: Path, tmp_path: Path) -> Path:
    """A link to the unpacked program, and a Python in the user's path."""
    with tarfile.open(folder / "kubectl-plimsoll-1.2.3.tar.gz") as archive:
        archive.extractall(tmp_path / "store", filter="data")
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    link = tmp_path / "links" / "kubectl-plimsoll"
    link.parent.mkdir()
    link.symlink_to("../store/kubectl-plimsoll")
    return link


def run(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    home = program.parents[1]
    path = f"{home / 'bin'}:{os.environ['PATH']}"
    env = {"PATH": path, "HOME": str(home), "NOTES": str(home / "notes"), **environment}
    return subprocess.run([program, *arguments], env=env, cwd=home, capture_output=True, text=True, timeout=120)


def test_manifest_names_the_archive_by_its_digest(folder: Path) -> None:
    found = yaml.safe_load((folder / "krew-plimsoll.yaml").read_text())
    assert found["metadata"]["name"] == "plimsoll"
    assert found["spec"]["version"] == "v1.2.3"
    assert found["spec"]["homepage"] == "https://example.com/org/plimsoll"
    [platform] = found["spec"]["platforms"]
    name = platform["uri"].removeprefix(f"{URL}/")
    assert platform["sha256"] == hashlib.sha256((folder / name).read_bytes()).hexdigest()
    with tarfile.open(folder / name) as archive:
        assert archive.getmember(platform["bin"]).mode == 0o755


def test_archive_is_the_same_each_time(folder: Path) -> None:
    assert krew.archive(VERSION) == (folder / krew.archive_name(VERSION)).read_bytes()


def test_first_call_installs_locked_packages_once(program: Path) -> None:
    for _ in range(2):
        done = run(program, "plan", "--help")
        assert done.returncode == 0, done.stderr
        assert "usage: plimsoll plan" in done.stdout
    [asked] = (program.parents[1] / "notes").read_text().splitlines()
    assert "--require-hashes" in asked
    assert asked.endswith("store/requirements.txt")


def test_modules_of_the_current_folder_are_not_imported(program: Path) -> None:
    (program.parents[1] / "argparse.py").write_text("raise SystemExit('imported from the current folder')\n")
    done = run(program, "plan", "--help")
    assert done.returncode == 0, done.stderr


def test_packages_of_a_removed_python_are_replaced(program: Path) -> None:
    """The Python of a virtual environment is a link, which an upgrade of the machine's Python breaks."""
    assert run(program, "plan", "--help").returncode == 0
    [python] = (program.parents[1] / ".cache").glob("kubectl-plimsoll/1.2.3/bin/python")
    python.unlink()
    python.symlink_to(python.parent / "removed")
    done = run(program, "plan", "--help")
    assert done.returncode == 0, done.stderr
    assert "usage: plimsoll plan" in done.stdout


def test_old_python_is_named(program: Path) -> None:
    done = run(program, "plan", PLIMSOLL_PYTHON="false")
    assert done.returncode == 1
    assert "needs Python 3.11 or newer" in done.stderr


def test_release_publishes_the_plugin() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["chart"]["steps"]
    made = [number for number, step in enumerate(steps) if "make krew" in step.get("run", "")]
    published = [number for number, step in enumerate(steps) if "gh release create" in step.get("run", "")]
    assert made < published
    assert len(made) == len(published) == 1
