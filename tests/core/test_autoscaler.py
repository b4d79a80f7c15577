"""The law of a tick, end to end and pure: what is heard of a fleet goes in, replicas come out."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from plimsoll.core import workload
from plimsoll.core.autoscaling.fleet_decisions import DECISIONS_PER_SLICE, SLICE_SIZE, decide_all, decide_in_slices
from plimsoll.core.autoscaling.ingest import ingest
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.observations import LaggingSignals, SizingResult
from plimsoll.core.autoscaling.scaling_decision import ScalingDecision
from plimsoll.core.autoscaling.scaling_policy import ScalingMode, ScalingPolicy, TierPolicy
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.sizing_batch import TierCapacity
from plimsoll.core.autoscaling.startup_models import Variant
from plimsoll.core.autoscaling.startup_time import StartingPod
from plimsoll.core.autoscaling.state_checkpoint import dump_service_state, restore_service_state
from plimsoll.core.autoscaling.tier_engines import TierEngines
from plimsoll.core.capacity.sizing import Sizing, size_tier
from plimsoll.core.capacity.slo_capacity import slo_capacity_per_s
from plimsoll.core.capacity.tier_model import build_profile
from plimsoll.core.demand.service_metrics import ServiceMetrics, TierMetrics
from plimsoll.core.engine_model.step_time import StepModel
from plimsoll.core.ports import EngineInfo, SelfBenchmark
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable

START_S = 1.8e9
SLO = Slo(0.95, ttft_s=2.0, tpot_s=0.05)
ABOUT = EngineInfo(
    "vllm",
    "0.32.0",
    "some GPU",
    1,
    max_sequences=128,
    kv_tokens=400_000,
    token_budget=8192,
    block_tokens=16,
    self_benchmark=SelfBenchmark(
        prefill=((128, 0.02), (1024, 0.06), (4096, 0.2)),
        decode=((1, 128, 0.0152), (4, 128, 0.0158), (8, 128, 0.0166)),
    ),
)


def mix(prompt: float = 800, output: float = 200) -> workload.Workload:
    rng = np.random.default_rng(1)
    return workload.from_samples(
        rng.lognormal(math.log(prompt), 0.4, 256), np.zeros(256), rng.lognormal(math.log(output), 0.4, 256)
    )


MIX = mix()


def service_metrics(
    rate: float | Unavailable, *roles: Role, coverage: float = 1.0, **measured: float | Unavailable
) -> ServiceMetrics:
    tiers = {role: TierMetrics(LaggingSignals(**measured), coverage, 1.0) for role in roles}
    return ServiceMetrics(rate_per_s=rate, has_new_rate=True, coverage=coverage, workload=MIX, tiers=tiers)


def scaling_spec(
    slo: Slo | None = SLO, mode: ScalingMode = ScalingMode.AUTO, tiers: dict[str, TierPolicy] | None = None
) -> ScalingSpec:
    return ScalingSpec(ScalingPolicy(tiers or {"serve": TierPolicy(1, 50)}, slo=slo, mode=mode), slo)


class Fleet:
    """One service whose replicas are there as soon as they are ordered, or never."""

    def __init__(self, desired: ScalingSpec, about: EngineInfo | None = ABOUT, arrives: bool = True) -> None:
        self.scaling_spec, self.about, self.arrives = desired, about, arrives
        self.service = ServiceState.for_roles(list(desired.policy.tiers))
        self.replicas = {name: tier.min_replicas for name, tier in desired.policy.tiers.items()}
        self.now_s = START_S

    def tick(self, said: ServiceMetrics, **starting: tuple[StartingPod, ...]) -> ScalingDecision:
        self.now_s += 1.0
        tiers = {
            name: TierSnapshot(count, count - len(starting.get(name, ())), starting.get(name, ()), self.about)
            for name, count in self.replicas.items()
        }
        decision = decide_all({"one": (self.service, ServiceSnapshot(said, tiers), self.scaling_spec)}, self.now_s)[
            "one"
        ]
        if self.arrives:
            self.replicas = {name: tier.replicas for name, tier in decision.tiers.items()}
        return decision

    def run(self, said: ServiceMetrics, seconds: int) -> ScalingDecision:
        for _ in range(seconds - 1):
            self.tick(said)
        return self.tick(said)


@cache
def _loaded() -> Fleet:
    fleet = Fleet(scaling_spec())
    fleet.run(service_metrics(40.0, Role.SERVE), 300)
    return fleet


def loaded() -> Fleet:
    """A fleet of its own for each who asks, after five minutes of 40 requests a second."""
    return deepcopy(_loaded())


def need(fleet: Fleet, tier: str = "serve") -> SizingResult:
    found = fleet.service.sizings[tier]
    assert isinstance(found, SizingResult), found
    return found


def test_load_step_is_followed_by_single_scale_up() -> None:
    fleet = Fleet(scaling_spec())
    fleet.run(service_metrics(2.0, Role.SERVE), 120)
    before = fleet.replicas["serve"]
    counts = []
    for _ in range(20):
        fleet.tick(service_metrics(60.0, Role.SERVE))
        counts.append(fleet.replicas["serve"])
    sized = fleet.service.tiers["serve"].capacity_state.tier_spec
    assert sized is not None
    answer = size_tier(sized, 60.0)
    assert isinstance(answer, Sizing)
    enough = answer.replicas
    assert before < enough <= counts[-1]
    assert counts[5] >= enough, f"{counts}: not within seconds"
    assert sorted(counts) == counts


def test_constant_load_keeps_replicas_and_lower_load_fewer() -> None:
    fleet = Fleet(scaling_spec())
    counts = [fleet.tick(service_metrics(40.0, Role.SERVE)).tiers["serve"].replicas for _ in range(900)]
    high, line = counts[-1], need(fleet)
    moves = [b - a for a, b in pairwise(counts) if a != b]
    reversals = sum(a * b < 0 for a, b in pairwise(moves))
    assert reversals <= 1, moves
    assert high >= 40.0 * line.request_gpu_s / line.replica_work
    assert fleet.run(service_metrics(4.0, Role.SERVE), 300).tiers["serve"].replicas < high


def test_bursty_arrivals_lower_slo_capacity() -> None:
    """Prompts that are read one after another: of as many, those that come eight at a time wait longer."""
    lines = []
    pair = {"prefill": TierPolicy(1, 50), "decode": TierPolicy(1, 50)}
    for bunch in (1.0, 8.0):
        fleet, rng = Fleet(scaling_spec(slo=replace(SLO, ttft_s=0.15), tiers=pair)), np.random.default_rng(3)
        for rate in bunch * rng.poisson(20.0 / bunch, 300):
            fleet.tick(service_metrics(float(rate), Role.PREFILL, Role.DECODE))
        sized = fleet.service.tiers["prefill"].capacity_state.tier_spec
        assert sized is not None
        assert sized.arrival_cv2 == pytest.approx(bunch, rel=0.5)
        lines.append(float(slo_capacity_per_s(build_profile(sized), 8)[0]))
    assert lines[1] < 0.97 * lines[0]


def test_more_gateways_split_slots_and_lower_capacity() -> None:
    fleet = Fleet(scaling_spec(slo=replace(SLO, tpot_s=1.0)), about=replace(ABOUT, max_sequences=8))
    lines = []
    for gateways in (1, 3, 1):
        fleet.run(replace(service_metrics(2.0, Role.SERVE), gateway_count=gateways), 60)
        lines.append(need(fleet).replica_work)
    assert lines[1] < 0.9 * lines[0]
    assert lines[2] > 1.05 * lines[1]


def test_itl_target_raises_replicas_and_is_binding() -> None:
    counts = {}
    for itl_s in (None, 2.0, 0.06):
        fleet = Fleet(scaling_spec(slo=replace(SLO, itl_s=itl_s)))
        counts[itl_s] = fleet.run(service_metrics(40.0, Role.SERVE), 120).tiers["serve"].replicas
        binding = need(fleet).constraint
        sized = fleet.service.tiers["serve"].capacity_state.tier_spec
        assert sized is not None
        assert (sized.itl_model is None) is (itl_s is None)
    assert counts[None] == counts[2.0] < counts[0.06]
    assert binding == "itl"


def test_step_model_is_averaged_over_ten_minutes() -> None:
    tier = TierEngines(Role.SERVE)
    fast, slow = StepModel(0.005, 0.0, 1e-5, 0.0, 0.0, 0.0), StepModel(0.007, 0.0, 3e-5, 0.0, 0.0, 0.0)
    for second in range(0, 601, 5):
        even = tier.averaged_model(fast if second % 10 else slow, START_S + second)
    assert even.prefill_token_s == pytest.approx(2e-5, rel=0.02)
    assert even.base_s == pytest.approx(0.006, rel=0.02)
    for second in range(605, 2405, 5):  # three times ten minutes of another card
        even = tier.averaged_model(slow, START_S + second)
    assert 2.9e-5 < even.prefill_token_s <= 3e-5
    assert tier.averaged_model(fast, START_S) == fast  # a clock that was set back begins anew


@pytest.mark.parametrize("lost", ["rate", "coverage"])
def test_missing_metrics_freeze_replicas(lost: str) -> None:
    fleet = loaded()
    before = fleet.replicas["serve"]
    nothing = (
        ServiceMetrics()
        if lost == "rate"
        else replace(service_metrics(Unavailable("silent"), Role.SERVE), coverage=0.0)
    )
    after = fleet.run(nothing, 120).tiers["serve"]
    assert after.replicas == before > 1
    assert after.is_held


def test_tier_without_engine_info_keeps_minimum_and_explains() -> None:
    fleet = Fleet(scaling_spec(), about=None)
    decision = fleet.run(service_metrics(40.0, Role.SERVE), 60).tiers["serve"]
    assert decision.replicas == 1
    assert "no engine of the tier has reported" in decision.steps[0].reason


def test_service_without_slo_keeps_minimum() -> None:
    fleet = Fleet(scaling_spec(slo=None))
    assert fleet.run(service_metrics(400.0, Role.SERVE), 60).tiers["serve"].replicas == 1


def test_recommend_mode_leaves_replicas_unchanged() -> None:
    fleet = Fleet(scaling_spec(mode=ScalingMode.RECOMMEND))
    decision = fleet.run(service_metrics(60.0, Role.SERVE), 120).tiers["serve"]
    assert decision.replicas == 1
    assert decision.recommended is not None
    assert decision.recommended > 1
    assert len(fleet.service.decisions) < 10, "the same advice is one decision"


def test_long_prompts_scale_prefill_long_outputs_scale_decode() -> None:
    tiers = {"prefill": TierPolicy(1, 50), "decode": TierPolicy(1, 50)}
    roles = (Role.PREFILL, Role.DECODE)
    counts = {}
    for name, lengths in (("prompts", mix(6000, 8)), ("counts", mix(50, 800))):
        fleet = Fleet(scaling_spec(slo=Slo(0.95, ttft_s=4.0, tpot_s=0.05), tiers=tiers))
        for _ in range(150):
            fleet.tick(replace(service_metrics(8.0, *roles), workload=lengths))
        counts[name] = dict(fleet.replicas)
    assert counts["prompts"]["prefill"] > 1
    assert counts["prompts"]["decode"] <= 2
    assert counts["counts"]["decode"] > counts["counts"]["prefill"] == 1


def test_infeasible_slo_reports_feasible_targets() -> None:
    fleet = Fleet(scaling_spec(slo=Slo(0.95, tpot_s=0.001)))
    fleet.run(service_metrics(5.0, Role.SERVE), 30)
    found = need(fleet).infeasible
    assert found is not None
    assert found.nearest_slo is not None
    assert found.nearest_slo.tpot_s is not None
    assert found.nearest_slo.tpot_s > 0.001


def test_restore_keeps_learned_state_and_ignores_garbage() -> None:
    fleet = loaded()
    fleet.service.record_startup("serve", [("schedule", 1.0), ("pull", 9.0), ("load", 20.0)])
    kept = json.loads(json.dumps(dump_service_state(fleet.service), allow_nan=False))
    again = ServiceState.for_roles(["serve"])
    restore_service_state(again, kept)
    old, new = fleet.service.tiers["serve"], again.tiers["serve"]
    assert new.forecast_state.estimate.level == pytest.approx(old.forecast_state.estimate.level, rel=1e-4)
    assert new.startup_model.horizon_s == pytest.approx(old.startup_model.horizon_s, rel=1e-4)
    assert new.engines.engine_key == old.engines.engine_key
    assert again.decision_state == fleet.service.decision_state
    torn: list[object] = [{**kept, "tiers": 7}, {**kept, "scaling": {}, "pauses": "x"}]
    for garbage in (None, [], {"version": 2}, {"version": 1}, *torn):
        other = ServiceState.for_roles(["serve"])
        restore_service_state(other, garbage)


def test_horizon_follows_each_recorded_startup() -> None:
    service, requested = ServiceState.for_roles([Role.SERVE]), scaling_spec()
    tier, before_s = service.tiers["serve"], service.horizon_s("serve", requested)
    for took_s in (5.0, 400.0):
        service.record_startup("serve", [("load", took_s)])
        assert service.horizon_s("serve", requested) == tier.startup_model.horizon_s + 1.0 != before_s
        before_s = service.horizon_s("serve", requested)
    restore_service_state(service, dump_service_state(ServiceState.for_roles([Role.SERVE])))
    assert service.horizon_s("serve", requested) == tier.startup_model.horizon_s + 1.0 != before_s


def test_horizon_follows_desired_variant_across_restart() -> None:
    old, new = Variant("m", "engine:1", "1 gpu"), Variant("m", "engine:2", "1 gpu")
    service, requested = ServiceState.for_roles([Role.SERVE]), scaling_spec()

    def ordered(variant: Variant) -> float:
        ingest(
            service,
            ServiceSnapshot(service_metrics(1.0), {"serve": TierSnapshot(1, 1, variant=variant)}),
            requested,
            START_S,
        )
        return service.horizon_s("serve", requested)

    ordered(old)
    for _ in range(5):
        service.record_startup("serve", [("load", 20.0)], old)
    known_s = ordered(old)
    assert ordered(new) > 1.5 * known_s
    service.record_startup("serve", [("load", 60.0)], new)
    assert ordered(new) > 60.0
    kept, service = dump_service_state(service), ServiceState.for_roles([Role.SERVE])
    restore_service_state(service, json.loads(json.dumps(kept)))
    assert service.horizon_s("serve", requested) == pytest.approx(ordered(new), rel=1e-4)
    assert ordered(old) == pytest.approx(known_s, rel=1e-4)


def test_restarted_operator_freezes_replicas_until_metrics() -> None:
    fleet = loaded()
    before = fleet.replicas["serve"]
    fleet.service = ServiceState.for_roles(["serve"])
    fleet.about = None
    assert fleet.run(ServiceMetrics(), 60).tiers["serve"].replicas == before > 1


def test_tick_limits_capacity_computations_per_tick() -> None:
    fleets = [Fleet(scaling_spec()) for _ in range(40)]
    for second in range(4):
        decide_all(
            {
                n: (
                    f.service,
                    ServiceSnapshot(service_metrics(5.0, Role.SERVE), {"serve": TierSnapshot(1, 1, (), ABOUT)}),
                    f.scaling_spec,
                )
                for n, f in enumerate(fleets)
            },
            START_S + second,
        )
        made = sum(isinstance(f.service.tiers["serve"].capacity, TierCapacity) for f in fleets)
        assert made == min(12 * (second + 1), 40)


def test_decisions_of_a_large_fleet_are_made_in_slices() -> None:
    fleets = [Fleet(scaling_spec()) for _ in range(2 * SLICE_SIZE + 1)]
    tier = {"serve": TierSnapshot(1, 1, (), ABOUT)}
    parts = decide_in_slices(
        {
            n: (f.service, ServiceSnapshot(service_metrics(5.0, Role.SERVE), tier), f.scaling_spec)
            for n, f in enumerate(fleets)
        },
        START_S,
    )
    decided = [list(part) for part in parts]
    assert [key for part in decided for key in part] == list(range(len(fleets)))
    assert max(map(len, decided)) == DECISIONS_PER_SLICE
    assert decided[:4] == [[]] * 4  # two slices of readings, the rest of them, and capacities


def test_first_arrivals_do_not_scale_up() -> None:
    """Two requests in the first second are no load of two a second."""
    fleet = Fleet(scaling_spec())
    for rate in (30.0, *[0.2] * 60):
        assert fleet.tick(service_metrics(rate, Role.SERVE)).tiers["serve"].replicas == 1


def test_single_tier_scales_down_to_its_own_minimum() -> None:
    fleet = Fleet(scaling_spec(tiers={"serve": TierPolicy(1, 9)}))
    fleet.run(service_metrics(5.0, Role.SERVE), 60)
    decision = fleet.run(service_metrics(0.0, Role.SERVE), 600).tiers["serve"]
    assert decision.replicas == 1
    assert not any("other tier" in step.reason for step in decision.steps)


def test_silent_engines_prevent_scale_down_not_scale_up() -> None:
    """The gateways still tell what comes; how the engines fare is not known, so none is taken away."""
    fleet = loaded()
    before = fleet.replicas["serve"]
    silent = replace(service_metrics(1.0), tiers={Role.SERVE: TierMetrics()})
    assert fleet.run(silent, 400).tiers["serve"].replicas == before
    assert fleet.run(replace(silent, rate_per_s=200.0), 120).tiers["serve"].replicas > before


def test_single_slow_first_request_does_not_scale_up() -> None:
    fleet = Fleet(scaling_spec())
    counts = [
        fleet.tick(service_metrics(0.5, Role.SERVE, ttft_s=2.5, waiting=2.0)).tiers["serve"].replicas for _ in range(9)
    ]
    assert counts == [1] * 9, counts
