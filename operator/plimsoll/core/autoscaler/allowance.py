"""How many refusals the promise allows for by chance: fewer say nothing of the fleet.

Problem: who promises 95 % may refuse one request in twenty for ever, and a fleet near its load line does. Those refused
come in rows, since an engine that is full stays so for about an answer; and each row, taken for a model that is short,
or for load that is still to come when they come back, bought an engine that was there when the row was over.

Idea: the mean that is allowed and three standard errors. What overflows from c places that Poisson arrivals of load a
fill is as peaked as Z = 1 - m + a / (c + 1 + m - a), of which m = a B overflows (Riordan; Wilkinson 1956, "Theories for
toll traffic engineering in the USA"); c is the number of places from which the allowed share overflows. Counts over
more than a stay have a variance of 2 Z - 1 times their mean, since a stream whose gaps have a squared coefficient of
variation C is as peaked as (1 + C) / 2 (Fredericks 1980, "Congestion in blocking systems: a simple approximation
technique"). By the same token arrivals that bunch, peaked as z, fill c places as Poisson arrivals of load a / z fill
c / z, each as wide as z (Hayward). With nobody in flight each is refused by himself.
"""

from __future__ import annotations

import math
from typing import Final

from plimsoll.core.overflow import peakedness

_CHANCE: Final = 3.0  # standard errors
_MOST: Final = 10_000  # in flight; more are about as peaked


def allowed(budget: float, requests: float, in_flight: float, arrival_cv2: float = 1.0) -> float:
    """Most of so many first attempts that are refused by chance where the share `budget` is in the mean.

    budget: share of requests that may miss the promise, in (0, 1). in_flight: at all engines. arrival_cv2: of the gaps
    between arrivals, 1 or more.
    """
    mean = budget * requests
    arriving = (1.0 + arrival_cv2) / 2.0
    refused = arriving * peakedness(budget, round(min(in_flight / arriving, _MOST)))
    return mean + _CHANCE * math.sqrt((2.0 * refused - 1.0) * mean * (1.0 - budget))
