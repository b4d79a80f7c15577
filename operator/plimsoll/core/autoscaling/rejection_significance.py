"""Significance of rejections: the largest number that is within random variation.

Problem: with an SLO of 95 %, tiers near their SLO capacity may reject one request in twenty. Rejections are clustered,
because a full engine stays full for about one response. Scaling up for each cluster adds an engine that is ready only
after the cluster.

Idea: the allowed mean plus three standard errors. The overflow of c places under Poisson arrivals of load a has the
peakedness Z = 1 - m + a / (c + 1 + m - a), with m = a B the mean overflow (Riordan; Wilkinson 1956, "Theories for toll
traffic engineering in the USA"); c is the number of places from which the allowed share overflows. Counts over more
than a service time have a variance of 2 Z - 1 times their mean, because a stream whose interarrival times have the
squared coefficient of variation C has the peakedness (1 + C) / 2 (Fredericks 1980, "Congestion in blocking systems: a
simple approximation technique"). Likewise, bursty arrivals of peakedness z fill c places as Poisson arrivals of load a
/ z fill c / z places, each as wide as z (Hayward). Without requests in flight, rejections are independent.
"""

from __future__ import annotations

import math
from typing import Final

from plimsoll.core.capacity.peakedness import overflow_peakedness

_STANDARD_ERRORS: Final = 3.0
_MAX_IN_FLIGHT: Final = 10_000  # with more, the peakedness hardly changes


def insignificant_rejections(budget: float, requests: float, in_flight: float, arrival_cv2: float = 1.0) -> float:
    """Return the largest number of rejections out of `requests` that is still within random variation.

    budget: share of requests that may miss the SLO, in (0, 1). in_flight: requests at all engines. arrival_cv2: squared
    coefficient of variation of the interarrival times, at least 1.
    """
    mean = budget * requests
    arrival_peakedness = (1.0 + arrival_cv2) / 2.0
    rejection_peakedness = arrival_peakedness * overflow_peakedness(
        budget, round(min(in_flight / arrival_peakedness, _MAX_IN_FLIGHT))
    )
    return mean + _STANDARD_ERRORS * math.sqrt((2.0 * rejection_peakedness - 1.0) * mean * (1.0 - budget))
