"""Remote prefills of a decode tier, in rounds.

On a starved machine a remote prefill may miss its deadline, and the decode engine then computes the prompt, by design:
such a round proves nothing. Another one does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from e2e.lib.metrics import Samples
from plimsoll.api.contract import engine_contract

METRIC = engine_contract().metrics["remote_prefills"]
TIMEOUT = "timeout"  # the outcome of a remote prefill beyond its deadline
ROUNDS = 4

T = TypeVar("T")


def outcomes(grown: Samples) -> dict[str, int]:
    """How many remote prefills had each outcome; those that none had are left out."""
    return {outcome: round(count) for outcome, count in grown.by(METRIC, "outcome").items() if count}


def first_in_time(run: Callable[[], T], counted: Callable[[T], dict[str, int]]) -> T:
    """The first round in which no remote prefill missed its deadline. counted: the outcomes of a round.

    Raises AssertionError if there is none.
    """
    rounds: list[dict[str, int]] = []
    for _ in range(ROUNDS):
        result = run()
        rounds.append(counted(result))
        if not rounds[-1].get(TIMEOUT):
            return result
    raise AssertionError(f"each of {ROUNDS} rounds had remote prefills beyond the deadline: {rounds}")
