"""llm-d's Workload Variant Autoscaler with its queueing model: `wva-queueing`.

Problem: load over capacity does not control latency. The same project has a model that does, which its last release
does not run.

Idea: every cycle each engine's arrivals, sizes and mean latencies of the last minute go to the tuner (`wva_chain`), one
engine after the other. Then replicas = ceil(all arrivals / the rate of one engine within both targets), and Kubernetes'
autoscaler does the rest as with `wva`. The service's targets are the model's, as means, the only kind it has. Without
them its own rule applies: three times the empty iteration. A target that is missed without load leaves replicas
unchanged, and so do unknown sizes.

Arrivals are requests sent to engines, so those queued or rejected at gateways do not count, as there. The controller's
counts per engine are here equal parts of the fleet's. After a change of the ready replicas nothing is learned for 120
s. It has no policy for disaggregated tiers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from plimsoll.core.ports import EngineReading
from plimsoll.core.types import Role
from plimsoll.sim.policies.base import Observation, PolicyContext, SimulatedPolicy
from plimsoll.sim.policies.hpa import Hpa, propose_from_total
from plimsoll.sim.policies.options import PolicyOptions
from plimsoll.sim.policies.peer import PeerPolicy, PeriodicTimer, scalers
from plimsoll.sim.policies.sliding_windows import CounterIncrease, mean_over_window
from plimsoll.sim.policies.wva import CYCLE_S, hpa_behavior
from plimsoll.sim.policies.wva_chain import (
    SIZING_QUEUE,
    BirthDeathChain,
    RequestSizes,
    TunerSample,
    WvaTuner,
    default_targets,
)

LATENCY_MULTIPLE: Final = 3.0
_LATENCY_WINDOW_S: Final = 60.0
_LENGTH_WINDOW_S: Final = 300.0
_TRANSIENT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class WvaTargets:
    """Mean targets, ms; None: not set. latency_multiple: of the unloaded latency; it replaces missing targets."""

    ttft_ms: float | None
    itl_ms: float | None
    latency_multiple: float


def replicas_for_rate(
    chain: BirthDeathChain, arrivals: float, ttft_ms: float | None, itl_ms: float | None
) -> int | None:
    """Return the replicas for this rate, requests per second; None if the targets cannot be met."""
    rate = chain.max_rate_within(ttft_ms, itl_ms)
    return None if rate is None else max(1, math.ceil(arrivals / rate))


class _WvaQueueingTier:
    def __init__(self, targets: WvaTargets, batch: int, cycle_s: float, hpa: Hpa, tolerance: float) -> None:
        self._targets, self._batch, self._hpa, self._tolerance = targets, batch, hpa, tolerance
        self._timer, self._tuner = PeriodicTimer(cycle_s), WvaTuner(batch)
        self._arrivals, self._ttft, self._itl = (CounterIncrease(_LATENCY_WINDOW_S) for _ in range(3))
        self._prompts, self._outputs = CounterIncrease(_LENGTH_WINDOW_S), CounterIncrease(_LENGTH_WINDOW_S)
        self._ready, self._since_s = 0, -math.inf

    def desired_replicas(self, observation: Observation) -> int | None:
        if not self._timer.is_due(observation.now_s):
            return None
        readings, now_s = observation.engine_readings[Role.SERVE], observation.now_s
        if len(readings) != self._ready:
            self._ready, self._since_s = len(readings), now_s
        arrivals = self._rate(observation)
        for window in (self._ttft, self._itl, self._prompts, self._outputs):
            window.retain([reading.pod for reading in readings])
        known_sizes = []
        for reading in readings:
            sizes = self._mean_sizes(now_s, reading)
            ttft_s = mean_over_window(self._ttft, now_s, reading.pod, reading.ttft_s)
            itl_s = mean_over_window(self._itl, now_s, reading.pod, reading.tpot_s)
            if sizes is None:
                continue
            known_sizes.append(sizes)
            if ttft_s and itl_s and arrivals and now_s - self._since_s >= _TRANSIENT_S:
                sample = TunerSample(arrivals / len(readings), sizes, 1000.0 * ttft_s, 1000.0 * itl_s)
                self._tuner.update(sample)
        current = observation.desired[Role.SERVE]
        target = self._target_replicas(arrivals, known_sizes)
        proposed = None if target is None else propose_from_total(float(target), 1.0, current, self._tolerance)
        return self._hpa.sync(now_s, current, proposed)

    def _target_replicas(self, arrivals: float, known_sizes: Sequence[RequestSizes]) -> int | None:
        parameters = self._tuner.parameters
        if parameters is None or not known_sizes:
            return None
        count = len(known_sizes)
        sizes = RequestSizes(
            sum(one.prompt for one in known_sizes) / count, sum(one.output for one in known_sizes) / count
        )
        ttft_ms, itl_ms = self._targets.ttft_ms, self._targets.itl_ms
        if ttft_ms is None and itl_ms is None:
            ttft_ms, itl_ms = default_targets(parameters, sizes, self._targets.latency_multiple)
        return replicas_for_rate(
            BirthDeathChain(parameters, sizes, self._batch, SIZING_QUEUE), arrivals, ttft_ms, itl_ms
        )

    def _rate(self, observation: Observation) -> float:
        """Return the requests per second that gateways sent to engines."""
        dispatched = sum(one.arrived - sum(one.rejected.values()) - one.queued for one in observation.gateway_readings)
        increase, seconds = self._arrivals.add(observation.now_s, "", dispatched, observation.now_s)
        return max(0.0, increase) / seconds if seconds > 0.0 else 0.0

    def _mean_sizes(self, now_s: float, reading: EngineReading) -> RequestSizes | None:
        prompt = mean_over_window(self._prompts, now_s, reading.pod, reading.prompt_tokens)
        output = mean_over_window(self._outputs, now_s, reading.pod, reading.output_tokens)
        return RequestSizes(prompt, output) if prompt > 0.0 and output > 0.0 else None


def make(options: PolicyOptions, context: PolicyContext) -> SimulatedPolicy:
    """Options ttft and itl (targets, seconds), times, cycle (seconds), and of Kubernetes' autoscaler up and down
    (stabilisation windows, seconds) and tolerance; gated."""
    if Role.SERVE not in context.bounds:
        raise options.error("it has no law for prefill and decode apart")
    slo = context.slo
    ttft_s, itl_s = (None, None) if slo is None else (slo.ttft_s, slo.tpot_s)
    ttft_ms, itl_ms = _target_ms(options, "ttft", ttft_s), _target_ms(options, "itl", itl_s)
    if (ttft_ms or itl_ms) and options.remaining_of(("times",)):
        raise options.error("times goes without targets: the service's, or ttft and itl, take its place")
    targets = WvaTargets(ttft_ms, itl_ms, options.positive("times", LATENCY_MULTIPLE))
    cycle_s = options.period("cycle", CYCLE_S)
    behaviour, gated = hpa_behavior(options), options.flag("gated", False)
    options.finish()

    def tier(role: Role, bounds: tuple[int, int]) -> _WvaQueueingTier:
        max_sequences = context.plant.profile_for(role).max_num_seqs
        return _WvaQueueingTier(targets, max_sequences, cycle_s, Hpa(behaviour, bounds), behaviour.tolerance)

    return PeerPolicy(scalers(context.bounds, tier), gated)


def settings() -> Sequence[str]:
    """Options for a search: margins of the means below the SLO, and the scale-down window."""
    targets = ("", "ttft=0.5,itl=0.02", "ttft=0.25,itl=0.015", "ttft=0.15,itl=0.01")
    return tuple(f"{option_text},down={down_s}".strip(",") for option_text in targets for down_s in (300, 60))


def _target_ms(options: PolicyOptions, key: str, slo_s: float | None) -> float | None:
    seconds = options.number(key, 0.0 if slo_s is None else slo_s)
    return 1000.0 * seconds if seconds else None
