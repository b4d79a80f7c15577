"""Kubernetes' HorizontalPodAutoscaler (autoscaling/v2): from a metric to a count of replicas.

Problem: most peers leave the last step to it, and its tolerance, windows and rates decide as much as their metric does.

Idea: its four stages as they are documented and as its controller does them: a proposal from the metric, in whole
thousandths; stabilisation (up: the least proposal of the window, down: the greatest); limits on the change in each
policy's period, of which the most permissive counts; the bounds. Pods of which there is no metric count as at their
target when the rest says fewer and as idle when it says more. Replicas that start are such pods here: that Kubernetes
leaves those out, when the rest says fewer, which it calls Pending (images, or no GPU left) is not told apart.

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
class Limit:
    """At most so many replicas, or per cent of those at the period's start, are added or taken within a period."""

    value: float
    period_s: float
    percent: bool = True

    def above(self, begun: int) -> int:
        return math.ceil(begun * (1.0 + self.value / 100.0)) if self.percent else begun + int(self.value)

    def below(self, begun: int) -> int:
        return int(begun * (1.0 - self.value / 100.0)) if self.percent else begun - int(self.value)


@dataclass(frozen=True, slots=True)
class Behaviour:
    """up_s, down_s: stabilisation windows. The defaults are Kubernetes' own."""

    up_s: float = 0.0
    down_s: float = 300.0
    up: tuple[Limit, ...] = (Limit(100.0, 15.0), Limit(4.0, 15.0, percent=False))
    down: tuple[Limit, ...] = (Limit(100.0, 15.0),)
    tolerance: float = TOLERANCE


def by_pods(
    values: Sequence[float], missing: int, target: float, current: int, tolerance: float = TOLERANCE
) -> int | None:
    """Proposal for a metric with an average target a pod; None where no pod tells it.

    values: of the pods that tell it. missing: pods that run and do not. current: replicas as ordered.
    """
    if not values:
        return None
    milli, goal = [_milli(value) for value in values], _milli(target)
    ratio = _ratio(milli, goal)
    if not missing:
        return current if _within(ratio, tolerance) else math.ceil(ratio * len(milli))
    if ratio == 1.0:
        return current
    milli += [goal if ratio < 1.0 else 0] * missing
    whole = _ratio(milli, goal)
    if _within(whole, tolerance) or (ratio < 1.0 < whole) or (whole < 1.0 < ratio):
        return current
    proposed = math.ceil(whole * len(milli))
    against = (whole < 1.0 and proposed > current) or (whole > 1.0 and proposed < current)
    return current if against else proposed


def by_total(usage: float, target: float, current: int, tolerance: float = TOLERANCE) -> int:
    """Proposal for an external metric with an average target a replica, as KEDA's and others' are."""
    total, goal = _milli(usage), _milli(target)
    if current and _within(total / (goal * current), tolerance):
        return current
    return math.ceil(total / goal)


class Hpa:
    """One autoscaler of one tier. All times are of one clock, seconds."""

    def __init__(self, behaviour: Behaviour, bounds: tuple[int, int]) -> None:
        self._behaviour, self._bounds = behaviour, bounds
        self._proposals: list[tuple[float, int]] = []
        self._changes: list[tuple[float, int]] = []

    def sync(self, now_s: float, current: int, proposed: int | None) -> int:
        """One pass. current: replicas as ordered. proposed: None where the metric is not there."""
        least, most = self._bounds
        if not self._proposals:
            self._proposals.append((now_s, current))
        if not least <= current <= most:
            wanted = min(most, max(least, current))
        elif proposed is None:
            wanted = current
        else:
            wanted = self._limited(now_s, current, self._steadied(now_s, current, proposed))
        if wanted != current:
            self._changes.append((now_s, wanted - current))
        return wanted

    def _steadied(self, now_s: float, current: int, proposed: int) -> int:
        rules = self._behaviour
        up = min([proposed, *(count for at_s, count in self._proposals if at_s > now_s - rules.up_s)])
        down = max([proposed, *(count for at_s, count in self._proposals if at_s > now_s - rules.down_s)])
        kept_s = now_s - max(rules.up_s, rules.down_s)
        self._proposals = [one for one in self._proposals if one[0] > kept_s] + [(now_s, proposed)]
        return min(max(current, up), down)

    def _limited(self, now_s: float, current: int, wanted: int) -> int:
        rules, (least, most) = self._behaviour, self._bounds
        longest_s = max(limit.period_s for limit in (*rules.up, *rules.down))
        self._changes = [one for one in self._changes if one[0] > now_s - longest_s]
        if wanted > current:
            allowed = max(limit.above(self._begun(now_s, current, limit)) for limit in rules.up)
            return min(wanted, most, max(current, allowed))
        if wanted < current:
            allowed = min(limit.below(self._begun(now_s, current, limit)) for limit in rules.down)
            return max(wanted, least, min(current, allowed))
        return wanted

    def _begun(self, now_s: float, current: int, limit: Limit) -> int:
        """Replicas at the start of a limit's period."""
        return current - sum(change for at_s, change in self._changes if at_s > now_s - limit.period_s)


def _milli(value: float) -> int:
    return round(value * 1000.0)


def _ratio(milli: Sequence[int], goal: int) -> float:
    return sum(milli) // len(milli) / goal


def _within(ratio: float, tolerance: float) -> bool:
    return 1.0 - tolerance <= ratio <= 1.0 + tolerance
