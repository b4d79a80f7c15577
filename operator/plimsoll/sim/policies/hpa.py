"""Kubernetes' HorizontalPodAutoscaler (autoscaling/v2): from a metric to a replica count.

Problem: most peers leave the last step to it, and its tolerance, windows and rates decide as much as their metric does.

Idea: its four documented stages, as in its controller: a proposal from the metric, in whole thousandths; stabilization
(up: the smallest proposal of the window, down: the largest); limits on the change in each policy's period, of which the
most permissive counts; the bounds. Pods without a metric count as at their target for a scale-down and as idle for a
scale-up. Starting replicas are such pods here. Kubernetes excludes Pending pods (images, or no GPU left) for a
scale-down; this is not modelled.

https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/#algorithm-details
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SYNC_S: Final = 15.0
TOLERANCE: Final = 0.1


@dataclass(frozen=True, slots=True)
class HpaRateLimit:
    """Largest change within a period: `value` replicas, or per cent of those at the period's start."""

    value: float
    period_s: float
    percent: bool = True

    def max_replicas(self, initial: int) -> int:
        return math.ceil(initial * (1.0 + self.value / 100.0)) if self.percent else initial + int(self.value)

    def min_replicas(self, initial: int) -> int:
        return int(initial * (1.0 - self.value / 100.0)) if self.percent else initial - int(self.value)


@dataclass(frozen=True, slots=True)
class HpaBehavior:
    """The `behavior` of a HorizontalPodAutoscaler. up_window_s, down_window_s: stabilization windows. Defaults are
    those of Kubernetes.
    """

    up_window_s: float = 0.0
    down_window_s: float = 300.0
    up_limits: tuple[HpaRateLimit, ...] = (HpaRateLimit(100.0, 15.0), HpaRateLimit(4.0, 15.0, percent=False))
    down_limits: tuple[HpaRateLimit, ...] = (HpaRateLimit(100.0, 15.0),)
    tolerance: float = TOLERANCE


def propose_from_pods(
    values: Sequence[float], missing: int, target: float, current: int, tolerance: float = TOLERANCE
) -> int | None:
    """Return the proposal for a metric with an average target per pod; None if no pod reports it.

    values: of the pods that report it. missing: running pods that do not. current: ordered replicas.
    """
    if not values:
        return None
    milli, target_milli = [_thousandths(value) for value in values], _thousandths(target)
    ratio = _ratio(milli, target_milli)
    if not missing:
        return current if _is_within_tolerance(ratio, tolerance) else math.ceil(ratio * len(milli))
    if ratio == 1.0:
        return current
    milli += [target_milli if ratio < 1.0 else 0] * missing
    full_ratio = _ratio(milli, target_milli)
    if _is_within_tolerance(full_ratio, tolerance) or (ratio < 1.0 < full_ratio) or (full_ratio < 1.0 < ratio):
        return current
    proposed = math.ceil(full_ratio * len(milli))
    reverses = (full_ratio < 1.0 and proposed > current) or (full_ratio > 1.0 and proposed < current)
    return current if reverses else proposed


def propose_from_total(usage: float, target: float, current: int, tolerance: float = TOLERANCE) -> int:
    """Return the proposal for an external metric with an average target per replica, as KEDA's."""
    total, target_milli = _thousandths(usage), _thousandths(target)
    if current and _is_within_tolerance(total / (target_milli * current), tolerance):
        return current
    return math.ceil(total / target_milli)


class Hpa:
    """One autoscaler of one tier. All times are of one clock, seconds."""

    def __init__(self, behavior: HpaBehavior, bounds: tuple[int, int]) -> None:
        self._behavior, self._bounds = behavior, bounds
        self._proposals: list[tuple[float, int]] = []
        self._changes: list[tuple[float, int]] = []

    def sync(self, now_s: float, current: int, proposed: int | None) -> int:
        """Return the replicas of one sync. current: ordered replicas. proposed: None without the metric."""
        minimum, maximum = self._bounds
        if not self._proposals:
            self._proposals.append((now_s, current))
        if not minimum <= current <= maximum:
            desired = min(maximum, max(minimum, current))
        elif proposed is None:
            desired = current
        else:
            desired = self._rate_limited(now_s, current, self._stabilized(now_s, current, proposed))
        if desired != current:
            self._changes.append((now_s, desired - current))
        return desired

    def _stabilized(self, now_s: float, current: int, proposed: int) -> int:
        behavior = self._behavior
        up = min([proposed, *(count for at_s, count in self._proposals if at_s > now_s - behavior.up_window_s)])
        down = max([proposed, *(count for at_s, count in self._proposals if at_s > now_s - behavior.down_window_s)])
        oldest_s = now_s - max(behavior.up_window_s, behavior.down_window_s)
        self._proposals = [one for one in self._proposals if one[0] > oldest_s] + [(now_s, proposed)]
        return min(max(current, up), down)

    def _rate_limited(self, now_s: float, current: int, desired: int) -> int:
        behavior, (minimum, maximum) = self._behavior, self._bounds
        longest_s = max(limit.period_s for limit in (*behavior.up_limits, *behavior.down_limits))
        self._changes = [one for one in self._changes if one[0] > now_s - longest_s]
        if desired > current:
            allowed = max(
                limit.max_replicas(self._replicas_at_period_start(now_s, current, limit))
                for limit in behavior.up_limits
            )
            return min(desired, maximum, max(current, allowed))
        if desired < current:
            allowed = min(
                limit.min_replicas(self._replicas_at_period_start(now_s, current, limit))
                for limit in behavior.down_limits
            )
            return max(desired, minimum, min(current, allowed))
        return desired

    def _replicas_at_period_start(self, now_s: float, current: int, limit: HpaRateLimit) -> int:
        """Return the replicas at the start of a limit's period."""
        return current - sum(change for at_s, change in self._changes if at_s > now_s - limit.period_s)


def _thousandths(value: float) -> int:
    return round(value * 1000.0)


def _ratio(milli: Sequence[int], target_milli: int) -> float:
    return sum(milli) // len(milli) / target_milli


def _is_within_tolerance(ratio: float, tolerance: float) -> bool:
    return 1.0 - tolerance <= ratio <= 1.0 + tolerance
