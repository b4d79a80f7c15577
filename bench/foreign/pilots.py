"""Who sizes the fleet in their replay: Plimsoll's own core, Dynamo's own planner, a follower, or nobody.

Their replay asks one object, at moments that it names itself, how many engines there shall be (`initial_tick_ms`,
`on_tick`). `Plimsoll` looks at every step and hands the simulator's `Operator` what it would have heard in a cluster,
as often as there; the decisions are the core's. `planner` is Dynamo's adapter as its own entry point makes it;
`Following` is a yardstick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, Protocol

from bench.foreign.watch import Watch, pod
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.core.autoscaler import TierSeen
from plimsoll.core.lifecycle import Starting
from plimsoll.core.picking.endpoint import Role
from plimsoll.sim.iteration import Did
from plimsoll.sim.operator import BUSY_S, TICK_S, Operator
from plimsoll.sim.plant import Plant
from plimsoll.sim.policies.base import Look, Policy, Scene
from plimsoll.sim.policies.dynamo_profile import Sample
from plimsoll.sim.startup import Phases, under_way
from plimsoll.sim.visit import Asked

_LOOK: Final = 0.8  # of the shortest step, so that none is missed
EPOCH_S: Final = 1_767_225_600.0
_GATEWAY: Final = "gateway"
_TIER: Final = "serve"


class Pilot(Protocol):
    """What their replay asks."""

    def initial_tick_ms(self) -> float: ...

    def on_tick(self, shown: dict[str, Any]) -> dict[str, Any]: ...


class Nobody:
    """As many as there are."""

    def initial_tick_ms(self) -> float:
        return 1000.0

    def on_tick(self, shown: dict[str, Any]) -> dict[str, Any]:
        return {"target_prefill": None, "target_decode": None, "next_tick_ms": shown["now_ms"] + 1000.0}


class Plimsoll:
    """The operator's core over their engines. phases: of every start. ordered: engines at first, all ready."""

    def __init__(
        self, service: InferenceService, plant: Plant, phases: Phases, asked: Sequence[Asked], ordered: int
    ) -> None:
        self._operator, self._watch = Operator(service), Watch(asked, plant.profile)
        self._about, self._phases = plant.about(Role.SERVE), phases
        self._look_s = _LOOK * plant.profile.coefficients.base
        self._first = self._ordered = ordered
        self._began_s: dict[int, float] = {}
        self._scrape_s: dict[int, float] = {}
        self._tick_s = 0.0

    def initial_tick_ms(self) -> float:
        return 1000.0 * self._look_s

    def on_tick(self, shown: dict[str, Any]) -> dict[str, Any]:
        self._watch.take(shown)
        now_s, target = shown["now_ms"] / 1000.0, None
        if now_s >= self._tick_s:
            self._tick_s += TICK_S
            wanted = self._decided(shown, now_s)
            if wanted != self._ordered:
                self._ordered = target = wanted
        return {"target_prefill": None, "target_decode": target, "next_tick_ms": 1000.0 * (now_s + self._look_s)}

    def _decided(self, shown: Mapping[str, Any], now_s: float) -> int:
        active, starting = shown["active_decode_ids"], shown["starting_decode_ids"]
        for worker in starting:
            self._began_s.setdefault(worker, now_s)
        for worker in active:
            if worker not in self._scrape_s:
                self._scrape_s[worker] = now_s
                if worker >= self._first:
                    self._operator.started(_TIER, self._phases)
            if now_s >= self._scrape_s[worker]:
                self._scrape_s[worker] += BUSY_S
                self._operator.hear_engine(Role.SERVE, self._watch.engine(pod(worker), now_s, EPOCH_S))
        names = [pod(worker) for worker in active]
        self._operator.hear_gateway(_GATEWAY, EPOCH_S + now_s, self._watch.gateway(names, now_s))
        told = tuple(self._starting(worker, now_s) for worker in starting)
        seen = TierSeen(self._ordered, len(active), told, self._about if active else None)
        decision = self._operator.tick(EPOCH_S + now_s, {_TIER: seen}, {Role.SERVE: names}, [_GATEWAY])
        return decision.tiers[_TIER].replicas

    def _starting(self, worker: int, now_s: float) -> Starting:
        began_s = self._began_s[worker]
        phase, since_s = under_way(self._phases, began_s, now_s)
        return Starting(pod(worker), EPOCH_S + began_s, phase, EPOCH_S + since_s)


class Following:
    """A follower of `plimsoll simulate`: it goes by arrivals alone, and knows their lengths and the engines' law."""

    def __init__(self, policy: Policy, asked: Sequence[Asked], ordered: int) -> None:
        self._policy, self._ordered = policy, ordered
        self._coming = iter([*asked, None])
        self._next = next(self._coming)

    def initial_tick_ms(self) -> float:
        return 1000.0 * TICK_S

    def on_tick(self, shown: dict[str, Any]) -> dict[str, Any]:
        now_s, target = shown["now_ms"] / 1000.0, None
        while self._next is not None and self._next.at_s <= now_s:
            self._policy.arrived(self._next, self._next.at_s)
            self._next = next(self._coming)
        wanted = self._policy.wanted(Look(now_s, {Role.SERVE: self._ordered}))[Role.SERVE]
        if wanted != self._ordered:
            self._ordered = target = wanted
        return {"target_prefill": None, "target_decode": target, "next_tick_ms": 1000.0 * (now_s + TICK_S)}


def planner(mode: str, scene: Scene, benchmark: Sequence[Sample], package: SimpleNamespace) -> Any:
    """Dynamo's adapter with its planner. mode: `slow` for its slow loop, else the target of its fast one. benchmark:
    what an engine tells it of itself where it plans by a promise."""
    slow, slo, own, gpus = mode == "slow", scene.slo, scene.plant.profile, scene.gpus[Role.SERVE]
    least, most = scene.bounds[Role.SERVE]
    target = "sla" if slow else mode
    config = package.PlannerConfig(
        mode="agg",
        backend="vllm",
        environment="virtual",
        optimization_target=target,
        enable_throughput_scaling=slow,
        enable_load_scaling=not slow,
        decode_engine_num_gpu=gpus,
        min_endpoint=least,
        max_gpu_budget=most * gpus,
        ttft_ms=None if slo is None or slo.ttft_s is None else 1000.0 * slo.ttft_s,
        itl_ms=None if slo is None or slo.tpot_s is None else 1000.0 * slo.tpot_s,
        load_predictor="constant",
        advisory=True,
        report_interval_hours=None,
        live_dashboard_port=0,
    )
    engine = package.EngineCapabilities(
        num_gpu=gpus,
        max_num_batched_tokens=own.budget,
        max_num_seqs=own.max_num_seqs,
        context_length=own.max_model_len,
        max_kv_tokens=own.kv_tokens,
    )
    adapter = package.create_replay_planner_adapter(config, package.WorkerCapabilities(decode=engine))
    if target == "sla":
        adapter.install_benchmark_fpms(agg_fpms=[_step(package, took_s, did) for took_s, did in benchmark])
    return adapter


def _step(package: SimpleNamespace, took_s: float, did: Did) -> Any:
    scheduled = package.ScheduledRequestMetrics(
        num_prefill_requests=did.prefills,
        sum_prefill_tokens=did.tokens,
        num_decode_requests=did.decodes,
        sum_decode_kv_tokens=did.context,
    )
    return package.ForwardPassMetrics(wall_time=took_s, scheduled_requests=scheduled)
