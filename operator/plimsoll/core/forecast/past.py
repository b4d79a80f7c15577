"""A past that the forecast has not seen itself, from a store of metrics.

Problem: the shape of the day is known after two days, and a store of metrics may have weeks; but what it has are
requests, smoothed over minutes, and what is forecast is work, seen by the second.

Idea: the minutes go through `observe` as if they had been seen, at what a request costs today; of what comes out only
the shapes of day and week and the growth are taken. Level, noise and the tests for leaps stay those of own seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from plimsoll.core.forecast.state import State, observe
from plimsoll.core.forecast.stored import from_dict, to_dict

_RUNNING: Final = 4  # parts of the stored growth that tell of the last minutes; the others tell of all time


def replay(minutes: Iterable[tuple[float, float]], request_gpu_s: float) -> State:
    """The state after these minutes. minutes: end (s since the epoch) and requests per s, oldest first.

    request_gpu_s: what a request costs, taken as the same at all times. Some seconds of computing for two weeks.
    """
    state = State()
    for at_s, rate_per_s in minutes:
        state = observe(state, at_s, rate_per_s * request_gpu_s)
    return state


def has_past(state: State) -> bool:
    """Whether it knows at least one half hour of the day by itself."""
    return state.season.day.seen > 0


def with_past(state: State, past: State) -> State:
    """The state with the shapes and the growth of `past`, a state from `replay` that ends where this one begins."""
    own, old = to_dict(state), to_dict(past)
    grown = [*own["growth"][:_RUNNING], *old["growth"][_RUNNING:]]
    return from_dict({**own, "season": old["season"], "growth": grown})
