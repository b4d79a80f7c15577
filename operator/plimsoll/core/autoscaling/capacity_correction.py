"""Sizings corrected by the rejections of the service (`rejection_feedback`) and by the ITL of a tier (`itl_limit`).

Both say how much more is needed than the model computes. They do not add up, so the one that needs more replicas
counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from plimsoll.core.autoscaling.inputs import ServiceSnapshot
from plimsoll.core.autoscaling.itl_limit import ItlLimit
from plimsoll.core.autoscaling.observations import SizingResult
from plimsoll.core.autoscaling.rejection_feedback import CapacityCorrection, RejectionSample
from plimsoll.core.autoscaling.snapshot_signals import in_flight, is_fully_ready
from plimsoll.core.autoscaling.tier_state import TierState
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable


def correct_sizings(
    corrections: dict[str, CapacityCorrection],
    sizings: Mapping[str, SizingResult | Unavailable],
    tiers: Mapping[str, TierState],
    snapshot: ServiceSnapshot,
    slo: Slo | None,
    now_s: float,
) -> dict[str, SizingResult | Unavailable]:
    """Return the sizings with more replicas in the tiers that are short, and update their corrections.

    Rejections concern the whole service: while a tier has too few replicas, they may be due to it. The short tier is
    the one whose engines have or just had waiting requests; without any, the one with the highest utilization by the
    model.
    """
    known = {
        name: sizing for name, sizing in sizings.items() if isinstance(sizing, SizingResult) and name in snapshot.tiers
    }
    corrected = dict(sizings)
    if not known or slo is None:
        return corrected
    rejected_share, running = snapshot.metrics.rejected_share, in_flight(snapshot.metrics)
    waiting = {
        name: corrections.setdefault(name, CapacityCorrection()).recent_waiting(
            _waiting_per_replica(snapshot, name), now_s
        )
        for name in known
    }
    short = max(
        known,
        key=lambda name: (
            waiting[name],
            _forecast_utilization(known[name], snapshot.tiers[name].replicas),
        ),
    )
    fully_ready = all(map(is_fully_ready, snapshot.tiers.values()))
    for name, sizing in known.items():
        tier_snapshot, correction = snapshot.tiers[name], corrections[name]
        tier_rejected = 0.0 if isinstance(rejected_share, Unavailable) or name != short else rejected_share
        required, cv2 = _fractional_replicas(sizing, sizing.replicas), tiers[name].capacity_state.arrival_cv2
        feedback = RejectionSample(tier_rejected, snapshot.metrics.arrivals, 1.0 - slo.share, running, cv2)
        correction.update(required, tier_snapshot.ready, fully_ready, feedback, now_s)
        itl_limit = tiers[name].itl_limit
        by_itl = itl_limit.correction(sizing.replica_work / sizing.request_gpu_s, slo.itl_s, now_s)
        candidates = [sizing]
        if by_itl > 1.0:
            candidates.append(_within_itl(sizing, itl_limit, by_itl))
        if not correction.is_negligible:
            candidates.append(_for_rejections(sizing, correction.factor))
        if len(candidates) > 1:
            corrected[name] = _larger(candidates)
    return corrected


def _larger(sizings: Sequence[SizingResult]) -> SizingResult:
    """Return the sizing with the most replicas, with the most of each count. Of equals the last."""
    binding = max(reversed(sizings), key=lambda one: (one.replicas, one.scale_down_replicas))
    return replace(binding, scale_down_replicas=max([one.scale_down_replicas for one in sizings]))


def _for_rejections(sizing: SizingResult, factor: float) -> SizingResult:
    """Return the sizing with so many times as many replicas."""
    counts = [_fractional_replicas(sizing, count) for count in (sizing.replicas, sizing.scale_down_replicas)]
    replicas, scale_down_replicas = (math.ceil(count * factor - 1e-9) for count in counts)
    return replace(
        sizing,
        replicas=replicas,
        scale_down_replicas=max(replicas, scale_down_replicas),
        capacity_correction=factor,
    )


def _within_itl(sizing: SizingResult, limit: ItlLimit, correction: float) -> SizingResult:
    """Return the sizing with as many replicas that none carries more than the limit."""
    capacity_per_s = sizing.replica_work / sizing.request_gpu_s
    carried_per_s = capacity_per_s / correction * (1.0 - sizing.headroom)
    replicas = max(sizing.replicas, math.ceil(sizing.rate_per_s / carried_per_s - 1e-9))
    retained = math.ceil(sizing.retained_rate_per_s / carried_per_s - 1e-9)
    return replace(
        sizing,
        replicas=replicas,
        scale_down_replicas=max(replicas, sizing.scale_down_replicas, retained),
        capacity_correction=correction,
        itl_limit=limit,
    )


def _fractional_replicas(sizing: SizingResult, replicas: int) -> float:
    """Return the count before it was rounded up, at least half a replica less.

    The correction applies to this number. A replica without load shows nothing of the model.
    """
    fractional = sizing.utilization(sizing.rate_per_s * sizing.request_gpu_s, 1) / (1.0 - sizing.headroom)
    return min(float(replicas), max(fractional, replicas - 0.5))


def _waiting_per_replica(snapshot: ServiceSnapshot, tier: str) -> int:
    """Return the requests that wait at each ready engine of the tier; 0 if unknown."""
    metrics, ready = snapshot.metrics.tiers.get(Role(tier)), snapshot.tiers[tier].ready
    waiting = 0.0 if metrics is None else metrics.lagging.waiting
    return 0 if isinstance(waiting, Unavailable) or not math.isfinite(waiting) else int(waiting / max(ready, 1))


def _forecast_utilization(sizing: SizingResult, replicas: int) -> float:
    """Return the forecast as a share of the replicas' SLO capacity."""
    return sizing.utilization(sizing.rate_per_s * sizing.request_gpu_s, max(replicas, 1))
