"""Profiles: those that come with the package, and files that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plimsoll.sim.profiles import PROFILE_FOLDER, ProfileError, load, parse

COEFFICIENTS: dict[str, Any] = {
    "base": 0.005,
    "anypre": -0.001,
    "pretok": 2e-5,
    "preattn": 1e-9,
    "dec": 1e-5,
    "ctx": 3e-8,
}


@pytest.mark.parametrize("path", sorted(PROFILE_FOLDER.glob("*.json")), ids=lambda path: str(path.stem))
def test_profile_every_packaged_one_loads(path: Path) -> None:
    made = load(path.stem)
    assert made.kv_tokens >= made.max_model_len > made.budget


def test_profile_six_coefficients_are_enough(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(COEFFICIENTS))
    made = load(str(path))
    assert (made.coefficients.base, made.hot, made.block_size) == (0.005, None, 16)


def test_profile_scaled_multiplies_times_and_keeps_limits() -> None:
    made = load("h200-8b")
    twice = made.scaled(2.0)
    assert twice.coefficients.base == 2 * made.coefficients.base
    assert twice.hot is not None
    assert made.hot is not None
    assert twice.hot.anypre == 2 * made.hot.anypre
    assert (twice.kv_tokens, twice.hinge_dec) == (made.kv_tokens, 2 * made.hinge_dec)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base": 0}, "base"),
        ({"base": None}, "base"),
        ({"anypre": -0.006}, "anypre"),
        ({"dec": -1e-9}, "dec"),
        ({"ctx": float("nan")}, "ctx"),
        ({"pretok": True}, "pretok"),
        ({"budget": 0}, "budget"),
        ({"block_size": 16.5}, "block_size"),
        ({"speed": 3}, "unknown key: speed"),
        ({"hot": {"base": 1}}, "anypre"),
        ({"hot": 3}, "hot must be an object"),
        ({"hot_share": 0.25}, "hot_share must be above cool_share"),
        ({"cool_share": -0.1}, "cool_share"),
        ({"budget": 100, "max_num_seqs": 200}, "max_num_seqs is above budget"),
        ({"consumer_factor": 0}, "consumer_factor"),
        ({"accelerator": 7}, "accelerator"),
        ({"mixture": 1}, "mixture"),
    ],
)
def test_profile_invalid_number_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ProfileError, match=words):
        parse({**COEFFICIENTS, **change})


def test_profile_other_than_object_is_rejected() -> None:
    with pytest.raises(ProfileError, match="object"):
        parse([1])
