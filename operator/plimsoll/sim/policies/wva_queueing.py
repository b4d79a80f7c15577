"""llm-d's Workload Variant Autoscaler with its queueing model: `wva-queueing`.

Problem: load over capacity holds no latency; the same project has a model that does, which its last release refuses to
run.

Idea: every cycle each engine's arrivals, sizes and mean latencies of the last minute are shown to the tuner
(`wva_chain`), one engine after the other; then replicas = ceil(all arrivals / the rate that one engine takes within
both targets), and Kubernetes' autoscaler does the rest as with `wva`. The service's targets are the model's, as means:
it knows no other. Without them it has its own rule, three times the empty iteration. A target that is missed without
load leaves replicas as they are, and so does a time without known sizes.

Arrivals are those that were sent to engines, so that what gateways hold or refuse is not counted, as there. What its
controller would count by engine is here the fleet's, in equal parts. After a change of the ready replicas nothing is
learned for 120 s. It has no law for prefill and decode apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import EngineReading
from plimsoll.sim.policies.base import Look, Policy, Scene
from plimsoll.sim.policies.hpa import Hpa, by_total
from plimsoll.sim.policies.options import Options
from plimsoll.sim.policies.peer import Peer, Timer, scalers
from plimsoll.sim.policies.windows import Increase, mean
from plimsoll.sim.policies.wva import CYCLE_S, scaling
from plimsoll.sim.policies.wva_chain import SIZING_QUEUE, Chain, Observed, Sizes, Tuner, usual_targets

TIMES: Final = 3.0
_LATENCIES_S: Final = 60.0
_LENGTHS_S: Final = 300.0
_TRANSIENT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Targets:
    """Means, milliseconds; None: not given. times: of the rule that then takes their place."""

    ttft_ms: float | None
    itl_ms: float | None
    times: float


def replicas(chain: Chain, arrivals: float, ttft_ms: float | None, itl_ms: float | None) -> int | None:
    """For so many requests a second; None where the targets cannot be met."""
    rate = chain.rate(ttft_ms, itl_ms)
    return None if rate is None else max(1, math.ceil(arrivals / rate))


class _Tier:
    def __init__(self, targets: Targets, batch: int, cycle_s: float, hpa: Hpa, tolerance: float) -> None:
        self._targets, self._batch, self._hpa, self._tolerance = targets, batch, hpa, tolerance
        self._timer, self._tuner = Timer(cycle_s), Tuner(batch)
        self._arrivals, self._ttft, self._itl = (Increase(_LATENCIES_S) for _ in range(3))
        self._prompts, self._outputs = Increase(_LENGTHS_S), Increase(_LENGTHS_S)
        self._ready, self._since_s = 0, -math.inf

    def wanted(self, look: Look) -> int | None:
        if not self._timer.due(look.now_s):
            return None
        readings, now_s = look.engines[Role.SERVE], look.now_s
        if len(readings) != self._ready:
            self._ready, self._since_s = len(readings), now_s
        arrivals = self._rate(look)
        for window in (self._ttft, self._itl, self._prompts, self._outputs):
            window.keep([reading.pod for reading in readings])
        known = []
        for reading in readings:
            sizes = self._sizes(now_s, reading)
            ttft_s = mean(self._ttft, now_s, reading.pod, reading.ttft_s)
            itl_s = mean(self._itl, now_s, reading.pod, reading.tpot_s)
            if sizes is None:
                continue
            known.append(sizes)
            if ttft_s and itl_s and arrivals and now_s - self._since_s >= _TRANSIENT_S:
                seen = Observed(arrivals / len(readings), sizes, 1000.0 * ttft_s, 1000.0 * itl_s)
                self._tuner.hear(seen)
        current = look.ordered[Role.SERVE]
        target = self._wanted(arrivals, known)
        proposed = None if target is None else by_total(float(target), 1.0, current, self._tolerance)
        return self._hpa.sync(now_s, current, proposed)

    def _wanted(self, arrivals: float, known: Sequence[Sizes]) -> int | None:
        parameters = self._tuner.parameters
        if parameters is None or not known:
            return None
        count = len(known)
        sizes = Sizes(sum(one.prompt for one in known) / count, sum(one.output for one in known) / count)
        ttft_ms, itl_ms = self._targets.ttft_ms, self._targets.itl_ms
        if ttft_ms is None and itl_ms is None:
            ttft_ms, itl_ms = usual_targets(parameters, sizes, self._targets.times)
        return replicas(Chain(parameters, sizes, self._batch, SIZING_QUEUE), arrivals, ttft_ms, itl_ms)

    def _rate(self, look: Look) -> float:
        """Requests a second that gateways sent on."""
        sent = sum(one.arrived - sum(one.refused.values()) - one.waiting for one in look.gateways)
        grown, seconds = self._arrivals.add(look.now_s, "", sent, look.now_s)
        return max(0.0, grown) / seconds if seconds > 0.0 else 0.0

    def _sizes(self, now_s: float, reading: EngineReading) -> Sizes | None:
        prompt = mean(self._prompts, now_s, reading.pod, reading.prompt_tokens)
        output = mean(self._outputs, now_s, reading.pod, reading.output_tokens)
        return Sizes(prompt, output) if prompt > 0.0 and output > 0.0 else None


def make(options: Options, scene: Scene) -> Policy:
    """Options ttft and itl (targets, seconds), times, cycle (seconds), and of Kubernetes' autoscaler up and down
    (stabilisation windows, seconds) and tolerance; gated."""
    if Role.SERVE not in scene.bounds:
        raise options.bad("it has no law for prefill and decode apart")
    slo = scene.slo
    ttft_s, itl_s = (None, None) if slo is None else (slo.ttft_s, slo.tpot_s)
    ttft_ms, itl_ms = _target_ms(options, "ttft", ttft_s), _target_ms(options, "itl", itl_s)
    if (ttft_ms or itl_ms) and options.among(("times",)):
        raise options.bad("times goes without targets: the service's, or ttft and itl, take its place")
    targets = Targets(ttft_ms, itl_ms, options.positive("times", TIMES))
    cycle_s = options.period("cycle", CYCLE_S)
    behaviour, gated = scaling(options), options.flag("gated", False)
    options.end()

    def tier(role: Role, bounds: tuple[int, int]) -> _Tier:
        batch = scene.plant.of_role(role).max_num_seqs
        return _Tier(targets, batch, cycle_s, Hpa(behaviour, bounds), behaviour.tolerance)

    return Peer(scalers(scene.bounds, tier), gated)


def settings() -> Sequence[str]:
    """Words worth trying: how far below the promise its means are to stay, and the window for fewer."""
    targets = ("", "ttft=0.5,itl=0.02", "ttft=0.25,itl=0.015", "ttft=0.15,itl=0.01")
    return tuple(f"{words},down={down_s}".strip(",") for words in targets for down_s in (300, 60))


def _target_ms(options: Options, key: str, promised_s: float | None) -> float | None:
    seconds = options.number(key, 0.0 if promised_s is None else promised_s)
    return 1000.0 * seconds if seconds else None
