"""What a wheel of the project holds, as setuptools copies it by the project's own configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The step of a build that gathers files: a whole build fetches its requirements from an index.
_GATHER = """
import sys, tomllib
from setuptools import Distribution, find_namespace_packages
root, out = sys.argv[1:]
own = tomllib.load(open(f"{root}/pyproject.toml", "rb"))["tool"]["setuptools"]
found = find_namespace_packages(*own["packages"]["find"]["where"])
about = {"packages": found, "package_dir": {"": "operator"}, "package_data": own["package-data"]}
built = Distribution({**about, "script_name": "setup.py"})
step = built.get_command_obj("build_py")
step.build_lib = out
step.ensure_finalized()
step.run()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What lies in it."""
    out = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-W", "ignore", "-c", _GATHER, str(ROOT), str(out)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True, timeout=100)
    return out


@pytest.mark.parametrize("name", ["sim/profiles.py", "sim/profiles/h200-8b.json", "api/contract.json"])
def test_wheel_data_file_equals_its_source(wheel: Path, name: str) -> None:
    bundled, source = wheel / "plimsoll" / name, ROOT / "operator" / "plimsoll" / name
    assert bundled.is_file()
    assert not bundled.is_symlink()
    assert bundled.read_bytes() == source.read_bytes()


def test_the_module_is_found_before_the_folder_of_its_name(wheel: Path) -> None:
    asking = "from plimsoll.sim import profile, profiles; print(profiles.__file__, profile.load('h200-8b').layers)"
    words = [sys.executable, "-c", asking]
    done = subprocess.run(words, env={"PYTHONPATH": str(wheel)}, cwd=wheel, check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(wheel / "plimsoll" / "sim" / "profiles.py"), "32"]
