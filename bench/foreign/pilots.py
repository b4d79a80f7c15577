"""Who sizes the fleet in their replay: Plimsoll's own core, Dynamo's own planner, a follower, or nobody.

Their replay asks one object, at moments that it names itself, how many engines there shall be (`initial_tick_ms`,
`on_tick`). `Plimsoll` looks at every step and hands the simulator's `Operator` what it would have heard in a cluster,
as often as there; the decisions are the core's. `planner` is Dynamo's adapter as its own entry point makes it;
`Following` is a yardstick.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, Protocol

from bench.foreign.watch import GROUPS, Watch, pod
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


class Pilot(Protocol):
    """What their replay asks."""

    def initial_tick_ms(self) -> float: ...

    def on_tick(self, shown: dict[str, Any]) -> dict[str, Any]: ...


class Nobody:
    """As many as there are."""

    def initial_tick_ms(self) -> float:
        return 1000.0 * TICK_S

    def on_tick(self, shown: dict[str, Any]) -> dict[str, Any]:
        return _answer(shown["now_ms"] / 1000.0 + TICK_S)


class Ordering:
    """Replicas of each tier, of which only what has changed is told. ordered: at first."""

    def __init__(self, ordered: Mapping[Role, int]) -> None:
        self.ordered = dict(ordered)

    def answer(self, next_s: float, wanted: Mapping[Role, int]) -> dict[str, Any]:
        """To look again at a moment, with these orders."""
        changed = {role: count for role, count in wanted.items() if count != self.ordered[role]}
        self.ordered |= changed
        return _answer(next_s, changed)


class Plimsoll(Ordering):
    """The operator's core over their engines. phases: of every start. ordered: engines at first, all ready."""

    def __init__(
        self,
        service: InferenceService,
        plant: Plant,
        phases: Phases,
        asked: Sequence[Asked],
        ordered: Mapping[Role, int],
    ) -> None:
        super().__init__(ordered)
        self._operator, self._watch = Operator(service), Watch(ordered, asked, plant)
        self._about, self._phases = {role: plant.about(role) for role in ordered}, phases
        self._look_s = _LOOK * plant.profile.coefficients.base
        self._first = {pod(role, worker) for role, count in ordered.items() for worker in range(count)}
        self._began_s: dict[str, float] = {}
        self._scrape_s: dict[str, float] = {}
        self._tick_s = 0.0

    def initial_tick_ms(self) -> float:
        return 1000.0 * self._look_s

    def on_tick(self, shown: dict[str, Any]) -> dict[str, Any]:
        self._watch.take(shown)
        now_s, wanted = shown["now_ms"] / 1000.0, dict[Role, int]()
        if now_s >= self._tick_s:
            self._tick_s += TICK_S
            wanted = self._decided(shown, now_s)
        return self.answer(now_s + self._look_s, wanted)

    def _decided(self, shown: Mapping[str, Any], now_s: float) -> dict[Role, int]:
        ready = {role: _named(role, shown, "active") for role in self.ordered}
        seen = {str(role): self._seen(role, names, shown, now_s) for role, names in ready.items()}
        names = [name for tier in ready.values() for name in tier]
        self._operator.hear_gateway(_GATEWAY, EPOCH_S + now_s, self._watch.gateway(names, now_s))
        decision = self._operator.tick(EPOCH_S + now_s, seen, ready, [_GATEWAY])
        return {role: decision.tiers[str(role)].replicas for role in self.ordered}

    def _seen(self, role: Role, ready: Sequence[str], shown: Mapping[str, Any], now_s: float) -> TierSeen:
        starting = _named(role, shown, "starting")
        for name in starting:
            self._began_s.setdefault(name, now_s)
        for name in ready:
            self._hear(role, name, now_s)
        told = tuple(self._starting(name, now_s) for name in starting)
        return TierSeen(self.ordered[role], len(ready), told, self._about[role] if ready else None)

    def _hear(self, role: Role, name: str, now_s: float) -> None:
        if name not in self._scrape_s:
            self._scrape_s[name] = now_s
            if name not in self._first:
                self._operator.started(str(role), self._phases)
        if now_s >= self._scrape_s[name]:
            self._scrape_s[name] += BUSY_S
            self._operator.hear_engine(role, self._watch.engine(name, now_s, EPOCH_S))

    def _starting(self, name: str, now_s: float) -> Starting:
        began_s = self._began_s[name]
        phase, since_s = under_way(self._phases, began_s, now_s)
        return Starting(name, EPOCH_S + began_s, phase, EPOCH_S + since_s)


class Following(Ordering):
    """A follower of `plimsoll simulate`: it goes by arrivals alone, and knows their lengths and the engines' law."""

    def __init__(self, policy: Policy, asked: Sequence[Asked], ordered: Mapping[Role, int]) -> None:
        super().__init__(ordered)
        self._policy, self._coming = policy, deque(asked)

    def initial_tick_ms(self) -> float:
        return 1000.0 * TICK_S

    def on_tick(self, shown: dict[str, Any]) -> dict[str, Any]:
        now_s = shown["now_ms"] / 1000.0
        while self._coming and self._coming[0].at_s <= now_s:
            one = self._coming.popleft()
            self._policy.arrived(one, one.at_s)
        return self.answer(now_s + TICK_S, self._policy.wanted(Look(now_s, self.ordered)))


def _answer(next_s: float, targets: Mapping[Role, int] | None = None) -> dict[str, Any]:
    """What their replay is told."""
    by_group = {GROUPS[role]: count for role, count in (targets or {}).items()}
    return {
        "target_prefill": by_group.get("prefill"),
        "target_decode": by_group.get("decode"),
        "next_tick_ms": 1000.0 * next_s,
    }


def _named(role: Role, shown: Mapping[str, Any], state: str) -> list[str]:
    return [pod(role, worker) for worker in shown[f"{state}_{GROUPS[role]}_ids"]]


def planner(mode: str, scene: Scene, benchmark: Mapping[Role, Sequence[Sample]], package: SimpleNamespace) -> Any:
    """Dynamo's adapter with its planner. mode: `slow` for its slow loop, else the target of its fast one. benchmark:
    what an engine of each tier tells it of itself where it plans by a promise."""
    slow, slo, own = mode == "slow", scene.slo, scene.plant.profile
    target, pair = "sla" if slow else mode, Role.PREFILL in scene.bounds
    gpus = scene.gpus[Role.DECODE if pair else Role.SERVE]
    config = package.PlannerConfig(
        mode="disagg" if pair else "agg",
        backend="vllm",
        environment="virtual",
        optimization_target=target,
        enable_throughput_scaling=slow,
        enable_load_scaling=not slow,
        prefill_engine_num_gpu=scene.gpus[Role.PREFILL] if pair else None,
        decode_engine_num_gpu=gpus,
        min_endpoint=min(least for least, _ in scene.bounds.values()),
        max_gpu_budget=sum(most * scene.gpus[role] for role, (_, most) in scene.bounds.items()),
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
    able = package.WorkerCapabilities(decode=engine, **({"prefill": engine} if pair else {}))
    adapter = package.create_replay_planner_adapter(config, able)
    if target == "sla":
        steps = {role: [_step(package, took_s, did) for took_s, did in some] for role, some in benchmark.items()}
        names = {Role.SERVE: "agg", Role.PREFILL: "prefill", Role.DECODE: "decode"}
        adapter.install_benchmark_fpms(**{f"{names[role]}_fpms": some for role, some in steps.items()})
    return adapter


def _step(package: SimpleNamespace, took_s: float, did: Did) -> Any:
    scheduled = package.ScheduledRequestMetrics(
        num_prefill_requests=did.prefills,
        sum_prefill_tokens=did.tokens,
        num_decode_requests=did.decodes,
        sum_decode_kv_tokens=did.context,
    )
    return package.ForwardPassMetrics(wall_time=took_s, scheduled_requests=scheduled)
