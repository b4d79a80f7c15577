"""Profiles, start-up times and policies as users write them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from plimsoll.core.picking.endpoint import Role
from plimsoll.sim import policy, profile, startup
from plimsoll.sim.errors import BadInput
from tests.sim import lab

SERVE = {Role.SERVE: (1, 4)}
BOTH = {Role.PREFILL: (1, 4), Role.DECODE: (1, 4)}
SIX = {"base": 0.01, "anypre": 0.0, "pretok": 1e-5, "preattn": 0.0, "dec": 1e-5, "ctx": 1e-8}


def test_the_built_in_profiles_can_be_read() -> None:
    assert profile.load("h200-8b").hot is not None
    assert profile.load("h100x2-32b").layers == 64
    with pytest.raises(BadInput, match=r"known are .*h200-8b"):
        profile.load("h300")


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(SIX))
    assert profile.load(str(path)).coefficients.base == 0.01
    with pytest.raises(BadInput, match="No such file"):
        profile.load(str(tmp_path / "none.json"))
    path.write_text("{")
    with pytest.raises(BadInput, match="not JSON"):
        profile.load(str(path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base": 0}, "base"),
        ({"anypre": -1}, "anypre"),
        ({"dec": -1e-9}, "dec"),
        ({"ctx": float("nan")}, "ctx"),
        ({"pretok": "much"}, "pretok"),
        ({"kv_tokens": 1.5}, "kv_tokens"),
        ({"budget": 0}, "budget"),
        ({"budget": 100, "max_num_seqs": 200}, "max_num_seqs is above budget"),
        ({"hot": {"base": 1}}, "anypre"),
        ({"hot": 3}, "hot"),
        ({"hinge": 3}, "unknown key: hinge"),
    ],
)
def test_a_profile_that_makes_no_sense_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        profile.parse({**SIX, **change})


def test_start_up_times(tmp_path: Path) -> None:
    listed = tmp_path / "starts.json"
    listed.write_text("[40, 55.5]")
    random = Random(1)
    fixed, spread, drawn = (startup.parse(text) for text in ("60", "uniform:100,135", str(listed)))
    assert sum(seconds for _, seconds in fixed.draw(random)) == pytest.approx(60.0)
    lengths = [sum(seconds for _, seconds in spread.draw(random)) for _ in range(200)]
    assert min(lengths) >= 100.0
    assert max(lengths) <= 135.0
    assert max(lengths) - min(lengths) > 20.0
    assert {round(sum(s for _, s in drawn.draw(random)), 6) for _ in range(50)} == {40.0, 55.5}


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "uniform:5", "uniform:9,3", "uniform:a,b", "1e9"])
def test_start_up_times_that_are_none(text: str) -> None:
    with pytest.raises(BadInput, match="--start-up"):
        startup.parse(text)


@pytest.mark.parametrize("text", ["[]", "{}", "[1, -2]", '["a"]', "x"])
def test_files_of_start_up_times_that_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(BadInput, match="--start-up"):
        startup.parse(str(path))


def test_policies_by_their_words() -> None:
    hardware = lab.plant()
    assert policy.parse("plimsoll", SERVE, hardware).operator
    static = policy.parse("static:3", SERVE, hardware)
    assert static.initial == {Role.SERVE: 3}
    assert not static.operator
    assert policy.parse("static:2,1,gated=1", BOTH, hardware).operator
    assert policy.parse("static:2,1", BOTH, hardware).initial == {Role.PREFILL: 2, Role.DECODE: 1}
    assert policy.parse("follower:margin=0.6,spare=1,gated=0", SERVE, hardware).operator is False


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kpa", "kpa is not there yet"),
        ("clairvoyant", "not there yet"),
        ("dynamo-load:x=1", "not there yet"),
        ("magic", "none of plimsoll"),
        ("plimsoll:3", "none of"),
        ("static", "1 whole number"),
        ("static:a", "1 whole number"),
        ("static:1,2", "1 whole number"),
        ("static:-1", "1 whole number"),
        ("static:1,gated=x", "gated"),
        ("static:1,speed=2", "unknown speed"),
        ("follower:margin=0", "above 0"),
        ("follower:margin=x", "margin|could not convert"),
        ("follower:spare=-1", "at least 0"),
        ("follower:lead=2", "unknown lead"),
    ],
)
def test_policies_that_are_none_are_refused(text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        policy.parse(text, SERVE, lab.plant())
