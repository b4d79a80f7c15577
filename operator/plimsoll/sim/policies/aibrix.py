"""AIBrix's application-specific pod autoscaler: `apa`.

Problem: a proportional law on a noisy metric changes replicas without need.

Idea, as in AIBrix 0.7: every 10 s the metric's mean over the engines is recorded and averaged over 180 s. Beyond a
tolerance either way, replicas follow the ratio to the target, within a rate of the present count. Its cooldown windows
then select among the recommendations of the window: for a scale-up the largest (window 0: the present one), for a
scale-down the smallest (300 s). So the scale-down window does not delay a scale-down, but deepens it to the smallest
recommendation in it. This is AIBrix's behaviour; `cooldown=0` is without.

AIBrix has no default metric or target: its samples have the share of the KV cache in use, and 0.5. `guard=1` is an
addition of a later version: starting replicas count as idle for a scale-up and as at target for a scale-down.

https://github.com/vllm-project/aibrix, pkg/controller/podautoscaler
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from plimsoll.core.ports import EngineReading
from plimsoll.core.types import Role
from plimsoll.core.units import format_number
from plimsoll.sim.policies.base import Observation, PolicyContext, SimulatedPolicy
from plimsoll.sim.policies.options import PolicyOptions
from plimsoll.sim.policies.peer import PeerPolicy, PeriodicTimer, scalers

SYNC_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ApaRules:
    """Parameters of the policy. target: of the metric. mean_window_s: window of its mean.

    up_tolerance, down_tolerance: relative deviation without effect. max_up_rate, max_down_rate: largest factors of one
    step. up_window_s, down_window_s: cooldown windows of recommendations. guard: whether starting replicas damp the
    next step.
    """

    target: float = 0.5
    mean_window_s: float = 180.0
    up_tolerance: float = 0.1
    down_tolerance: float = 0.1
    max_up_rate: float = 2.0
    max_down_rate: float = 2.0
    up_window_s: float = 0.0
    down_window_s: float = 300.0
    guard: bool = False


def recommend(rules: ApaRules, value: float, replicas: int) -> int:
    """Return the replicas for the metric's mean."""
    ratio = value / rules.target
    if ratio > 1.0 + rules.up_tolerance:
        return min(math.ceil(replicas * ratio), math.ceil(rules.max_up_rate * replicas))
    if ratio < 1.0 - rules.down_tolerance:
        return max(math.ceil(replicas * ratio), math.floor(replicas / rules.max_down_rate))
    return replicas


def guard_recommendation(rules: ApaRules, value: float, replicas: int, ready: int, desired: int) -> int:
    """Return the recommendation while some replicas are not ready."""
    pending = replicas - min(ready, replicas)
    if not pending or desired == replicas:
        return desired
    if desired > replicas:
        with_pending = math.ceil(replicas * (value * (replicas - pending) / replicas) / rules.target)
        return min(desired, max(replicas, with_pending))
    with_pending = math.ceil(
        replicas * ((value * (replicas - pending) + rules.target * pending) / replicas) / rules.target
    )
    return max(desired, min(replicas, with_pending))


class Apa:
    """One autoscaler of one tier."""

    def __init__(self, rules: ApaRules, bounds: tuple[int, int]) -> None:
        self._rules, self._bounds = rules, bounds
        self._values: deque[tuple[float, float]] = deque()
        self._recommendations: list[tuple[float, int]] = []

    def sync(self, now_s: float, values: Sequence[float], replicas: int, ready: int) -> int:
        """Return the replicas of one sync. values: the metric of each engine that reports it."""
        rules, (minimum, maximum) = self._rules, self._bounds
        if not values:
            return min(maximum, max(minimum, replicas))
        self._values.append((now_s, sum(values) / len(values)))
        while self._values[0][0] < now_s - rules.mean_window_s:
            self._values.popleft()
        mean = sum(value for _, value in self._values) / len(self._values)
        desired = min(maximum, max(minimum, recommend(rules, mean, replicas)))
        if rules.guard:
            desired = guard_recommendation(rules, mean, replicas, ready, desired)
        return min(maximum, max(minimum, self._select(now_s, desired, replicas)))

    def _select(self, now_s: float, desired: int, replicas: int) -> int:
        rules = self._rules
        oldest_s = now_s - max(rules.up_window_s, rules.down_window_s)
        self._recommendations = [one for one in (*self._recommendations, (now_s, desired)) if one[0] > oldest_s]
        if desired == replicas:
            return replicas
        window_s, choose = (rules.up_window_s, max) if desired > replicas else (rules.down_window_s, min)
        return choose([count for at_s, count in self._recommendations if at_s > now_s - window_s], default=desired)


class _ApaTier:
    def __init__(self, role: Role, metric: Callable[[EngineReading], float | None], apa: Apa) -> None:
        self._role, self._metric, self._apa, self._timer = role, metric, apa, PeriodicTimer(SYNC_S)

    def desired_replicas(self, observation: Observation) -> int | None:
        if not self._timer.is_due(observation.now_s):
            return None
        readings = [self._metric(engine) for engine in observation.engine_readings[self._role]]
        values = [value for value in readings if value is not None]
        return self._apa.sync(
            observation.now_s, values, observation.desired[self._role], observation.ready.get(self._role, 0)
        )


_METRICS: Final[Mapping[str, Callable[[EngineReading], float | None]]] = {
    "kv": lambda engine: engine.kv_used,
    "waiting": lambda engine: engine.waiting,
    "running": lambda engine: engine.running,
}


def make(options: PolicyOptions, context: PolicyContext) -> SimulatedPolicy:
    """Options metric (kv, waiting, running), target, window (seconds), more and less (tolerances), up and down (rates),
    rise and cooldown (windows, seconds), guard, gated."""
    defaults = ApaRules()
    metric = _METRICS[options.choice("metric", "kv", tuple(_METRICS))]
    rules = ApaRules(
        target=options.positive("target", defaults.target),
        mean_window_s=options.positive("window", defaults.mean_window_s, maximum=3600.0),
        up_tolerance=options.number("more", defaults.up_tolerance),
        down_tolerance=options.number("less", defaults.down_tolerance),
        max_up_rate=options.positive("up", defaults.max_up_rate),
        max_down_rate=options.positive("down", defaults.max_down_rate),
        up_window_s=options.number("rise", defaults.up_window_s, maximum=3600.0),
        down_window_s=options.number("cooldown", defaults.down_window_s, maximum=3600.0),
        guard=options.flag("guard", defaults.guard),
    )
    gated = options.flag("gated", False)
    options.finish()
    if rules.max_up_rate <= 1.0 or rules.max_down_rate <= 1.0:
        raise options.error("up and down are rates above 1")
    return PeerPolicy(scalers(context.bounds, lambda role, bounds: _ApaTier(role, metric, Apa(rules, bounds))), gated)


def settings() -> Sequence[str]:
    targets = {"kv": (0.05, 0.1, 0.2, 0.3, 0.5, 0.7), "running": (4, 8, 16, 24, 32, 48, 64)}
    return tuple(
        f"metric={metric},target={format_number(target)},window={window_s},cooldown={cooldown_s}"
        for metric, values in targets.items()
        for target in values
        for window_s, cooldown_s in ((180, 300), (180, 0), (60, 0))
    )
