"""A service without an SLO: each tier keeps its minimum, whatever was decided before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.core.autoscaling.scaling_policy import ReplicaRateLimit, ScalingMode, ScheduleWindow, TierPolicy
from plimsoll.core.types import Role
from tests.core.test_autoscaler import SLO, START_S, Fleet, heard, loaded, need, wish


def test_decide_slo_removed_scales_to_minimum() -> None:
    fleet = loaded()
    before = fleet.replicas["serve"]
    assert before > 1
    fleet.wish = wish(slo=None)
    decided = fleet.tick(heard(40.0, Role.SERVE)).tiers["serve"]
    assert (decided.previous_replicas, decided.replicas, decided.is_held) == (before, 1, False)
    assert "spec.slo is not set" in decided.summary
    assert fleet.run(heard(40.0, Role.SERVE), 60).tiers["serve"].replicas == 1


def test_decide_slo_added_again_sizes_for_load() -> None:
    fleet = loaded()
    before = need(fleet).replicas
    fleet.wish = wish(slo=None)
    assert fleet.run(heard(40.0, Role.SERVE), 120).tiers["serve"].replicas == 1
    fleet.wish = wish()
    assert fleet.run(heard(40.0, Role.SERVE), 120).tiers["serve"].replicas >= before
    assert need(fleet).replicas == before


def test_decide_slo_removed_respects_scale_down_limit() -> None:
    fleet = loaded()
    before = fleet.replicas["serve"]
    assert before > 2
    fleet.wish = wish(slo=None, tiers={"serve": TierPolicy(1, 50, scale_down_limit=ReplicaRateLimit(1, 300.0))})
    assert fleet.run(heard(40.0, Role.SERVE), 10).tiers["serve"].replicas == before - 1


@pytest.mark.parametrize("mode", [ScalingMode.OFF, ScalingMode.RECOMMEND])
def test_decide_slo_removed_without_auto_keeps_count(mode: ScalingMode) -> None:
    fleet = loaded()
    before = fleet.replicas["serve"]
    fleet.wish = wish(slo=None, mode=mode)
    decided = fleet.tick(heard(40.0, Role.SERVE)).tiers["serve"]
    assert (decided.replicas, decided.recommended) == (before, 1)


def test_decide_without_slo_follows_schedule() -> None:
    window = ScheduleWindow(START_S, START_S + 1e6, 4, None)
    fleet = Fleet(wish(slo=None, tiers={"serve": TierPolicy(1, 9, schedule=(window,))}))
    assert fleet.tick(heard(1.0, Role.SERVE)).tiers["serve"].replicas == 4


def test_decide_without_slo_ignores_lagging_signals() -> None:
    fleet = Fleet(wish(slo=None))
    assert fleet.run(heard(40.0, Role.SERVE, waiting=50.0, kv_used=1.0), 30).tiers["serve"].replicas == 1


def test_decide_ttft_removed_and_added_sizes_prefill_again() -> None:
    """The capacity of the prefill tier follows the SLO in both directions."""
    tiers = {"prefill": TierPolicy(1, 9), "decode": TierPolicy(1, 9)}
    fleet = Fleet(wish(tiers=tiers))
    fleet.run(heard(10.0, Role.PREFILL, Role.DECODE), 60)
    before = need(fleet, "prefill").replicas
    fleet.wish = wish(slo=replace(SLO, ttft_s=None), tiers=tiers)
    decided = fleet.run(heard(10.0, Role.PREFILL, Role.DECODE), 60).tiers["prefill"]
    assert decided.is_held
    fleet.wish = wish(tiers=tiers)
    fleet.run(heard(10.0, Role.PREFILL, Role.DECODE), 60)
    assert need(fleet, "prefill").replicas == before
