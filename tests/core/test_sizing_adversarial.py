"""What sizing must survive: nonsense, extremes, and the traps that other autoscalers fell into."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.core.capacity import slo_capacity, tier_model
from plimsoll.core.capacity.attainment import attainment
from plimsoll.core.capacity.goodput import goodput, goodput_knee_per_s
from plimsoll.core.capacity.queueing import erlang_c
from plimsoll.core.capacity.sizing import Infeasible, Sizing, size_tier, size_tiers
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.engine_model.step_time import EngineLimits, KvTransfer, StepModel
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import from_samples

MODEL = StepModel(4.742e-3, -1.3e-3, 2.265e-5, 1.035e-9, 1.816e-5, 3.048e-8)
MIX = from_samples([300.0, 1000.0, 3000.0], [0.0, 100.0, 0.0], [100.0, 300.0, 200.0])
LIMITS = EngineLimits(256, 700_000, 8192)
TIER = TierSpec(Role.SERVE, MODEL, MIX, LIMITS, Slo(0.95, 0.5, 0.0, 0.05))
PROFILE = tier_model.build_profile(TIER)
BAD = [math.nan, math.inf, -math.inf, -1.0]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("rate_per_s", lambda bad: size_tier(TIER, bad)),
        ("headroom", lambda bad: size_tier(TIER, 1.0, bad)),
        ("rate_per_s", lambda bad: size_tiers(PROFILE, [bad])),
        ("replicas", lambda bad: slo_capacity.slo_capacity_per_s(PROFILE, bad)),
        ("replicas", lambda bad: goodput_knee_per_s(PROFILE, bad)),
        ("rate_per_s", lambda bad: goodput(PROFILE, bad, 1)),
        ("rate_per_s", lambda bad: attainment(PROFILE, bad, 1)),
        ("arrival_cv2", lambda bad: replace(TIER, arrival_cv2=bad)),
        ("tail_scale", lambda bad: replace(TIER, tpot_tail_scale=bad)),
        ("elsewhere_s", lambda bad: replace(TIER, ttft_outside_s=bad)),
        ("share", lambda bad: Slo(bad, 0.5)),
        ("ttft_s", lambda bad: Slo(0.95, bad)),
        ("ttft_per_1k_tokens_s", lambda bad: Slo(0.95, 0.5, bad)),
        ("tpot_s", lambda bad: Slo(0.95, 0.5, 0.0, bad)),
    ],
)
def test_sizing_invalid_argument_raises_naming_it(name: str, call: Callable[[float], object], bad: float) -> None:
    with pytest.raises(ValueError, match=name):
        call(bad)


@pytest.mark.parametrize("share", [0.0, 1.0, 95.0])
def test_slo_share_above_one_raises(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        Slo(share, 0.5)


def test_slo_and_tier_inconsistent_arguments_raise() -> None:
    with pytest.raises(ValueError, match="target"):
        Slo(0.95)
    with pytest.raises(ValueError, match="ttft_per_1k_tokens_s"):
        Slo(0.95, None, 0.1, 0.05)
    with pytest.raises(ValueError, match="ttft_s"):
        replace(TIER, role=Role.PREFILL, slo=Slo(0.95, tpot_s=0.05))
    with pytest.raises(ValueError, match="transfer"):
        replace(TIER, role=Role.DECODE)
    with pytest.raises(ValueError, match="transfer"):
        replace(TIER, transfer=KvTransfer(32, 128))
    with pytest.raises(ValueError, match="headroom"):
        size_tier(TIER, 1.0, 1.0)


def test_size_tier_rate_of_ten_million_raises() -> None:
    with pytest.raises(ValueError, match="rate_per_s"):
        size_tier(TIER, 1e7)


def test_size_tier_uses_fleet_rate_not_pod_mean() -> None:
    """Fed with one pod's mean, the sizing of a fleet is one pod: the sum says what is needed."""
    pods = np.full(12, 14.0)
    whole, one = size_tier(TIER, float(pods.sum())), size_tier(TIER, float(pods.mean()))
    assert isinstance(whole, Sizing)
    assert isinstance(one, Sizing)
    assert one.replicas == 1
    assert whole.replicas > 6


def test_size_tier_by_tail_wait_needs_more_than_by_mean() -> None:
    """Replicas by the mean wait break the promise that replicas by its tail keep."""
    prefill = replace(TIER, role=Role.PREFILL, slo=Slo(0.95, 0.35))
    reduced = tier_model.build_profile(prefill)
    service = float(reduced.slot_base_s[0])
    room = 0.2
    rates = np.linspace(0.3, 0.999, 400) / service
    waiting, mean_s = erlang_c(rates * service, 1), service / (1.0 - rates * service)  # of M/M/1, and of those who wait
    mean_says = rates[np.flatnonzero(waiting * mean_s <= room)[-1]]
    tail_says = rates[np.flatnonzero(waiting * np.exp(-room / mean_s) <= 0.05)[-1]]
    assert tail_says < mean_says
    assert attainment(reduced, mean_says, 1, admission=False).within_slo[0] < 0.95


def test_size_tier_single_precision_equals_double() -> None:
    rates = np.linspace(1, 500, 50, dtype=np.float32)
    tiled = PROFILE.select(np.zeros(50, dtype=np.intp))
    narrow = size_tiers(tiled, rates)
    assert narrow.replicas.dtype == narrow.attainment.dtype == np.float64
    assert narrow.replicas == pytest.approx(size_tiers(tiled, rates.astype(np.float64)).replicas)


def test_attainment_at_overload_is_zero() -> None:
    for rate in (1e3, 1e5, 1e6):
        found = attainment(PROFILE, rate, 1)
        assert found.within_slo[0] == 0
        assert goodput(PROFILE, rate, 1)[0] > 0  # admission keeps the peak


def test_size_tier_leaves_arguments_unchanged() -> None:
    rates, start = np.array([5.0, 50.0]), np.array([3.0, 1.0])
    tiled = PROFILE.select(np.zeros(2, dtype=np.intp))
    slack = tiled.slack_s.copy()
    size_tiers(tiled, rates, start=start)
    assert (rates.tolist(), start.tolist()) == ([5.0, 50.0], [3.0, 1.0])
    assert np.array_equal(slack, tiled.slack_s)


@given(
    rate=st.sampled_from([0.0, 1e-12, 1e-3, 1.0, 333.0, 1e6]),
    share=st.sampled_from([1e-6, 0.3, 0.5, 0.95, 0.999999]),
    ttft=st.sampled_from([None, 1e-9, 0.05, 0.5, 1e6]),
    per_1k=st.sampled_from([0.0, 1e-9, 0.1, 1e6]),
    tpot=st.sampled_from([1e-9, 4.8e-3, 0.05, 1e6]),
    e2e=st.sampled_from([None, 1e-9, 1.0, 1e6]),
    itl=st.sampled_from([None, 1e-9, 0.03, 1e6]),
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
    limits=st.sampled_from([EngineLimits(1, 1, 1), EngineLimits(1, 10**6, 64), EngineLimits(10**6, 10**9, 10**5)]),
    role=st.sampled_from(list(Role)),
)
@settings(max_examples=60)
def test_size_tier_extreme_arguments_give_finite_result(
    rate: float, share: float, ttft: float | None, per_1k: float, tpot: float, e2e: float | None, itl: float | None,
    scale: float, limits: EngineLimits, role: Role,
) -> None:  # fmt: skip
    first_s = ttft if role is not Role.PREFILL else ttft or 1.0
    slo = Slo(share, first_s, 0.0 if first_s is None else per_1k, tpot, e2e, itl)
    model = StepModel(*(getattr(MODEL, f) * scale for f in StepModel.__dataclass_fields__))
    transfer = KvTransfer(32, 128) if role is Role.DECODE else None
    tier = TierSpec(role, model, MIX, limits, slo, transfer)
    reduced = tier_model.build_profile(tier)
    found = size_tiers(reduced, rate)
    count = float(found.replicas[0])
    assert count >= 0
    assert not math.isnan(count)
    assert 0 <= found.attainment[0] <= 1 + 1e-9
    assert 0 <= found.attainment_one_fewer[0] <= 1 + 1e-9
    assert math.isinf(count) or found.attainment[0] >= share - 1e-9
    assert np.isfinite(slo_capacity.slo_capacity_per_s(reduced, 2)[0])
    assert np.isfinite(goodput_knee_per_s(reduced, 2)[0])
    answer = size_tier(tier, rate)
    if isinstance(answer, Infeasible) and answer.nearest_slo is not None:
        nearest = size_tier(replace(tier, slo=answer.nearest_slo), 0.0)
        assert isinstance(nearest, Sizing), (answer, nearest)


def test_size_tier_ttft_slope_leaves_short_prompt_infeasible() -> None:
    """Long prompts have more time than their prefill takes, and even so a short one misses on an idle replica."""
    slo = Slo(0.95, 1e-4, 0.03)
    found = size_tier(replace(TIER, slo=slo), 1.0)
    assert isinstance(found, Infeasible)
    assert found.constraint is tier_model.Constraint.TTFT
    assert found.nearest_slo is not None
    assert found.nearest_slo.ttft_s is not None
    assert isinstance(size_tier(replace(TIER, slo=found.nearest_slo), 1.0), Sizing)


def test_size_tier_infeasible_slo_is_returned_at_any_rate() -> None:
    for rate in (0.0, 1e-9, 1e6):
        assert isinstance(size_tier(replace(TIER, slo=Slo(0.95, 1e-4, 0.0, 1e-4)), rate), Infeasible)
