"""Work of those who were refused and told when to come back: what of it is for replicas, and for which.

Arrivals are first attempts, so this work is in no forecast. Told are times at which there will be room, by the replicas
that are on their way: these will serve it, and a replica that is ordered now and ready after them only what they leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from plimsoll.core.autoscaler.allowance import allowed
from plimsoll.core.autoscaler.seen import TierSeen
from plimsoll.core.autoscaler.tier import Tier
from plimsoll.core.chance import beyond
from plimsoll.core.forecast import Forecast
from plimsoll.core.lifecycle import Eta, eta

_USED: Final = 0.9  # of a load line: that more of it serves who comes back would leave no room for chance


class Owed(NamedTuple):
    """GPU-seconds. left: for which replicas are to be ordered. relied: that those on their way will serve, which is no
    reason for more of them and the reason for these."""

    left: float = 0.0
    relied: float = 0.0


NOTHING: Final = Owed()


def by_chance(
    told_gpu_s: float, coming: Forecast, request_gpu_s: float, missed: float, running: float, cv2: float
) -> Owed:
    """Of a tier whose replicas are all there: as many as are refused by chance of what comes within a start-up say
    nothing of it. missed: share of requests that the promise allows; cv2: of the gaps between arrivals."""
    requests = coming.work * coming.horizon_s / request_gpu_s
    return Owed(beyond(told_gpu_s, allowed(missed, requests, running, cv2) * request_gpu_s))


def while_some_start(
    told_gpu_s: float, tier: Tier, there: TierSeen, coming: Forecast, work: float, now_s: float
) -> Owed:
    """work: of a replica at its load line, GPU-seconds a second; 0 where that is not known."""
    found = [eta(tier.ledger, pod, now_s) for pod in there.starting if pod.refused is None]
    etas_s = sorted(one.likely_s for one in found if isinstance(one, Eta))
    left = max(0.0, told_gpu_s - _served_gpu_s(work, there.ready, etas_s, coming))
    return Owed(left, max(0.0, told_gpu_s - _served_gpu_s(work, there.ready, (), coming)) - left)


def _served_gpu_s(work: float, ready: int, etas_s: Sequence[float], coming: Forecast) -> float:
    """Work beyond the forecast that ready replicas, and others from these times on, serve before one that is ordered
    now is ready."""
    served, horizon_s = 0.0, coming.horizon_s
    for serving, (from_s, to_s) in enumerate(pairwise([0.0, *etas_s, horizon_s]), start=ready):
        spare = _USED * work * serving - coming.work
        served += max(0.0, spare) * max(0.0, min(to_s, horizon_s) - from_s)
    return served
