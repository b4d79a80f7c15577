"""Profiles, start-up times and policies as users write them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from plimsoll.sim import profile, startup
from plimsoll.sim.errors import BadInput

COEFFICIENTS = {"base": 0.01, "anypre": 0.0, "pretok": 1e-5, "preattn": 0.0, "dec": 1e-5, "ctx": 1e-8}


def test_profile_load_builtin_profiles() -> None:
    assert profile.load("h200-8b").hot is not None
    assert profile.load("h100x2-32b").layers == 64
    with pytest.raises(BadInput, match=r"known are .*h200-8b"):
        profile.load("h300")


def test_profile_load_user_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(COEFFICIENTS))
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
        ({"hot_share": 0.25}, "hot_share must be above cool_share"),
        ({"cool_share": -0.1}, "cool_share"),
    ],
)
def test_profile_parse_invalid_value_is_rejected(change: dict[str, object], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        profile.parse({**COEFFICIENTS, **change})


def test_startup_parse_fixed_uniform_and_listed(tmp_path: Path) -> None:
    listed = tmp_path / "starts.json"
    listed.write_text("[40, 55.5]")
    random = Random(1)
    fixed, spread, drawn = (startup.parse(text) for text in ("60", "uniform:100,135", str(listed)))
    assert sum(seconds for _, seconds in fixed.sample(random)) == pytest.approx(60.0)
    lengths = [sum(seconds for _, seconds in spread.sample(random)) for _ in range(200)]
    assert min(lengths) >= 100.0
    assert max(lengths) <= 135.0
    assert max(lengths) - min(lengths) > 20.0
    assert {round(sum(s for _, s in drawn.sample(random)), 6) for _ in range(50)} == {40.0, 55.5}


def test_startup_parse_one_value_per_line(tmp_path: Path) -> None:
    listed = tmp_path / "starts.txt"
    listed.write_text("40\n55.5\n")
    assert startup.parse(str(listed)) == startup.StartupDistribution(samples_s=(40.0, 55.5))


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "uniform:5", "uniform:9,3", "uniform:a,b", "1e9"])
def test_startup_parse_malformed_text_is_rejected(text: str) -> None:
    with pytest.raises(BadInput, match="--start-up"):
        startup.parse(text)


@pytest.mark.parametrize("text", ["[]", "{}", "[1, -2]", '["a"]', "x", "", "5\nnan", "5\n-1", "5\nx"])
def test_startup_parse_malformed_file_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(BadInput, match="--start-up"):
        startup.parse(str(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [("[" * 100_000, "too deep"), ("[1" + "0" * 400 + "]", "a number of 401 digits"), ("\0", "not JSON")],
)
def test_json_inputs_unreadable_json_is_rejected_with_file_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "evil.json"
    path.write_text(text)
    for read in (profile.load, profile.document, startup.parse):
        with pytest.raises(BadInput, match=rf"evil\.json: not JSON: .*{words}|evil\.json: {words}"):
            read(str(path))


def test_document_binary_file_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match=r"b\.json: not JSON"):
        profile.document(str(tmp_path / "b.json"))


def test_profile_parse_number_beyond_float_is_rejected() -> None:
    with pytest.raises(BadInput, match="base must be a number"):
        profile.parse({**COEFFICIENTS, "base": 10**400})
