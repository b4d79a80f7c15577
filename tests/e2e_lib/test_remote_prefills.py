"""Rounds of remote prefills: one that missed a deadline is made again, under the outcome that engines count."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from e2e.lib import remote_prefills
from e2e.lib.metrics import Samples


def _page(**counts: int) -> Samples:
    name = remote_prefills.METRIC
    lines = [f'{name}{{outcome="{outcome}"}} {count}' for outcome, count in counts.items()]
    return Samples.parse("\n".join([f"# TYPE {name} counter", *lines, ""]))


def test_timeout_is_an_outcome_of_engines() -> None:
    contract = json.loads((resources.files("plimsoll.api") / "contract.json").read_text())
    assert remote_prefills.TIMEOUT in contract["remote_prefill_outcomes"]


def test_outcomes_without_requests_are_left_out() -> None:
    assert remote_prefills.outcomes(_page(remote=3, timeout=0)) == {"remote": 3}


def test_round_with_timeout_is_made_again() -> None:
    rounds = iter([{"remote": 1, "timeout": 1}, {"remote": 2, "rejected": 1}])
    assert remote_prefills.first_in_time(lambda: next(rounds), lambda one: one) == {"remote": 2, "rejected": 1}


def test_only_rounds_with_timeouts_fail() -> None:
    with pytest.raises(AssertionError, match="each of 4 rounds"):
        remote_prefills.first_in_time(lambda: {"timeout": 1}, lambda one: one)
