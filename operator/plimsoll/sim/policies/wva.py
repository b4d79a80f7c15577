"""llm-d's Workload Variant Autoscaler, its saturation policy V2, as of 0.9: `wva`.

Problem: the share of a cache in use says little about an engine's capacity, because engines of some models run out of
compute long before they run out of memory.

Idea, as in the controller: load and capacity are both tokens of KV cache. A replica's capacity is the smaller of its
memory and compute limits. Memory: a share of the cache. Compute: the tokens in use while its queue is long; else the
mean of the last ten such samples for outputs of about this length; else, from the engine's arguments, N sequences of I
+ O/2 tokens with N = min(B O / (I + O), S); else the memory limit. Load is the tokens in use, plus prompt and output of
each waiting request (in a prefill engine: its prompt). Replicas are added until load is 85 % of the ready and starting
capacity, and removed while it stays below 70 % of the ready capacity. Kubernetes' autoscaler does the rest, on an
external metric whose target is one per replica, with Kubernetes' own windows.

A port from the facts of the published controller, at its defaults: a cycle of 15 s, cache and queue as the largest of a
minute, lengths as means of five. Tiers are sized separately; its coupling of prefill and decode orders is not here, nor
is its choice among kinds of hardware, of which there is one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from plimsoll.core.ports import EngineReading
from plimsoll.core.types import Role
from plimsoll.core.units import format_number
from plimsoll.sim.policies.base import Observation, PolicyContext, SimulatedPolicy
from plimsoll.sim.policies.hpa import Hpa, HpaBehavior, propose_from_total
from plimsoll.sim.policies.options import PolicyOptions
from plimsoll.sim.policies.peer import PeerPolicy, PeriodicTimer, scalers
from plimsoll.sim.policies.sliding_windows import CounterIncrease, SlidingMax, mean_over_window

CYCLE_S: Final = 15.0
_GAUGE_WINDOW_S: Final = 60.0
_LENGTH_WINDOW_S: Final = 300.0
_SATURATION_SAMPLES: Final = 10
_SHORT_TOKENS: Final = 100.0  # outputs below it, and below the next, are classes of their own
_MEDIUM_TOKENS: Final = 500.0


@dataclass(frozen=True, slots=True)
class WvaRules:
    """Parameters of the policy. kv_share: usable share of the KV cache. saturated_queue: waiting requests from which
    compute is the limit. up_threshold, down_threshold: load over supply.
    """

    kv_share: float = 0.80
    saturated_queue: float = 5.0
    up_threshold: float = 0.85
    down_threshold: float = 0.70


@dataclass(frozen=True, slots=True)
class WvaEngineLimits:
    """Limits of an engine, from its arguments. kv_tokens: its cache. budget: tokens of a step."""

    kv_tokens: int
    budget: int
    sequences: int


@dataclass(frozen=True, slots=True)
class ReplicaSample:
    """One replica: tokens in use and waiting requests (the largest of a minute), mean lengths (0: unknown)."""

    in_use: float
    waiting: float
    prompt: float
    output: float


class WvaCapacity:
    """Capacity of a tier's replicas, learned from samples."""

    def __init__(self, rules: WvaRules, limits: WvaEngineLimits) -> None:
        self._rules, self._limits = rules, limits
        self._saturation_samples: dict[int, deque[float]] = {}

    def tokens(self, sample: ReplicaSample) -> float:
        """Return the smaller of the memory and compute limits."""
        memory = self._limits.kv_tokens * self._rules.kv_share
        return min(memory, self._compute(sample) or memory)

    def _compute(self, sample: ReplicaSample) -> float:
        length_bucket = (sample.output >= _SHORT_TOKENS) + (sample.output >= _MEDIUM_TOKENS)
        if sample.waiting >= self._rules.saturated_queue and sample.in_use > 0.0:
            self._saturation_samples.setdefault(length_bucket, deque(maxlen=_SATURATION_SAMPLES)).append(sample.in_use)
            return sample.in_use
        if length_bucket in self._saturation_samples:
            return sum(self._saturation_samples[length_bucket]) / len(self._saturation_samples[length_bucket])
        return derived_capacity(self._limits, sample.prompt, sample.output)


def derived_capacity(limits: WvaEngineLimits, prompt: float, output: float) -> float:
    """Return the tokens in use when every step's budget is used up; 0 if lengths are unknown."""
    if prompt <= 0.0 or output <= 0.0:
        return 0.0
    sequences = min(limits.budget * output / (prompt + output), float(limits.sequences))
    return sequences * (prompt + output / 2.0)


def replica_load(role: Role, sample: ReplicaSample) -> float:
    """Return the tokens of a replica, and those that its waiting requests will need."""
    return sample.in_use + sample.waiting * _tokens_per_waiting(role, sample.prompt, sample.output)


def target_replicas(rules: WvaRules, capacity: float, demand: float, ready: int, starting: int) -> int:
    """Return the desired replicas, at least one. capacity: of one replica, above 0."""
    required = demand / rules.up_threshold - (ready + starting) * capacity
    if required > 0.0:
        return ready + starting + math.ceil(required / capacity)
    surplus = ready * capacity - demand / rules.down_threshold
    return max(1, ready + starting - max(0, math.floor(surplus / capacity)))


class _WvaTier:
    def __init__(
        self, role: Role, rules: WvaRules, limits: WvaEngineLimits, cycle_s: float, hpa: Hpa, tolerance: float
    ) -> None:
        self._role, self._rules, self._limits, self._hpa, self._tolerance = role, rules, limits, hpa, tolerance
        self._capacity, self._timer = WvaCapacity(rules, limits), PeriodicTimer(cycle_s)
        self._kv, self._waiting = SlidingMax(_GAUGE_WINDOW_S), SlidingMax(_GAUGE_WINDOW_S)
        self._prompts, self._outputs = CounterIncrease(_LENGTH_WINDOW_S), CounterIncrease(_LENGTH_WINDOW_S)

    def desired_replicas(self, observation: Observation) -> int | None:
        if not self._timer.is_due(observation.now_s):
            return None
        readings = observation.engine_readings[self._role]
        samples = [self._sample(observation.now_s, reading) for reading in readings]
        for window in (self._kv, self._waiting, self._prompts, self._outputs):
            window.retain([reading.pod for reading in readings])
        current, proposed = observation.desired[self._role], None
        if samples:
            capacity = median([self._capacity.tokens(one) for one in samples])
            demand = sum(replica_load(self._role, one) for one in samples) + self._queued_tokens(observation, samples)
            starting = observation.starting.get(self._role, 0)
            target = target_replicas(self._rules, capacity, demand, len(samples), starting)
            proposed = propose_from_total(float(target), 1.0, current, self._tolerance)
        return self._hpa.sync(observation.now_s, current, proposed)

    def _queued_tokens(self, observation: Observation, samples: Sequence[ReplicaSample]) -> float:
        """Return the tokens of the requests queued at gateways."""
        queued = sum(gateway.queued for gateway in observation.gateway_readings)
        with_lengths = [one for one in samples if one.prompt > 0.0]
        if not queued or not with_lengths:
            return 0.0
        prompt = sum(one.prompt for one in with_lengths) / len(with_lengths)
        output = sum(one.output for one in with_lengths) / len(with_lengths)
        return queued * _tokens_per_waiting(self._role, prompt, output)

    def _sample(self, now_s: float, reading: EngineReading) -> ReplicaSample:
        pod = reading.pod
        kv = self._kv.add(now_s, pod, reading.kv_used or 0.0)
        waiting = self._waiting.add(now_s, pod, reading.waiting or 0.0)
        prompt = mean_over_window(self._prompts, now_s, pod, reading.prompt_tokens)
        output = mean_over_window(self._outputs, now_s, pod, reading.output_tokens)
        return ReplicaSample(kv * self._limits.kv_tokens, waiting, prompt, output)


def make(options: PolicyOptions, context: PolicyContext) -> SimulatedPolicy:
    """Options kv, queue, up_at, down_at, cycle (seconds), and of Kubernetes' autoscaler up and down (stabilisation
    windows, seconds) and tolerance; gated."""
    defaults = WvaRules()
    rules = WvaRules(
        kv_share=options.positive("kv", defaults.kv_share, maximum=1.0),
        saturated_queue=options.positive("queue", defaults.saturated_queue),
        up_threshold=options.positive("up_at", defaults.up_threshold, maximum=1.0),
        down_threshold=options.positive("down_at", defaults.down_threshold, maximum=1.0),
    )
    cycle_s = options.period("cycle", CYCLE_S)
    behaviour, gated = hpa_behavior(options), options.flag("gated", False)
    options.finish()
    if rules.down_threshold >= rules.up_threshold:
        raise options.error("down_at is below up_at")

    def tier(role: Role, bounds: tuple[int, int]) -> _WvaTier:
        profile = context.plant.profile_for(role)
        limits = WvaEngineLimits(profile.kv_tokens, profile.budget, profile.max_num_seqs)
        return _WvaTier(role, rules, limits, cycle_s, Hpa(behaviour, bounds), behaviour.tolerance)

    return PeerPolicy(scalers(context.bounds, tier), gated)


def settings() -> Sequence[str]:
    """Options for a search: when compute is the limit, thresholds, and the autoscaler's scale-down window."""
    return tuple(
        f"queue={format_number(queue)},up_at={format_number(up_at)},down_at={format_number(down_at)},down={down_s}"
        for queue in (1, 5)
        for up_at, down_at in ((0.85, 0.7), (0.6, 0.45), (0.4, 0.25))
        for down_s in (300, 60)
    )


def hpa_behavior(options: PolicyOptions) -> HpaBehavior:
    """Return the behavior of Kubernetes' autoscaler."""
    defaults = HpaBehavior()
    return HpaBehavior(
        up_window_s=options.number("up", defaults.up_window_s, maximum=3600.0),
        down_window_s=options.number("down", defaults.down_window_s, maximum=3600.0),
        tolerance=options.number("tolerance", defaults.tolerance, maximum=1.0),
    )


def _tokens_per_waiting(role: Role, prompt: float, output: float) -> float:
    return prompt if role is Role.PREFILL else prompt + output
