"""AIBrix's application-specific pod autoscaler: `apa`.

Problem: a proportional law on a restless metric moves replicas for nothing.

Idea, as AIBrix 0.7 has it: every 10 s the metric's mean over the engines is recorded and meaned over 180 s; beyond a
tolerance either way, replicas follow the ratio to the target, within a rate of the present count. What it calls
cooldown windows then chooses among the recommendations of the window: the greatest where more are wanted (window 0: the
present one), the least where fewer are (300 s). So the window for fewer does not hold replicas back, it deepens the
fall to what was least recommended in it: that is how it is written there, and so it is here; `cooldown=0` is without.

AIBrix has no default metric or target: its samples have the share of the KV cache in use, and 0.5. `guard=1` is what a
later version adds: while replicas start, they count as idle when more are wanted and as at target when fewer are.

https://github.com/vllm-project/aibrix, pkg/controller/podautoscaler
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import EngineReading
from plimsoll.sim.policies.base import Look, Policy, Scene
from plimsoll.sim.policies.options import Options
from plimsoll.sim.policies.peer import Peer, Timer, scalers

SYNC_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Rules:
    """over_s: of the mean. more, less: tolerances. up, down: rates. rise_s, cooldown_s: windows of recommendations."""

    target: float = 0.5
    over_s: float = 180.0
    more: float = 0.1
    less: float = 0.1
    up: float = 2.0
    down: float = 2.0
    rise_s: float = 0.0
    cooldown_s: float = 300.0
    guard: bool = False


def recommended(rules: Rules, value: float, replicas: int) -> int:
    """Replicas for the metric's mean."""
    ratio = value / rules.target
    if ratio > 1.0 + rules.more:
        return min(math.ceil(replicas * ratio), math.ceil(rules.up * replicas))
    if ratio < 1.0 - rules.less:
        return max(math.ceil(replicas * ratio), math.floor(replicas / rules.down))
    return replicas


def guarded(rules: Rules, value: float, replicas: int, ready: int, wanted: int) -> int:
    """The recommendation while some replicas are not ready."""
    pending = replicas - min(ready, replicas)
    if not pending or wanted == replicas:
        return wanted
    if wanted > replicas:
        told = math.ceil(replicas * (value * (replicas - pending) / replicas) / rules.target)
        return min(wanted, max(replicas, told))
    told = math.ceil(replicas * ((value * (replicas - pending) + rules.target * pending) / replicas) / rules.target)
    return max(wanted, min(replicas, told))


class Apa:
    """One autoscaler of one tier."""

    def __init__(self, rules: Rules, bounds: tuple[int, int]) -> None:
        self._rules, self._bounds = rules, bounds
        self._values: deque[tuple[float, float]] = deque()
        self._told: list[tuple[float, int]] = []

    def sync(self, now_s: float, values: Sequence[float], replicas: int, ready: int) -> int:
        """One pass. values: the metric of each engine that tells it."""
        rules, (least, most) = self._rules, self._bounds
        if not values:
            return min(most, max(least, replicas))
        self._values.append((now_s, sum(values) / len(values)))
        while self._values[0][0] < now_s - rules.over_s:
            self._values.popleft()
        mean = sum(value for _, value in self._values) / len(self._values)
        wanted = min(most, max(least, recommended(rules, mean, replicas)))
        if rules.guard:
            wanted = guarded(rules, mean, replicas, ready, wanted)
        return min(most, max(least, self._chosen(now_s, wanted, replicas)))

    def _chosen(self, now_s: float, wanted: int, replicas: int) -> int:
        rules = self._rules
        kept_s = now_s - max(rules.rise_s, rules.cooldown_s)
        self._told = [one for one in (*self._told, (now_s, wanted)) if one[0] > kept_s]
        if wanted == replicas:
            return replicas
        window_s, choose = (rules.rise_s, max) if wanted > replicas else (rules.cooldown_s, min)
        return choose([count for at_s, count in self._told if at_s > now_s - window_s], default=wanted)


class _Tier:
    def __init__(self, role: Role, metric: Callable[[EngineReading], float | None], apa: Apa) -> None:
        self._role, self._metric, self._apa, self._timer = role, metric, apa, Timer(SYNC_S)

    def wanted(self, look: Look) -> int | None:
        if not self._timer.due(look.now_s):
            return None
        told = [self._metric(engine) for engine in look.engines[self._role]]
        values = [value for value in told if value is not None]
        return self._apa.sync(look.now_s, values, look.ordered[self._role], look.ready.get(self._role, 0))


_METRICS: Final[Mapping[str, Callable[[EngineReading], float | None]]] = {
    "kv": lambda engine: engine.kv_used,
    "waiting": lambda engine: engine.waiting,
    "running": lambda engine: engine.running,
}


def make(options: Options, scene: Scene) -> Policy:
    """Options metric (kv, waiting, running), target, window (seconds), more and less (tolerances), up and down (rates),
    rise and cooldown (windows, seconds), guard, gated."""
    usual = Rules()
    metric = _METRICS[options.choice("metric", "kv", tuple(_METRICS))]
    rules = Rules(
        target=options.positive("target", usual.target),
        over_s=options.positive("window", usual.over_s, most=3600.0),
        more=options.number("more", usual.more),
        less=options.number("less", usual.less),
        up=options.positive("up", usual.up),
        down=options.positive("down", usual.down),
        rise_s=options.number("rise", usual.rise_s, most=3600.0),
        cooldown_s=options.number("cooldown", usual.cooldown_s, most=3600.0),
        guard=options.flag("guard", usual.guard),
    )
    gated = options.flag("gated", False)
    options.end()
    if rules.up <= 1.0 or rules.down <= 1.0:
        raise options.bad("up and down are rates above 1")
    return Peer(scalers(scene.bounds, lambda role, bounds: _Tier(role, metric, Apa(rules, bounds))), gated)


def settings() -> Sequence[str]:
    targets = {"kv": (0.05, 0.1, 0.2, 0.3, 0.5, 0.7), "running": (4, 8, 16, 24, 32, 48, 64)}
    return tuple(
        f"metric={metric},target={target:g},window={window_s},cooldown={cooldown_s}"
        for metric, values in targets.items()
        for target in values
        for window_s, cooldown_s in ((180, 300), (180, 0), (60, 0))
    )
