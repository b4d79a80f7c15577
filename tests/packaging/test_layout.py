"""The source root is called `operator`, like a module of the standard library: it may hold no Python of its own."""

from __future__ import annotations

import operator
from pathlib import Path

from plimsoll.api.contract import contract
from plimsoll.sim import profiles

ROOT = Path(__file__).parents[2]


def test_the_source_root_hides_no_standard_module() -> None:
    assert list((ROOT / "operator").glob("*.py")) == []
    folders = [p.name for p in (ROOT / "operator").iterdir() if p.is_dir() and not p.name.endswith(".egg-info")]
    assert folders == ["plimsoll"]
    assert operator.itemgetter(0)([7]) == 7


def test_operator_and_engine_image_read_one_contract() -> None:
    bundled = ROOT / "operator" / "plimsoll" / "api" / "contract.json"
    assert bundled.resolve() == ROOT / "engine-image" / "contract.json"
    assert contract().ports["api"] == 8000


def test_simulator_and_light_engine_read_one_kind_of_profile() -> None:
    light = ROOT / "engine-image" / "simulated"
    assert Path(profiles.__file__).resolve() == light / "profiles.py"
    assert profiles.FOLDER.resolve() == light / "profiles"
