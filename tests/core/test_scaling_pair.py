"""Decisions about prefill and decode together."""

from __future__ import annotations

from dataclasses import replace

from plimsoll.core.autoscaling.decide import decide
from plimsoll.core.autoscaling.observations import ServiceObservation
from plimsoll.core.autoscaling.scaling_policy import ScalingPolicy
from plimsoll.core.types import Unavailable
from tests.core.scaling_fixtures import (
    SLO,
    counts,
    decide_pair,
    idle_status,
    make_forecast,
    observed_tier,
    replica_bounds,
    sizing_for,
    step_message,
)


def test_scale_to_zero_requires_both_tiers_idle() -> None:
    away = idle_status(1e4)
    serving = decide_pair(observed_tier(0.0, 1), observed_tier(1.5, 2), pause=away)
    assert counts(serving) == (1, 2)
    assert "at least 1, because the other tier has replicas" in step_message(serving.tiers["prefill"], "ratio").reason
    assert counts(decide_pair(observed_tier(0.0, 0), observed_tier(0.5, 1), pause=idle_status(1.0))) == (1, 1)
    assert counts(decide_pair(observed_tier(0.0, 1), observed_tier(0.5, 1), pause=away)) == (0, 0)
    costly = observed_tier(0.5, 1, sizing=replace(sizing_for(make_forecast(0.5), 1), request_gpu_s=1e3))
    assert counts(decide_pair(observed_tier(0.0, 1), costly, pause=away)) == (1, 1), (
        "a cold return would cost the other one dearly"
    )


def test_scale_to_zero_is_blocked_by_other_tier_minimum() -> None:
    observation = ServiceObservation(
        {"prefill": observed_tier(0.0, 1), "decode": observed_tier(0.0, 1)}, idle_period=idle_status(1e4)
    )
    assert counts(
        decide(observation, ScalingPolicy({"prefill": replica_bounds(1), "decode": replica_bounds(0)}, SLO), 0.0)
    ) == (1, 1)


def test_scale_to_zero_is_blocked_by_frozen_tier() -> None:
    assert counts(
        decide_pair(observed_tier(0.0, 1), observed_tier(Unavailable("lost"), 2), pause=Unavailable("lost"))
    ) == (1, 2)


def test_scale_from_zero_sizes_both_tiers_by_backlog() -> None:
    back = decide_pair(observed_tier(0.1, 0, backlog_gpu_s=150.0), observed_tier(0.1, 0, backlog_gpu_s=30.0))
    assert counts(back) == (3, 1)
    lone = decide_pair(
        observed_tier(Unavailable("no sample yet"), 0, backlog_gpu_s=0.2),
        observed_tier(Unavailable("no sample yet"), 0),
    )
    assert counts(lone) == (1, 1)


def test_tier_ratio_raises_the_smaller_tier() -> None:
    assert counts(decide_pair(observed_tier(0.9, 1), observed_tier(3.8, 4), prefill_per_decode=(0.5, 2.0))) == (2, 4)
    found = decide_pair(observed_tier(3.8, 4), observed_tier(0.9, 1), prefill_per_decode=(0.5, 2.0))
    assert counts(found) == (4, 2)
    assert "at most 2 prefill replicas" in found.tiers["decode"].summary


def test_decision_names_tier_nearest_to_capacity() -> None:
    found = decide_pair(observed_tier(1.8, 2), observed_tier(3.9, 8))
    assert found.binding_tier == "prefill"
    assert "90% of its SLO capacity used; binding tier: prefill" in step_message(found.tiers["prefill"], "ratio").reason
