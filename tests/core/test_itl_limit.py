"""Measured inter-token latency above its target limits the load of a replica."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.core.autoscaling.capacity_correction import correct_sizings
from plimsoll.core.autoscaling.inputs import ScalingSpec, ServiceSnapshot, TierSnapshot
from plimsoll.core.autoscaling.itl_limit import NO_ITL_LIMIT, ItlLimit, update_itl_limit
from plimsoll.core.autoscaling.observations import LaggingSignals, SizingResult
from plimsoll.core.autoscaling.rejection_feedback import CapacityCorrection
from plimsoll.core.autoscaling.scaling_policy import TierPolicy
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.startup_time import StartingPod
from plimsoll.core.autoscaling.state_checkpoint import dump_service_state, restore_service_state
from plimsoll.core.demand.service_metrics import ServiceMetrics, TierMetrics
from plimsoll.core.ports import EngineInfo
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from tests.core.scaling_fixtures import SLO, make_forecast, sizing_for, step_message
from tests.core.test_autoscaler import ABOUT, Fleet, need, scaling_spec, service_metrics

NOW_S, TARGET_S = 1.8e9, 0.05
LATE = ItlLimit(5.0, 0.06, TARGET_S, NOW_S)


@pytest.mark.parametrize(
    ("measured_s", "carried"), [(0.06, 10.0 / 1.2), (0.054, 10.0 / 1.1), (1.0, 5.0), (0.052, 0.0), (0.01, 0.0)]
)
def test_first_minute_above_target_lowers_the_load(measured_s: float, carried: float) -> None:
    limit = update_itl_limit(NO_ITL_LIMIT, measured_s, TARGET_S, 10.0, NOW_S)
    assert limit.rate_per_s == pytest.approx(carried)
    assert limit.itl_s == (measured_s if carried else 0.0)


@pytest.mark.parametrize(
    ("measured_s", "rate_per_s", "carried"),
    [(0.06, 4.8, 4.0), (0.06, 9.0, 5.0), (0.05, 6.0, 6.0), (0.05, 4.0, 5.0), (0.052, 6.0, 5.0)],
    ids=["late at less", "late at more", "in time at more", "in time at less", "chance"],
)
def test_later_minute_moves_the_limit(measured_s: float, rate_per_s: float, carried: float) -> None:
    assert update_itl_limit(LATE, measured_s, TARGET_S, rate_per_s, NOW_S + 60.0).rate_per_s == pytest.approx(carried)


def test_limit_ends_after_two_hours_or_with_another_target() -> None:
    assert update_itl_limit(LATE, 0.04, TARGET_S, 4.0, NOW_S + 7199.0) == LATE
    assert update_itl_limit(LATE, 0.04, TARGET_S, 4.0, NOW_S + 7201.0) == NO_ITL_LIMIT
    assert update_itl_limit(LATE, 0.04, 0.1, 4.0, NOW_S) == NO_ITL_LIMIT
    assert update_itl_limit(LATE, 0.04, None, 4.0, NOW_S) == NO_ITL_LIMIT
    assert update_itl_limit(LATE, 0.06, TARGET_S, 0.0, NOW_S) == LATE


def loaded(itl_s: float, target_s: float | None = TARGET_S) -> Fleet:
    """A fleet after ten minutes with this measured ITL."""
    fleet = Fleet(scaling_spec(Slo(SLO.share, SLO.ttft_s, SLO.tpot_s, itl_s=target_s)))
    fleet.run(metrics(itl_s), 150)
    return fleet


def metrics(itl_s: float, completed: float = 1200.0, waiting: float = 0.0, arrivals: float = 1200.0) -> ServiceMetrics:
    tier = TierMetrics(LaggingSignals(itl_s=itl_s, waiting=waiting), 1.0, 1.0, completed=completed)
    return replace(service_metrics(20.0), tiers={Role.SERVE: tier}, arrivals=arrivals)


def test_target_that_no_load_meets_takes_four_times_the_replicas() -> None:
    limit = NO_ITL_LIMIT
    for minute in range(9):
        limit = update_itl_limit(limit, 1.0, TARGET_S, limit.rate_per_s or 10.0, NOW_S + 60.0 * minute)
    assert limit.rate_per_s < 10.0 / 100.0
    assert limit.correction(10.0, TARGET_S, NOW_S + 60.0 * minute) == 4.0


def test_itl_above_its_target_adds_replicas_and_says_why() -> None:
    usual, slow = loaded(0.04, 0.2), loaded(0.3, 0.2)
    assert need(usual).capacity_correction == 1.0
    assert slow.replicas["serve"] > usual.replicas["serve"]
    decision = slow.tick(metrics(0.3)).tiers["serve"]
    reason = step_message(decision, "sizing").reason
    correction = need(slow).capacity_correction
    assert f"capacity correction {correction:.2f}, because p99 itl was 300 ms, target 200 ms" in reason


def spec_with(target_s: float | None) -> ScalingSpec:
    return scaling_spec(Slo(SLO.share, SLO.ttft_s, SLO.tpot_s, itl_s=target_s), tiers={"serve": TierPolicy(4, 50)})


def limit_after_a_minute(said: ServiceMetrics) -> ItlLimit:
    fleet = Fleet(spec_with(0.2), arrives=False)
    fleet.run(said, 62)
    return fleet.service.tiers["serve"].itl_limit


def test_load_of_a_replica_is_what_the_tier_completes() -> None:
    """1,200 requests a minute are 20/s, 5/s for each of four replicas, of which 1 / 1.5 is in time."""
    assert limit_after_a_minute(metrics(0.3, arrivals=6000.0)).rate_per_s == pytest.approx(5.0 / 1.5)


@pytest.mark.parametrize(
    ("completed", "waiting", "counts"), [(19.0, 0.0, False), (20.0, 0.0, True), (20.0, 4.0, True), (20.0, 5.0, False)]
)
def test_minute_with_few_requests_or_a_queue_does_not_count(completed: float, waiting: float, counts: bool) -> None:
    assert (limit_after_a_minute(metrics(0.3, completed, waiting)) != NO_ITL_LIMIT) is counts


@pytest.mark.parametrize(
    ("age_s", "target_s", "counts"),
    [(7100.0, 0.2, True), (7300.0, 0.2, False), (60.0, 0.3, False), (60.0, None, False)],
    ids=["young", "old", "another target", "no target"],
)
def test_limit_ends_also_while_a_replica_is_missing(age_s: float, target_s: float | None, counts: bool) -> None:
    fleet = Fleet(spec_with(0.2), arrives=False)
    fleet.run(metrics(0.04), 30)
    fleet.service.tiers["serve"].itl_limit = ItlLimit(0.5, 0.3, 0.2, fleet.now_s - age_s)
    fleet.scaling_spec = spec_with(target_s)
    fleet.tick(metrics(0.04), serve=(StartingPod("late", fleet.now_s),))
    assert (need(fleet).capacity_correction > 1.0) is counts
    assert (need(fleet).itl_limit is not None) is counts


@pytest.mark.parametrize(
    ("about", "is_kept"),
    [
        (ABOUT, True),
        (replace(ABOUT, kv_tokens=404_000), True),
        (replace(ABOUT, token_budget=2048), False),
        (replace(ABOUT, accelerator="another"), False),
    ],
    ids=["same", "about the same", "another token budget", "another model key"],
)
def test_other_engines_begin_without_a_limit(about: EngineInfo, is_kept: bool) -> None:
    tier = ServiceState.for_roles(["serve"]).tiers["serve"]
    tier.on_engine_info(ABOUT)
    tier.itl_limit = LATE
    tier.on_engine_info(about)
    assert tier.itl_limit == (LATE if is_kept else NO_ITL_LIMIT)


@pytest.mark.parametrize(("by_rejections", "replicas", "binds"), [(1.7, 5, "rejections"), (1.1, 4, "itl")])
def test_correction_that_needs_more_replicas_binds(by_rejections: float, replicas: int, binds: str) -> None:
    """Three replicas for a load of 2.1: ITL takes 1.75 * 2.1, rejections the factor times at least 2.5."""
    service = ServiceState.for_roles(["serve"])
    service.tiers["serve"].itl_limit = ItlLimit(10.0 / 1.75, 0.3, 0.2, NOW_S)
    snapshot = ServiceSnapshot(
        service_metrics(21.0), {"serve": TierSnapshot(3, 2, (StartingPod("late", NOW_S),), None)}
    )
    slo = Slo(SLO.share, SLO.ttft_s, SLO.tpot_s, itl_s=0.2)
    corrections = {"serve": CapacityCorrection(by_rejections)}
    sizings = {"serve": sizing_for(make_forecast(2.1), 3)}
    found = correct_sizings(corrections, sizings, service.tiers, snapshot, slo, NOW_S)["serve"]
    assert isinstance(found, SizingResult)
    assert found.replicas == replicas
    assert found.scale_down_replicas >= replicas
    assert found.capacity_correction == pytest.approx(1.75 if binds == "itl" else by_rejections)
    assert (found.itl_limit is not None) is (binds == "itl")


def test_itl_without_target_corrects_nothing() -> None:
    assert need(loaded(9.0, None)).capacity_correction == 1.0


def test_limit_survives_a_restart() -> None:
    service, restored = ServiceState.for_roles(["serve"]), ServiceState.for_roles(["serve"])
    service.tiers["serve"].itl_limit = LATE
    restore_service_state(restored, dump_service_state(service))
    assert restored.tiers["serve"].itl_limit == LATE
