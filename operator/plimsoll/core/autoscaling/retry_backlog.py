"""Work of rejected requests that were given a retry time.

Arrivals are first attempts, so the forecast does not contain this work. Retry times follow the expected readiness of
starting replicas, which serve the work. A replica that is ordered now serves only the remainder. What decides which
replicas stay is all of the work, as while none starts: a count is compared with its whole capacity, and the free
capacity of the ready ones is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from plimsoll.core.autoscaling.inputs import TierSnapshot
from plimsoll.core.autoscaling.rejection_significance import insignificant_rejections
from plimsoll.core.autoscaling.startup_time import Eta, eta
from plimsoll.core.autoscaling.tier_state import TierState
from plimsoll.core.demand.forecasting import Forecast
from plimsoll.core.stats import shrink

_MAX_UTILIZATION: Final = 0.9  # of the SLO capacity; the rest absorbs random variation


class RetryBacklog(NamedTuple):
    """Retry work in GPU-seconds. unassigned_gpu_s: work that needs further replicas. scheduled_gpu_s: work that
    ready and starting replicas will serve; it must not order more replicas, but keeps these from being cancelled."""

    unassigned_gpu_s: float = 0.0
    scheduled_gpu_s: float = 0.0


NO_BACKLOG: Final = RetryBacklog()


def significant_backlog(
    retry_gpu_s: float, forecast: Forecast, request_gpu_s: float, error_budget: float, in_flight: float, cv2: float
) -> RetryBacklog:
    """Return the backlog beyond random variation, for a tier whose replicas are all ready.

    error_budget: share of requests that may miss the SLO. cv2: that of the interarrival times.
    """
    requests = forecast.work * forecast.horizon_s / request_gpu_s
    return RetryBacklog(
        shrink(retry_gpu_s, insignificant_rejections(error_budget, requests, in_flight, cv2) * request_gpu_s)
    )


def backlog_during_startup(
    retry_gpu_s: float,
    tier: TierState,
    tier_snapshot: TierSnapshot,
    forecast: Forecast,
    replica_work: float,
    now_s: float,
) -> RetryBacklog:
    """Return the backlog of a tier with starting replicas.

    replica_work: SLO capacity of a replica, GPU-seconds per second; 0 if unknown.
    """
    etas = [eta(tier.startup_model, pod, now_s) for pod in tier_snapshot.starting if pod.unschedulable_reason is None]
    etas_s = sorted(one.likely_s for one in etas if isinstance(one, Eta))
    unassigned_gpu_s = max(0.0, retry_gpu_s - _served_gpu_s(replica_work, tier_snapshot.ready, etas_s, forecast))
    return RetryBacklog(unassigned_gpu_s, retry_gpu_s - unassigned_gpu_s)


def _served_gpu_s(replica_work: float, ready: int, etas_s: Sequence[float], forecast: Forecast) -> float:
    """Return the work beyond the forecast that ready and starting replicas serve within one start-up time."""
    served, horizon_s = 0.0, forecast.horizon_s
    for replicas, (from_s, to_s) in enumerate(pairwise([0.0, *etas_s, horizon_s]), start=ready):
        free_capacity = _MAX_UTILIZATION * replica_work * replicas - forecast.work
        served += max(0.0, free_capacity) * max(0.0, min(to_s, horizon_s) - from_s)
    return served
