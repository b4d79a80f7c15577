"""Measured inter-token latency above its target limits the load of a replica."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.core.autoscaling.itl_limit import NO_ITL_LIMIT, ItlLimit, update_itl_limit
from plimsoll.core.autoscaling.service_state import ServiceState
from plimsoll.core.autoscaling.state_checkpoint import dump_service_state, restore_service_state
from plimsoll.core.demand.service_metrics import ServiceMetrics
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from tests.core.scaling_fixtures import SLO, step_message
from tests.core.test_autoscaler import Fleet, need, scaling_spec, service_metrics

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


def metrics(itl_s: float) -> ServiceMetrics:
    return replace(service_metrics(20.0, Role.SERVE, itl_s=itl_s), arrivals=1200.0)


def test_target_that_no_load_meets_takes_four_times_the_replicas() -> None:
    limit = NO_ITL_LIMIT
    for minute in range(9):
        limit = update_itl_limit(limit, 1.0, TARGET_S, limit.rate_per_s or 10.0, NOW_S + 60.0 * minute)
    assert limit.rate_per_s < 10.0 / 100.0
    assert limit.correction(10.0) == 4.0


def test_itl_above_its_target_adds_replicas_and_says_why() -> None:
    usual, slow = loaded(0.04, 0.2), loaded(0.3, 0.2)
    assert need(usual).capacity_correction == 1.0
    assert slow.replicas["serve"] > usual.replicas["serve"]
    decision = slow.tick(metrics(0.3)).tiers["serve"]
    reason = step_message(decision, "sizing").reason
    correction = need(slow).capacity_correction
    assert f"capacity correction {correction:.2f}, because p99 itl was 300 ms, target 200 ms" in reason


def test_itl_without_target_corrects_nothing() -> None:
    assert need(loaded(9.0, None)).capacity_correction == 1.0


def test_limit_survives_a_restart() -> None:
    service, restored = ServiceState.for_roles(["serve"]), ServiceState.for_roles(["serve"])
    service.tiers["serve"].itl_limit = LATE
    restore_service_state(restored, dump_service_state(service))
    assert restored.tiers["serve"].itl_limit == LATE
