"""Knative's pod autoscaler on concurrency: `kpa`.

Problem: a mean over a minute is late in a burst, one over seconds is noisy.

Idea, as in its autoscaler: every 2 s the concurrency of the whole tier, averaged over a stable window and over a panic
window of a tenth, is divided by the target and kept within rates of the ready replicas. If the panic count is at least
twice the ready replicas, panic mode begins: the count only grows, until a stable window has passed without another
breach. A lower count applies after `delay`. It begins in panic mode if more than one replica is ready.

Concurrency counts running and waiting requests at the engines, sampled each second; Knative averages it over each
second. Its activator queues requests only without a replica, or with little capacity left, and is not modelled. The
target is 70 % of a soft limit of 100, its defaults; `target` sets the limit.

https://github.com/knative/serving/blob/main/docs/scaling/SYSTEM.md, .../config/core/configmaps/autoscaler.yaml
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from plimsoll.core.types import Role
from plimsoll.sim.policies.base import Observation, PolicyContext, SimulatedPolicy
from plimsoll.sim.policies.options import PolicyOptions
from plimsoll.sim.policies.peer import PeerPolicy, PeriodicTimer, scalers

KPA_TICK_S: Final = 2.0
SCRAPE_S: Final = 1.0
_MIN_TARGET: Final = 0.01
_DIGITS: Final = 6


@dataclass(frozen=True, slots=True)
class KpaRules:
    """Parameters of the policy. target: concurrency of a replica. panic_threshold: ratio of replica counts that starts
    panic mode. max_up_rate, max_down_rate: largest factors of one tick. delay_s: delay of a scale-down.
    """

    target: float = 70.0
    stable_s: float = 60.0
    panic_s: float = 6.0
    panic_threshold: float = 2.0
    max_up_rate: float = 1000.0
    max_down_rate: float = 2.0
    delay_s: float = 0.0


class KpaWindow:
    """A mean over whole seconds: seconds without a value are 0, except before the first value or after the last."""

    def __init__(self, seconds: float) -> None:
        self._seconds = math.ceil(seconds)
        self._values: deque[tuple[int, float]] = deque()
        self._first = 0

    def record(self, now_s: float, value: float) -> None:
        second = int(now_s)
        if not self._values or second - self._values[-1][0] >= self._seconds:
            self._values.clear()
            self._first = second
        self._values.append((second, value))
        self._expire(second)

    def mean(self, now_s: float) -> float | None:
        """Return the mean; None without values in the window."""
        second = int(now_s)
        if not self._values or second - self._values[-1][0] > self._seconds:
            return None
        last = self._values[-1][0]
        self._expire(second)
        count = min(last - self._first + 1, self._seconds - (second - last))
        return round(sum(value for _, value in self._values) / count, _DIGITS) if count > 0 else 0.0

    def _expire(self, second: int) -> None:
        while self._values and self._values[0][0] <= second - self._seconds and len(self._values) > 1:
            self._values.popleft()


class Kpa:
    """One autoscaler. ready: replicas at its start."""

    def __init__(self, rules: KpaRules, now_s: float, ready: int) -> None:
        self._rules = rules
        self.panic_since_s = now_s if ready > 1 else None
        self._panic_max = ready
        self._counts: deque[tuple[float, int]] = deque()

    def scale(self, now_s: float, stable: float, panic: float, ready: int) -> int:
        """Return the replicas for the concurrency of the whole tier, before any bounds."""
        rules, replicas = self._rules, max(1, ready)
        maximum, minimum = math.ceil(rules.max_up_rate * replicas), math.floor(replicas / rules.max_down_rate)
        panic_count = math.ceil(panic / rules.target)
        count, burst = (
            min(max(desired, minimum), maximum) for desired in (math.ceil(stable / rules.target), panic_count)
        )
        if panic_count / replicas >= rules.panic_threshold:
            self.panic_since_s = now_s
        elif self.panic_since_s is not None and self.panic_since_s + rules.stable_s < now_s:
            self.panic_since_s, self._panic_max = None, 0
        if self.panic_since_s is not None:
            count = self._panic_max = max(count, burst, self._panic_max)
        return self._delayed(now_s, count)

    def _delayed(self, now_s: float, count: int) -> int:
        """Return the largest count of the delay window."""
        if not self._rules.delay_s:
            return count
        self._counts.append((now_s, count))
        while self._counts[0][0] <= now_s - self._rules.delay_s:
            self._counts.popleft()
        return max(count for _, count in self._counts)


class _KpaTier:
    def __init__(self, role: Role, rules: KpaRules, bounds: tuple[int, int]) -> None:
        self._role, self._rules, self._bounds = role, rules, bounds
        self._kpa: Kpa | None = None
        self._stable, self._panic = KpaWindow(rules.stable_s), KpaWindow(rules.panic_s)
        self._scrape, self._tick = PeriodicTimer(SCRAPE_S), PeriodicTimer(KPA_TICK_S)

    def desired_replicas(self, observation: Observation) -> int | None:
        ready = observation.ready.get(self._role, 0)
        if self._kpa is None:
            self._kpa = Kpa(self._rules, observation.now_s, ready)
        if self._scrape.is_due(observation.now_s) and ready:
            engines = observation.engine_readings[self._role]
            value = sum((engine.running or 0.0) + (engine.waiting or 0.0) for engine in engines)
            self._stable.record(observation.now_s, value)
            self._panic.record(observation.now_s, value)
        if not self._tick.is_due(observation.now_s):
            return None
        stable, panic = self._stable.mean(observation.now_s), self._panic.mean(observation.now_s)
        minimum, maximum = self._bounds
        if stable is None:
            return max(minimum, observation.desired[self._role])
        return min(maximum, max(minimum, self._kpa.scale(observation.now_s, stable, panic or 0.0, ready)))


def make(options: PolicyOptions, context: PolicyContext) -> SimulatedPolicy:
    """Options target (soft limit), utilization, window (seconds), panic_window and panic_threshold (per cent),
    up and down (rates), delay (seconds), gated."""
    limit, utilization = options.positive("target", 100.0), options.positive("utilization", 0.7, maximum=1.0)
    defaults = KpaRules()
    stable_s = options.positive("window", defaults.stable_s, maximum=3600.0)
    share = options.positive("panic_window", 10.0, maximum=100.0)
    rules = KpaRules(
        target=max(_MIN_TARGET, limit * utilization),
        stable_s=stable_s,
        panic_s=max(1.0, round(stable_s * share / 100.0)),
        panic_threshold=options.positive("panic_threshold", 200.0) / 100.0,
        max_up_rate=options.positive("up", defaults.max_up_rate),
        max_down_rate=options.positive("down", defaults.max_down_rate),
        delay_s=options.number("delay", defaults.delay_s, maximum=3600.0),
    )
    gated = options.flag("gated", False)
    options.finish()
    if rules.max_up_rate <= 1.0 or rules.max_down_rate <= 1.0:
        raise options.error("up and down are rates above 1")
    return PeerPolicy(scalers(context.bounds, lambda role, bounds: _KpaTier(role, rules, bounds)), gated)


def settings() -> Sequence[str]:
    limits = (4, 8, 12, 16, 24, 32, 48, 56, 64, 100, 150)
    return tuple(
        f"target={limit},window={window_s},delay={delay_s}"
        for limit in limits
        for window_s, delay_s in _WINDOWS_AND_DELAYS
    )


_WINDOWS_AND_DELAYS: Final = ((60, 0), (60, 300), (180, 0))
