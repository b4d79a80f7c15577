"""What the user wrote becomes what the core decides by."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import pytest

from plimsoll.api import contract
from plimsoll.api.v1alpha1 import CostSpec, EngineSpec, InferenceService, ScalingOptions, SloSpec, parse
from plimsoll.core.autoscaling.scaling_policy import ReplicaRateLimit, ScalingMode, ScalingPolicy, TierPolicy
from plimsoll.core.demand.standby_value import MISS_COST
from plimsoll.core.slo import Slo as CoreSlo
from plimsoll.core.types import Unavailable
from plimsoll.engines.registry import ENGINES
from tests.api.manifests import Manifest, adopted, aggregated, examples, service

NOON_S = datetime(2026, 6, 10, 12, tzinfo=UTC).timestamp()  # a Wednesday
START_S = 300.0


def scaling(**written: Any) -> ScalingPolicy:
    return parse(service(**{"spec.scaling": written})).policy(NOON_S)


def test_policy_default_is_minimum_replicas_without_slo() -> None:
    one = TierPolicy(min_replicas=1, max_replicas=1)
    assert parse(service()).policy(NOON_S) == ScalingPolicy({"prefill": one, "decode": one})


def test_policy_full_example_is_read() -> None:
    read = parse(examples()["autoscaling"])
    made = read.policy(NOON_S)
    decode = made.tiers["decode"]
    assert list(made.tiers) == ["prefill", "decode"]
    assert (decode.min_replicas, decode.max_replicas, decode.warm_replicas, decode.gpus_per_replica) == (2, 16, 1, 1)
    assert (decode.scale_up_limit, decode.scale_down_limit) == (ReplicaRateLimit(8, 60.0), ReplicaRateLimit(2, 300.0))
    assert made.slo == CoreSlo(share=0.95, ttft_s=0.5, ttft_per_1k_tokens_s=0.12, tpot_s=0.05)
    assert (made.mode, made.paused, made.miss_cost) == (ScalingMode.AUTO, False, 25.0)
    assert made.prefill_per_decode == (0.25, 1.0)
    assert (read.spec.scaling.headroom_share, read.spec.scaling.horizon_s) == (0.1, 180.0)


@pytest.mark.parametrize(
    ("utc", "bounds"),
    [
        ("2026-06-10 05:54", (2, 16)),  # Wednesday in Berlin, 07:54
        ("2026-06-10 05:55", (4, 16)),  # one start-up before 08:00
        ("2026-06-10 17:59", (4, 16)),
        ("2026-06-10 18:00", (2, 16)),
        ("2026-06-13 12:00", (2, 16)),  # Saturday
        ("2026-06-13 21:57", (1, 16)),
        ("2026-06-13 22:00", (1, 2)),
        ("2026-06-14 05:59", (1, 2)),
        ("2026-06-14 06:00", (2, 16)),
    ],
)
def test_policy_schedule_bounds_every_tier(utc: str, bounds: tuple[int, int]) -> None:
    now_s = datetime.fromisoformat(utc).replace(tzinfo=UTC).timestamp()
    decode = parse(examples()["autoscaling"]).policy(now_s).tiers["decode"]
    assert decode.bounds(now_s, START_S) == bounds


def test_policy_bounds_hold_for_a_week() -> None:
    read = parse(examples()["autoscaling"])
    old = read.policy(NOON_S).tiers["decode"]
    for hour in range(7 * 24):
        now_s = NOON_S + hour * 3600
        assert old.bounds(now_s, START_S) == read.policy(now_s).tiers["decode"].bounds(now_s, START_S)


@pytest.mark.parametrize("mode", ["Auto", "Recommend", "Off"])
def test_policy_mode_equals_core_mode(mode: str) -> None:
    assert scaling(mode=mode).mode is ScalingMode(mode)


def test_mode_values_of_api_equal_core_modes() -> None:
    modes, absent = get_args(ScalingOptions.model_fields["mode"].annotation)
    assert list(get_args(modes)) == [mode.value for mode in ScalingMode]
    assert absent is type(None)


@pytest.mark.parametrize(
    ("manifest", "mode"),
    [
        (aggregated(), ScalingMode.AUTO),
        (adopted(), ScalingMode.RECOMMEND),
        (adopted(**{"spec.scaling.headroom": "10%"}), ScalingMode.RECOMMEND),
        (adopted(**{"spec.scaling.mode": "Auto"}), ScalingMode.AUTO),
    ],
)
def test_mode_default_is_recommend_for_targets(manifest: Manifest, mode: ScalingMode) -> None:
    assert parse(manifest).policy(NOON_S).mode is mode


def test_policy_of_target_has_its_bounds_and_gpus() -> None:
    target = parse(adopted(**{"spec.targets.serve.minReplicas": 2, "spec.targets.serve.gpus": 8})).policy(NOON_S)
    tier = target.tiers["serve"]
    assert (tier.min_replicas, tier.max_replicas, tier.gpus_per_replica) == (2, 4, 8)


def test_runtime_values_of_api_are_the_engines() -> None:
    document = json.loads((Path(contract.__file__).with_name("contract.json")).read_text())
    assert list(get_args(EngineSpec.model_fields["runtime"].annotation)) == list(ENGINES)
    assert [name for name, engine in ENGINES.items() if engine.launched] == document["runtimes"]


@pytest.mark.parametrize(("written", "cost"), [({}, MISS_COST), ({"sloMissCost": 0}, 0.0), ({"sloMissCost": 7}, 7.0)])
def test_policy_miss_cost_defaults_and_keeps_zero(written: dict[str, int], cost: float) -> None:
    assert scaling(**written).miss_cost == cost


@pytest.mark.parametrize(
    ("bounds", "ratio"),
    [
        ({"min": 1}, (1.0, math.inf)),
        ({"max": "0.5"}, (0.0, 0.5)),
        ({"min": 0, "max": 2}, (0.0, 2.0)),
        ({"min": "0.333", "max": "0.333"}, (0.333, 0.333)),
    ],
)
def test_policy_prefill_ratio_is_unbounded_where_unset(bounds: dict[str, Any], ratio: tuple[float, float]) -> None:
    assert scaling(prefillPerDecode=bounds).prefill_per_decode == ratio


def test_policy_of_paused_aggregated_service_is_read() -> None:
    made = parse(aggregated(**{"spec.scaling.paused": True, "spec.tiers.serve.gpus": 8})).policy(NOON_S)
    assert made.paused
    assert {name: tier.gpus_per_replica for name, tier in made.tiers.items()} == {"serve": 8}


@pytest.mark.parametrize(
    ("written", "promise"),
    [
        ({"tpot": "50ms"}, CoreSlo(share=0.95, tpot_s=0.05)),
        ({"e2e": "1m30s"}, CoreSlo(share=0.95, e2e_s=90.0)),
        ({"tpot": "50ms", "itl": "1m"}, CoreSlo(share=0.95, tpot_s=0.05, itl_s=60.0)),
        ({"percentile": 99, "ttft": "1m"}, CoreSlo(share=0.99, ttft_s=60.0)),
        ({"ttft": "1s", "ttftPerKToken": "0s"}, CoreSlo(share=0.95, ttft_s=1.0)),
    ],
)
def test_slo_to_core_converts_each_target(written: dict[str, Any], promise: CoreSlo) -> None:
    assert SloSpec.model_validate(written).to_core() == promise


@pytest.mark.parametrize("name", examples())
def test_policy_exists_for_every_example(name: str) -> None:
    read: InferenceService = parse(examples()[name])
    assert list(read.policy(NOON_S).tiers) == [role for role, _ in read.spec.tiers.items()]


@pytest.mark.parametrize(
    ("price", "gpus", "per_hour", "shown"),
    [
        ("2.50", 4, 10.0, "10.00 USD"),
        (3, 1, 3.0, "3.00 USD"),
        ("0.000001", 1, 1e-6, "0.000001 USD"),
        ("0.0731", 1, 0.0731, "0.0731 USD"),
        ("0.5", 1, 0.5, "0.5000 USD"),
        (1, 0, 0.0, "0.00 USD"),
    ],
)
def test_cost_per_hour_multiplies_gpus_and_formats(price: str | int, gpus: int, per_hour: float, shown: str) -> None:
    cost = CostSpec.model_validate({"gpuHour": price})
    assert cost.per_hour(gpus) == per_hour
    assert cost.format_amount(cost.per_hour(gpus)) == shown


def test_cost_per_million_tokens_is_computed() -> None:
    cost = CostSpec.model_validate({"gpuHour": "3.60", "currency": "EUR"})
    price = cost.per_million_tokens(2, 2000.0)
    assert isinstance(price, float)
    assert price == pytest.approx(1.0)
    assert cost.format_amount(1.0) == "1.00 EUR"


@pytest.mark.parametrize("tokens_per_s", [0.0, -1.0, math.nan])
def test_cost_per_million_tokens_without_tokens_is_unavailable(tokens_per_s: float) -> None:
    assert CostSpec.model_validate({"gpuHour": 1}).per_million_tokens(1, tokens_per_s) == Unavailable(
        "no output tokens were generated"
    )


@pytest.mark.parametrize(
    ("written", "bounds"),
    [
        ({}, (1, 1)),
        ({"minReplicas": 3}, (3, 3)),
        ({"minReplicas": 0}, (0, 1)),
        ({"minReplicas": 0, "maxReplicas": 1}, (0, 1)),
        ({"minReplicas": 0, "maxReplicas": 5}, (0, 5)),
    ],
)
def test_policy_tier_with_zero_minimum_can_scale_up(written: dict[str, int], bounds: tuple[int, int]) -> None:
    made = parse(aggregated(**{"spec.slo": {"tpot": "50ms"}, "spec.tiers.serve": written})).policy(NOON_S)
    assert made.tiers["serve"].bounds(NOON_S, START_S) == bounds


@pytest.mark.parametrize(("least", "hours", "bounds"), [(0, 2, (2, 4)), (1, 0, (0, 4))])
def test_policy_schedule_may_start_and_end_at_zero(least: int, hours: int, bounds: tuple[int, int]) -> None:
    tier = {"minReplicas": least, "maxReplicas": 4}
    schedule = [{"from": "08:00", "until": "20:00", "minReplicas": hours}]
    edits = {"spec.slo": {"tpot": "50ms"}, "spec.tiers.serve": tier, "spec.scaling.schedule": schedule}
    made = parse(aggregated(**edits)).policy(NOON_S)
    assert made.tiers["serve"].bounds(NOON_S, START_S) == bounds
