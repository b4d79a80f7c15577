"""The changelog fragments fit the settings of towncrier, which collects them for a release."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOWNCRIER = PROJECT["tool"]["towncrier"]
FOLDER = ROOT / TOWNCRIER["directory"]
TYPES = [kind["directory"] for kind in TOWNCRIER["type"]]


def test_fragment_types_equal_those_of_the_readme() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert listed == TYPES == ["added", "changed", "deprecated", "removed", "fixed", "security"]


def test_fragments_are_named_by_type_and_have_text() -> None:
    files = [path for path in FOLDER.iterdir() if path.name not in ("README.md", Path(TOWNCRIER["template"]).name)]
    named = re.compile(rf"[a-z0-9-]+\.({'|'.join(TYPES)})\.md")
    assert [path.name for path in files if not named.fullmatch(path.name) or not path.read_text().strip()] == []


def test_changelog_has_the_start_string_once() -> None:
    assert (ROOT / TOWNCRIER["template"]).is_file()
    assert (ROOT / TOWNCRIER["filename"]).read_text().count(TOWNCRIER["start_string"]) == 1


def test_dev_environment_has_setuptools_for_the_wheel_test() -> None:
    [expected] = [one for one in PROJECT["project"]["optional-dependencies"]["dev"] if one.startswith("setuptools")]
    assert expected == PROJECT["build-system"]["requires"][0]
    assert re.search(r"^setuptools==", (ROOT / "requirements/dev.txt").read_text(), re.MULTILINE)
