"""Demand history from a metrics store, for the time before the operator observed the service.

Problem: the daily profile needs two days, and a metrics store may hold weeks. The store has request rates, smoothed
over minutes; the forecast needs work, sampled every second.

Idea: replay the minutes through `observe`, at the current cost of a request. Only the daily and weekly profiles and the
growth statistics of the result are used. Level, noise and change-point tests stay those of the operator's own samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from plimsoll.core.demand.demand_state import DemandState, observe
from plimsoll.core.demand.serialization import from_dict, to_dict

_CURRENT_PARTS: Final = 4  # stored parts of the growth that cover the last minutes; the others cover all time


def replay_history(minutes: Iterable[tuple[float, float]], request_gpu_s: float) -> DemandState:
    """Return the state after these minutes. minutes: end (seconds since the epoch) and requests/s, oldest first.

    request_gpu_s: GPU-seconds of a request, the same at all times. Two weeks take some seconds to compute.
    """
    state = DemandState()
    for at_s, rate_per_s in minutes:
        state = observe(state, at_s, rate_per_s * request_gpu_s)
    return state


def has_history(state: DemandState) -> bool:
    """Whether the state has at least one half hour of the day from its own samples."""
    return state.season.day.bins_seen > 0


def with_history(state: DemandState, history: DemandState) -> DemandState:
    """Return the state with the seasonality and growth of `history`, a state that `replay_history` returned.

    The minutes of `history` must end where `state` begins.
    """
    own_dict, history_dict = to_dict(state), to_dict(history)
    growth_parts = [*own_dict["growth"][:_CURRENT_PARTS], *history_dict["growth"][_CURRENT_PARTS:]]
    return from_dict({**own_dict, "season": history_dict["season"], "growth": growth_parts})
