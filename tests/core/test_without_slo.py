"""A service without an SLO: each tier keeps its minimum, whatever was decided before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.core.autoscaling.inputs import ScalingSpec
from plimsoll.core.autoscaling.scaling_policy import (
    ReplicaRateLimit,
    ScalingMode,
    ScalingPolicy,
    ScheduleWindow,
    TierPolicy,
)
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from tests.core.test_autoscaler import SLO, START_S, Fleet, loaded, need, scaling_spec, service_metrics


def test_decide_slo_removed_scales_to_minimum() -> None:
    fleet = loaded()
    before = fleet.replicas["serve"]
    assert before > 1
    fleet.scaling_spec = scaling_spec(slo=None)
    decided = fleet.tick(service_metrics(40.0, Role.SERVE)).tiers["serve"]
    assert (decided.previous_replicas, decided.replicas, decided.is_held) == (before, 1, False)
    assert "spec.slo is not set" in decided.summary
    assert fleet.run(service_metrics(40.0, Role.SERVE), 60).tiers["serve"].replicas == 1


def test_decide_slo_added_again_sizes_for_load() -> None:
    fleet = loaded()
    before = need(fleet).replicas
    fleet.scaling_spec = scaling_spec(slo=None)
    assert fleet.run(service_metrics(40.0, Role.SERVE), 120).tiers["serve"].replicas == 1
    fleet.scaling_spec = scaling_spec()
    assert fleet.run(service_metrics(40.0, Role.SERVE), 120).tiers["serve"].replicas >= before
    assert need(fleet).replicas == before


def test_decide_slo_removed_respects_scale_down_limit() -> None:
    fleet = loaded()
    before = fleet.replicas["serve"]
    assert before > 2
    fleet.scaling_spec = scaling_spec(
        slo=None, tiers={"serve": TierPolicy(1, 50, scale_down_limit=ReplicaRateLimit(1, 300.0))}
    )
    assert fleet.run(service_metrics(40.0, Role.SERVE), 10).tiers["serve"].replicas == before - 1


@pytest.mark.parametrize("mode", [ScalingMode.OFF, ScalingMode.RECOMMEND])
def test_decide_slo_removed_without_auto_keeps_count(mode: ScalingMode) -> None:
    fleet = loaded()
    before = fleet.replicas["serve"]
    fleet.scaling_spec = scaling_spec(slo=None, mode=mode)
    decided = fleet.tick(service_metrics(40.0, Role.SERVE)).tiers["serve"]
    assert (decided.replicas, decided.recommended) == (before, 1)


PAIR = {"prefill": TierPolicy(1, 50), "decode": TierPolicy(1, 50)}
TPOT_ONLY = Slo(0.95, tpot_s=0.05)


def test_decide_prefill_without_ttft_keeps_minimum_beside_decode() -> None:
    fleet = Fleet(scaling_spec(slo=TPOT_ONLY, tiers=PAIR))
    for tier in ("prefill", "decode"):
        fleet.replicas[tier] = 7
    decided = fleet.tick(service_metrics(40.0, Role.PREFILL, Role.DECODE)).tiers
    assert (decided["prefill"].replicas, decided["prefill"].is_held) == (1, False)
    assert "spec.slo.ttft is not set" in decided["prefill"].summary
    assert (decided["decode"].replicas, decided["decode"].is_held) == (7, True), "its demand is not known yet"


def test_decide_prefill_without_ttft_follows_decode_from_zero() -> None:
    """Both tiers are asleep or neither is, whether or not a target sizes the prefill tier."""
    asleep = {tier: TierPolicy(0, 50) for tier in PAIR}
    fleet = Fleet(scaling_spec(slo=TPOT_ONLY, tiers=asleep))
    fleet.replicas |= {"prefill": 0, "decode": 3}
    assert fleet.tick(service_metrics(40.0, Role.PREFILL, Role.DECODE)).tiers["prefill"].replicas == 1
    fleet.scaling_spec = ScalingSpec(ScalingPolicy(asleep, TPOT_ONLY, prefill_per_decode=(2.0, 9.0)), TPOT_ONLY)
    assert fleet.tick(service_metrics(40.0, Role.PREFILL, Role.DECODE)).tiers["prefill"].replicas == 6


def test_decide_without_slo_follows_schedule() -> None:
    window = ScheduleWindow(START_S, START_S + 1e6, 4, None)
    fleet = Fleet(scaling_spec(slo=None, tiers={"serve": TierPolicy(1, 9, schedule=(window,))}))
    assert fleet.tick(service_metrics(1.0, Role.SERVE)).tiers["serve"].replicas == 4


def test_decide_without_slo_ignores_lagging_signals() -> None:
    fleet = Fleet(scaling_spec(slo=None))
    assert fleet.run(service_metrics(40.0, Role.SERVE, waiting=50.0, kv_used=1.0), 30).tiers["serve"].replicas == 1


def test_decide_ttft_removed_and_added_sizes_prefill_again() -> None:
    """The capacity of the prefill tier follows the SLO in both directions."""
    tiers = {"prefill": TierPolicy(1, 9), "decode": TierPolicy(1, 9)}
    fleet = Fleet(scaling_spec(tiers=tiers))
    fleet.run(service_metrics(10.0, Role.PREFILL, Role.DECODE), 60)
    before = need(fleet, "prefill").replicas
    fleet.scaling_spec = scaling_spec(slo=replace(SLO, ttft_s=None), tiers=tiers)
    decided = fleet.run(service_metrics(10.0, Role.PREFILL, Role.DECODE), 60).tiers["prefill"]
    assert (decided.replicas, decided.is_held) == (1, False)
    fleet.scaling_spec = scaling_spec(tiers=tiers)
    fleet.run(service_metrics(10.0, Role.PREFILL, Role.DECODE), 60)
    assert need(fleet, "prefill").replicas == before
