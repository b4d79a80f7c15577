"""Controllers that size the fleet in Dynamo's replay: Plimsoll's core, Dynamo's planner, a reactive baseline, or none.

The replay asks one object, at times that it sets itself, for the number of engines (`initial_tick_ms`, `on_tick`).
`PlimsollController` observes every step and gives the simulator's `SimulatedOperator` what it would observe in a
cluster, as often as there; the core decides. `planner` is Dynamo's adapter, created as by its own entry point.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, Protocol

from bench.dynamo_replay.counters import GROUPS, ReplayCounters, pod_name
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.core.autoscaling.inputs import TierSnapshot
from plimsoll.core.autoscaling.startup_time import StartingPod
from plimsoll.core.types import Role
from plimsoll.sim.attempt import TraceRequest
from plimsoll.sim.engine.iteration import StepWork
from plimsoll.sim.operator import BUSY_SCRAPE_S, TICK_S, SimulatedOperator
from plimsoll.sim.plant import Plant
from plimsoll.sim.policies.base import Observation, PolicyContext, SimulatedPolicy
from plimsoll.sim.policies.dynamo_profile import BenchmarkSample
from plimsoll.sim.startup import StartupPhases, current_phase

_POLL_SHARE: Final = 0.8  # of the shortest step, so that none is missed
EPOCH_S: Final = 1_767_225_600.0
_GATEWAY: Final = "gateway"


class ReplayController(Protocol):
    """What their replay asks."""

    def initial_tick_ms(self) -> float: ...

    def on_tick(self, shown: dict[str, Any]) -> dict[str, Any]: ...


class ConstantReplicas:
    """As many as there are."""

    def initial_tick_ms(self) -> float:
        return 1000.0 * TICK_S

    def on_tick(self, shown: dict[str, Any]) -> dict[str, Any]:
        return _tick_answer(shown["now_ms"] / 1000.0 + TICK_S)


class OrderTracker:
    """Replicas of each tier, of which only what has changed is told. ordered: at first."""

    def __init__(self, ordered: Mapping[Role, int]) -> None:
        self.desired = dict(ordered)

    def next_orders(self, next_s: float, targets: Mapping[Role, int]) -> dict[str, Any]:
        """To look again at a moment, with these orders."""
        changed = {role: count for role, count in targets.items() if count != self.desired[role]}
        self.desired |= changed
        return _tick_answer(next_s, changed)


class PlimsollController(OrderTracker):
    """The operator's core over their engines. phases: of every start. ordered: engines at first, all ready."""

    def __init__(
        self,
        service: InferenceService,
        plant: Plant,
        phases: StartupPhases,
        requests: Sequence[TraceRequest],
        ordered: Mapping[Role, int],
    ) -> None:
        super().__init__(ordered)
        self._operator, self._watch = SimulatedOperator(service), ReplayCounters(ordered, requests, plant)
        self._about, self._phases = {role: plant.engine_info(role) for role in ordered}, phases
        self._look_s = _POLL_SHARE * plant.profile.coefficients.base
        self._first = {pod_name(role, worker) for role, count in ordered.items() for worker in range(count)}
        self._began_s: dict[str, float] = {}
        self._scrape_s: dict[str, float] = {}
        self._tick_s = 0.0

    def initial_tick_ms(self) -> float:
        return 1000.0 * self._look_s

    def on_tick(self, shown: dict[str, Any]) -> dict[str, Any]:
        self._watch.observe(shown)
        now_s, targets = shown["now_ms"] / 1000.0, dict[Role, int]()
        if now_s >= self._tick_s:
            self._tick_s += TICK_S
            targets = self._decide(shown, now_s)
        return self.next_orders(now_s + self._look_s, targets)

    def _decide(self, shown: Mapping[str, Any], now_s: float) -> dict[Role, int]:
        ready = {role: _worker_names(role, shown, "active") for role in self.desired}
        snapshots = {str(role): self._snapshot(role, names, shown, now_s) for role, names in ready.items()}
        names = [name for tier in ready.values() for name in tier]
        self._operator.observe_gateway(_GATEWAY, EPOCH_S + now_s, self._watch.gateway(names, now_s))
        decision = self._operator.tick(EPOCH_S + now_s, snapshots, ready, [_GATEWAY])
        return {role: decision.tiers[str(role)].replicas for role in self.desired}

    def _snapshot(self, role: Role, ready: Sequence[str], shown: Mapping[str, Any], now_s: float) -> TierSnapshot:
        starting = _worker_names(role, shown, "starting")
        for name in starting:
            self._began_s.setdefault(name, now_s)
        for name in ready:
            self._observe(role, name, now_s)
        engine_info = tuple(self._startup_progress(name, now_s) for name in starting)
        return TierSnapshot(self.desired[role], len(ready), engine_info, self._about[role] if ready else None)

    def _observe(self, role: Role, name: str, now_s: float) -> None:
        if name not in self._scrape_s:
            self._scrape_s[name] = now_s
            if name not in self._first:
                self._operator.record_startup(str(role), self._phases)
        if now_s >= self._scrape_s[name]:
            self._scrape_s[name] += BUSY_SCRAPE_S
            self._operator.observe_engine(role, self._watch.engine(name, now_s, EPOCH_S))

    def _startup_progress(self, name: str, now_s: float) -> StartingPod:
        began_s = self._began_s[name]
        phase, since_s = current_phase(self._phases, began_s, now_s)
        return StartingPod(name, EPOCH_S + began_s, phase, EPOCH_S + since_s)


class ReactiveController(OrderTracker):
    """A follower of `plimsoll simulate`: it goes by arrivals alone, and knows their lengths and the engines' law."""

    def __init__(self, policy: SimulatedPolicy, requests: Sequence[TraceRequest], ordered: Mapping[Role, int]) -> None:
        super().__init__(ordered)
        self._policy, self._coming = policy, deque(requests)

    def initial_tick_ms(self) -> float:
        return 1000.0 * TICK_S

    def on_tick(self, shown: dict[str, Any]) -> dict[str, Any]:
        now_s = shown["now_ms"] / 1000.0
        while self._coming and self._coming[0].at_s <= now_s:
            request = self._coming.popleft()
            self._policy.on_arrival(request, request.at_s)
        return self.next_orders(now_s + TICK_S, self._policy.desired_replicas(Observation(now_s, self.desired)))


def _tick_answer(next_s: float, targets: Mapping[Role, int] | None = None) -> dict[str, Any]:
    """What their replay is told."""
    by_group = {GROUPS[role]: count for role, count in (targets or {}).items()}
    return {
        "target_prefill": by_group.get("prefill"),
        "target_decode": by_group.get("decode"),
        "next_tick_ms": 1000.0 * next_s,
    }


def _worker_names(role: Role, shown: Mapping[str, Any], state: str) -> list[str]:
    return [pod_name(role, worker) for worker in shown[f"{state}_{GROUPS[role]}_ids"]]


def planner(
    mode: str, scene: PolicyContext, benchmark: Mapping[Role, Sequence[BenchmarkSample]], package: SimpleNamespace
) -> Any:
    """Dynamo's adapter with its planner. mode: `slow` for its slow loop, else the target of its fast one. benchmark:
    what an engine of each tier tells it of itself where it plans by a promise."""
    is_throughput, slo, profile = mode == "slow", scene.slo, scene.plant.profile
    target, pair = "sla" if is_throughput else mode, Role.PREFILL in scene.bounds
    gpus = scene.gpus[Role.DECODE if pair else Role.SERVE]
    config = package.PlannerConfig(
        mode="disagg" if pair else "agg",
        backend="vllm",
        environment="virtual",
        optimization_target=target,
        enable_throughput_scaling=is_throughput,
        enable_load_scaling=not is_throughput,
        prefill_engine_num_gpu=scene.gpus[Role.PREFILL] if pair else None,
        decode_engine_num_gpu=gpus,
        min_endpoint=min(min_replicas for min_replicas, _ in scene.bounds.values()),
        max_gpu_budget=sum(max_replicas * scene.gpus[role] for role, (_, max_replicas) in scene.bounds.items()),
        ttft_ms=None if slo is None or slo.ttft_s is None else 1000.0 * slo.ttft_s,
        itl_ms=None if slo is None or slo.tpot_s is None else 1000.0 * slo.tpot_s,
        load_predictor="constant",
        advisory=True,
        report_interval_hours=None,
        live_dashboard_port=0,
    )
    engine = package.EngineCapabilities(
        num_gpu=gpus,
        max_num_batched_tokens=profile.budget,
        max_num_seqs=profile.max_num_seqs,
        context_length=profile.max_model_len,
        max_kv_tokens=profile.kv_tokens,
    )
    capabilities = package.WorkerCapabilities(decode=engine, **({"prefill": engine} if pair else {}))
    adapter = package.create_replay_planner_adapter(config, capabilities)
    if target == "sla":
        steps = {role: [_step(package, step_s, work) for step_s, work in shape] for role, shape in benchmark.items()}
        names = {Role.SERVE: "agg", Role.PREFILL: "prefill", Role.DECODE: "decode"}
        adapter.install_benchmark_fpms(**{f"{names[role]}_fpms": shape for role, shape in steps.items()})
    return adapter


def _step(package: SimpleNamespace, step_s: float, work: StepWork) -> Any:
    scheduled = package.ScheduledRequestMetrics(
        num_prefill_requests=work.prefills,
        sum_prefill_tokens=work.tokens,
        num_decode_requests=work.decodes,
        sum_decode_kv_tokens=work.context,
    )
    return package.ForwardPassMetrics(wall_time=step_s, scheduled_requests=scheduled)
