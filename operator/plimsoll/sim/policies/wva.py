"""llm-d's Workload Variant Autoscaler, its saturation law V2, as of 0.9: `wva`.

Problem: the share of a cache in use says little about how much an engine can take, since engines of some models run out
of compute long before they run out of memory.

Idea, as it is there: load and capacity are both tokens of KV cache. A replica's capacity is the lesser of what memory
and what compute hold. Memory: a share of the cache. Compute: the tokens in use while its queue is long; else the mean
of the last ten such sightings at answers of about this length; else, from the engine's arguments, N sequences of
I + O/2 tokens with N = min(B O / (I + O), S); else what memory holds. Load is tokens in use, and for each request that
waits its prompt and its answer (a prefill engine: its prompt). Replicas are added until load is 85 % of what there is
and is on its way, and taken away as long as it stays below 70 % of what is ready. The rest is left to Kubernetes'
autoscaler on an external metric whose target is one a replica, with Kubernetes' own windows.

A port from the facts of the published controller, at its defaults: a cycle of 15 s, cache and queue as the largest of a
minute, lengths as means of five. Tiers are sized apart; its pairing of prefill and decode orders is not here, nor is
its choice among kinds of hardware, of which there is one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import EngineReading
from plimsoll.sim.policies.base import Look, Policy, Scene
from plimsoll.sim.policies.hpa import Behaviour, Hpa, by_total
from plimsoll.sim.policies.options import Options
from plimsoll.sim.policies.peer import Peer, Timer, scalers
from plimsoll.sim.policies.windows import Increase, Largest, mean

CYCLE_S: Final = 15.0
_GAUGES_S: Final = 60.0
_LENGTHS_S: Final = 300.0
_SIGHTINGS: Final = 10
_SHORT_TOKENS: Final = 100.0  # answers below it, and below the next, are kinds of their own
_MEDIUM_TOKENS: Final = 500.0


@dataclass(frozen=True, slots=True)
class Rules:
    """kv: share of the cache that counts. queue: requests waiting from which compute is the limit. up_at, down_at: load
    over supply."""

    kv: float = 0.80
    queue: float = 5.0
    up_at: float = 0.85
    down_at: float = 0.70


@dataclass(frozen=True, slots=True)
class Limits:
    """Of an engine, from its arguments. kv_tokens: its cache. budget: tokens of a step."""

    kv_tokens: int
    budget: int
    sequences: int


@dataclass(frozen=True, slots=True)
class Seen:
    """One replica: tokens in use and requests waiting (the largest of a minute), mean lengths (0: not known)."""

    in_use: float
    waiting: float
    prompt: float
    output: float


class Capacity:
    """What a replica of one tier holds, and what was learned of it."""

    def __init__(self, rules: Rules, limits: Limits) -> None:
        self._rules, self._limits = rules, limits
        self._sightings: dict[int, deque[float]] = {}

    def tokens(self, seen: Seen) -> float:
        """The lesser of memory's and compute's limit."""
        memory = self._limits.kv_tokens * self._rules.kv
        return min(memory, self._compute(seen) or memory)

    def _compute(self, seen: Seen) -> float:
        kind = (seen.output >= _SHORT_TOKENS) + (seen.output >= _MEDIUM_TOKENS)
        if seen.waiting >= self._rules.queue and seen.in_use > 0.0:
            self._sightings.setdefault(kind, deque(maxlen=_SIGHTINGS)).append(seen.in_use)
            return seen.in_use
        if kind in self._sightings:
            return sum(self._sightings[kind]) / len(self._sightings[kind])
        return derived(self._limits, seen.prompt, seen.output)


def derived(limits: Limits, prompt: float, output: float) -> float:
    """Tokens in use when every step's budget is used up; 0 where lengths are not known."""
    if prompt <= 0.0 or output <= 0.0:
        return 0.0
    sequences = min(limits.budget * output / (prompt + output), float(limits.sequences))
    return sequences * (prompt + output / 2.0)


def load(role: Role, seen: Seen) -> float:
    """Tokens that a replica has and will have of those that wait."""
    return seen.in_use + seen.waiting * _to_come(role, seen.prompt, seen.output)


def replicas(rules: Rules, capacity: float, demand: float, ready: int, starting: int) -> int:
    """How many are wanted; at least one. capacity: of one replica, above 0."""
    required = demand / rules.up_at - (ready + starting) * capacity
    if required > 0.0:
        return ready + starting + math.ceil(required / capacity)
    spare = ready * capacity - demand / rules.down_at
    return max(1, ready + starting - max(0, math.floor(spare / capacity)))


class _Tier:
    def __init__(self, role: Role, rules: Rules, limits: Limits, cycle_s: float, hpa: Hpa, tolerance: float) -> None:
        self._role, self._rules, self._limits, self._hpa, self._tolerance = role, rules, limits, hpa, tolerance
        self._capacity, self._timer = Capacity(rules, limits), Timer(cycle_s)
        self._kv, self._waiting = Largest(_GAUGES_S), Largest(_GAUGES_S)
        self._prompts, self._outputs = Increase(_LENGTHS_S), Increase(_LENGTHS_S)

    def wanted(self, look: Look) -> int | None:
        if not self._timer.due(look.now_s):
            return None
        readings = look.engines[self._role]
        seen = [self._seen(look.now_s, reading) for reading in readings]
        for window in (self._kv, self._waiting, self._prompts, self._outputs):
            window.keep([reading.pod for reading in readings])
        current, proposed = look.ordered[self._role], None
        if seen:
            capacity = median([self._capacity.tokens(one) for one in seen])
            demand = sum(load(self._role, one) for one in seen) + self._held(look, seen)
            starting = look.starting.get(self._role, 0)
            target = replicas(self._rules, capacity, demand, len(seen), starting)
            proposed = by_total(float(target), 1.0, current, self._tolerance)
        return self._hpa.sync(look.now_s, current, proposed)

    def _held(self, look: Look, seen: Sequence[Seen]) -> float:
        """Tokens of the requests that gateways hold."""
        held = sum(gateway.waiting for gateway in look.gateways)
        known = [one for one in seen if one.prompt > 0.0]
        if not held or not known:
            return 0.0
        prompt = sum(one.prompt for one in known) / len(known)
        output = sum(one.output for one in known) / len(known)
        return held * _to_come(self._role, prompt, output)

    def _seen(self, now_s: float, reading: EngineReading) -> Seen:
        pod = reading.pod
        kv = self._kv.add(now_s, pod, reading.kv_used or 0.0)
        waiting = self._waiting.add(now_s, pod, reading.waiting or 0.0)
        prompt = mean(self._prompts, now_s, pod, reading.prompt_tokens)
        output = mean(self._outputs, now_s, pod, reading.output_tokens)
        return Seen(kv * self._limits.kv_tokens, waiting, prompt, output)


def make(options: Options, scene: Scene) -> Policy:
    """Options kv, queue, up_at, down_at, cycle (seconds), and of Kubernetes' autoscaler up and down (stabilisation
    windows, seconds) and tolerance; gated."""
    usual = Rules()
    rules = Rules(
        kv=options.positive("kv", usual.kv, most=1.0),
        queue=options.positive("queue", usual.queue),
        up_at=options.positive("up_at", usual.up_at, most=1.0),
        down_at=options.positive("down_at", usual.down_at, most=1.0),
    )
    cycle_s = options.period("cycle", CYCLE_S)
    behaviour, gated = scaling(options), options.flag("gated", False)
    options.end()
    if rules.down_at >= rules.up_at:
        raise options.bad("down_at is below up_at")

    def tier(role: Role, bounds: tuple[int, int]) -> _Tier:
        own = scene.plant.of_role(role)
        limits = Limits(own.kv_tokens, own.budget, own.max_num_seqs)
        return _Tier(role, rules, limits, cycle_s, Hpa(behaviour, bounds), behaviour.tolerance)

    return Peer(scalers(scene.bounds, tier), gated)


def settings() -> Sequence[str]:
    """Words worth trying: when compute is the limit, thresholds, and the autoscaler's window for fewer."""
    return tuple(
        f"queue={queue:g},up_at={up_at:g},down_at={down_at:g},down={down_s}"
        for queue in (1, 5)
        for up_at, down_at in ((0.85, 0.7), (0.6, 0.45), (0.4, 0.25))
        for down_s in (300, 60)
    )


def scaling(options: Options) -> Behaviour:
    """How Kubernetes' autoscaler is set up."""
    usual = Behaviour()
    return Behaviour(
        up_s=options.number("up", usual.up_s, most=3600.0),
        down_s=options.number("down", usual.down_s, most=3600.0),
        tolerance=options.number("tolerance", usual.tolerance, most=1.0),
    )


def _to_come(role: Role, prompt: float, output: float) -> float:
    return prompt if role is Role.PREFILL else prompt + output
