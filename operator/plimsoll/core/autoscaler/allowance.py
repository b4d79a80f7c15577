"""How many refusals the promise allows for by chance: fewer say nothing of the fleet.

Problem: who promises 95 % may refuse one request in twenty for ever, and a fleet near its load line does. Those refused
come in rows, since an engine that is full stays so for about an answer; and each row, taken for load that is still to
come or for a model that is short, bought an engine that was there when the row was over.

Idea: the mean that is allowed and three standard errors. What overflows from a group of places that Poisson arrivals
fill has a variance of Z times its mean (Riordan; Wilkinson 1956, "Theories for toll traffic engineering in the USA"):
Z = 1 - m + a / (c + 1 + m - a) for the load a, of which m = a B overflows from c places. c is the number of places from
which the allowed share overflows. With nobody in flight Z is 1: each is refused by himself.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

_CHANCE: Final = 3.0  # standard errors
_MOST: Final = 10_000  # in flight; more are about as peaked


def allowed(budget: float, requests: float, in_flight: float) -> float:
    """Most of so many first attempts that are refused by chance where the share `budget` is in the mean.

    budget: share of requests that may miss the promise, in (0, 1). in_flight: at all engines.
    """
    mean = budget * requests
    peaked = _peakedness(budget, round(min(in_flight, _MOST)))
    return mean + _CHANCE * math.sqrt(peaked * mean * (1.0 - budget))


@lru_cache(1024)
def _peakedness(budget: float, in_flight: int) -> float:
    """Variance over mean of what overflows, in the mean, with so many let in."""
    if in_flight <= 0:
        return 1.0
    load = in_flight / (1.0 - budget)
    places, lost = 0, 1.0
    while lost > budget:
        places += 1
        lost = load * lost / (places + load * lost)  # Erlang's loss, place by place
    over = load * lost
    return 1.0 - over + load / (places + 1.0 + over - load)
