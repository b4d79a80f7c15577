"""The promise of whole answers: what it leaves for a token, what must be monotone, and promises that no fleet keeps."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.core.admission.cost_model import ClassPolicy, engine_cost_model
from plimsoll.core.admission.request import AdmissionOutcome
from plimsoll.core.capacity import slo_capacity, tier_model
from plimsoll.core.capacity.e2e import QUEUEING_STEPS
from plimsoll.core.capacity.sizing import Infeasible, Sizing, size_tier
from plimsoll.core.capacity.tier_model import Constraint, TierSpec, tpot_target
from plimsoll.core.slo import Slo
from plimsoll.core.workload import from_samples
from tests.core.admission_fixtures import fill, gate, make_request
from tests.core.test_sizing import DECODE, GUIDE, PREFILL, SERVE, replicas

SHARED = {"serve": SERVE, "guide": GUIDE, "decode": DECODE}
LOOSE = {"serve": 9.0, "guide": 22.0, "decode": 7.0}  # seconds that each can keep, and that bind before its tpot


def with_e2e(tier: TierSpec, e2e_s: float, ttft_s: float | None = 0.5, tpot_s: float | None = None) -> TierSpec:
    return replace(tier, slo=Slo(0.95, ttft_s, tpot_s=tpot_s, e2e_s=e2e_s))


def test_e2e_token_time_is_rest_after_first_token() -> None:
    lengths = from_samples([1000.0, 3000.0], [0.0, 0.0], [101.0, 301.0], weights=[0.94, 0.06])
    tier = replace(SERVE, workload=lengths, slo=Slo(0.95, 0.5, 0.1, e2e_s=9.612))
    assert tpot_target(tier) == (
        pytest.approx((9.612 - 0.612) / 300),
        Constraint.E2E,
    )  # 1,120 prompt tokens in the mean
    at_90 = replace(tier, slo=replace(tier.slo, share=0.9))
    assert tpot_target(at_90)[0] == pytest.approx((9.612 - 0.612) / 100)


def test_e2e_without_ttft_target_uses_predicted_ttft() -> None:
    one = from_samples([1000.0], [0.0], [201.0])
    tier = replace(SERVE, workload=one, slo=Slo(0.95, e2e_s=6.0))
    own_s = float(tier_model.unloaded_ttft_s(tier)[0]) - 1.5 * tier.model.base_s
    left_s = tpot_target(tier)[0]
    assert own_s + QUEUEING_STEPS * left_s - tier.model.base_s + 200 * left_s == pytest.approx(6.0)
    waits = tier_model.build_profile(tier).slack_s[0, -2]
    assert waits + float(tier_model.unloaded_ttft_s(tier)[0]) == pytest.approx(6.0 - 200 * left_s)


@pytest.mark.parametrize("name", SHARED)
def test_e2e_or_tpot_tighter_target_applies(name: str) -> None:
    left_s = tpot_target(with_e2e(SHARED[name], LOOSE[name]))[0]
    for tpot_s, in_force in ((0.9 * left_s, Constraint.TPOT), (1.1 * left_s, Constraint.E2E)):
        both = with_e2e(SHARED[name], LOOSE[name], tpot_s=tpot_s)
        assert tpot_target(both) == (min(tpot_s, left_s), in_force)
        alone = replace(SHARED[name], slo=Slo(0.95, 0.5, tpot_s=min(tpot_s, left_s)))
        rates = [float(slo_capacity.slo_capacity_per_s(tier_model.build_profile(tier), 3)[0]) for tier in (both, alone)]
        assert rates[0] == rates[1] > 0


@pytest.mark.parametrize("name", SHARED)
def test_e2e_binding_constraint_is_reported(name: str) -> None:
    tier = with_e2e(SHARED[name], LOOSE[name])
    reduced = tier_model.build_profile(tier)
    assert slo_capacity.binding_constraint(reduced, slo_capacity.slo_capacity_per_s(reduced, 1), 1) == [Constraint.E2E]
    assert Constraint.E2E == "e2e"
    few = replace(tier, limits=replace(tier.limits, max_sequences=4))
    reduced = tier_model.build_profile(few)
    assert slo_capacity.binding_constraint(reduced, slo_capacity.slo_capacity_per_s(reduced, 1), 1) == [
        Constraint.SLOTS
    ]


def test_e2e_target_does_not_affect_prefill_tier() -> None:
    with_whole = replace(PREFILL, slo=replace(PREFILL.slo, e2e_s=5.0))
    assert slo_capacity.slo_capacity_per_s(tier_model.build_profile(with_whole), 2) == slo_capacity.slo_capacity_per_s(
        tier_model.build_profile(PREFILL), 2
    )


@given(
    rate=st.floats(0.5, 100),
    e2e_s=st.floats(4.0, 60.0),
    more=st.floats(1.0, 2.0),
    ttft_s=st.sampled_from([None, 0.5, 1.5]),
    tpot_s=st.sampled_from([None, 0.03]),
    kind=st.sampled_from([SERVE, DECODE]),
)
@settings(max_examples=25)
def test_e2e_looser_target_or_shorter_output_needs_no_more(
    rate: float, e2e_s: float, more: float, ttft_s: float | None, tpot_s: float | None, kind: TierSpec
) -> None:
    tier = with_e2e(kind, e2e_s, ttft_s, tpot_s)
    before, w = replicas(tier, rate * 1.002), tier.workload
    for easier in (
        with_e2e(kind, e2e_s * more, ttft_s, tpot_s),
        replace(tier, slo=replace(tier.slo, share=tier.slo.share / (1 + 0.05 * (more - 1)))),
        replace(tier, workload=from_samples(w.uncached_tokens, w.cached_tokens, w.output_tokens / more, w.weights)),
    ):
        assert replicas(easier, rate) <= before
    assert replicas(replace(kind, slo=Slo(0.95, ttft_s or 0.5, tpot_s=tpot_s)), rate) <= replicas(
        with_e2e(kind, e2e_s, ttft_s or 0.5, tpot_s), rate * 1.002
    )


@given(lengths=st.floats(0.1, 1.2), paces=st.floats(0.02, 0.6), seed=st.integers(0, 1000))
@settings(max_examples=30)
def test_e2e_is_met_if_token_time_meets_share(lengths: float, paces: float, seed: int) -> None:
    """With lengths and paces that have nothing to do with each other, and first tokens at their target."""
    rng = np.random.default_rng(seed)
    tokens = np.ceil(200 * np.exp(lengths * rng.standard_normal(4000)))
    mix = from_samples(np.full(4000, 500.0), np.zeros(4000), tokens)
    left_s = tpot_target(replace(SERVE, workload=mix, slo=Slo(0.95, 0.5, e2e_s=10.0)))[0]
    tpot_s = left_s * np.exp(paces * (rng.standard_normal(4000) - 1.645))  # 95 % within
    whole_s = 0.5 + (tokens - 1) * tpot_s
    assert np.mean(whole_s <= 10.0) >= 0.94  # chance, of 4,000


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("ttft_s", [0.6, None])
def test_e2e_infeasible_target_reports_feasible_one(name: str, ttft_s: float | None) -> None:
    tier = with_e2e(SHARED[name], 0.7, ttft_s)
    found = size_tier(tier, 5.0)
    assert isinstance(found, Infeasible)
    assert found.constraint is Constraint.E2E
    assert found.nearest_slo is not None
    assert (found.nearest_slo.tpot_s, found.nearest_slo.share) == (None, 0.95)
    assert found.nearest_slo.e2e_s is not None
    assert 0.7 < found.nearest_slo.e2e_s < 60.0
    assert isinstance(size_tier(replace(tier, slo=found.nearest_slo), 5.0), Sizing)
    much_less = replace(found.nearest_slo, e2e_s=found.nearest_slo.e2e_s / 1.3)
    assert isinstance(size_tier(replace(tier, slo=much_less), 5.0), Infeasible)


def test_e2e_consumed_by_ttft_is_infeasible() -> None:
    slow = replace(SERVE, slo=Slo(0.95, 0.5, 10.0, e2e_s=5.0))  # 10 s for 1,000 prompt tokens
    assert tpot_target(slow) == (0.0, Constraint.E2E)
    found = size_tier(slow, 1.0)
    assert isinstance(found, Infeasible)
    assert found.constraint is Constraint.E2E


def test_e2e_and_tpot_infeasible_are_both_loosened() -> None:
    found = size_tier(with_e2e(SERVE, 2.0, 0.5, 0.004), 5.0)
    assert isinstance(found, Infeasible)
    assert found.nearest_slo is not None
    assert found.nearest_slo.tpot_s is not None
    assert found.nearest_slo.e2e_s is not None
    assert found.nearest_slo.tpot_s > 0.004
    assert found.nearest_slo.e2e_s > 2.0


def test_e2e_single_token_output_has_no_token_time() -> None:
    one = from_samples([500.0], [0.0], [1.0])
    assert tpot_target(replace(SERVE, workload=one, slo=Slo(0.95, 0.5, e2e_s=1.0))) == (math.inf, Constraint.TPOT)
    assert tpot_target(replace(SERVE, workload=one, slo=Slo(0.95, 0.5, 1.0, e2e_s=0.9)))[0] == 0.0
    assert 0.0 < tpot_target(replace(SERVE, workload=one, slo=Slo(0.95, e2e_s=1.0)))[0] < 1.0


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_slo_invalid_e2e_raises(bad: float) -> None:
    with pytest.raises(ValueError, match="e2e_s"):
        Slo(0.95, 0.5, e2e_s=bad)


# ---------------------------------------------------------------- the gate


def classes() -> tuple[ClassPolicy, ...]:
    return (
        ClassPolicy("chat", 1, Slo(0.95, e2e_s=9.0)),
        ClassPolicy("paced", 0, Slo(0.95, 0.5, tpot_s=0.02)),
    )


def test_admission_class_tpot_is_limited_by_e2e() -> None:
    cost_model = engine_cost_model(SERVE, classes())
    assert cost_model.tpot_s == (tpot_target(replace(SERVE, slo=classes()[0].slo))[0], 0.02)
    assert 0 < cost_model.step_budget_s[0] < cost_model.tpot_s[0]


@pytest.mark.parametrize("most", [None, 10])
def test_admission_queue_wait_is_bounded_by_e2e(most: int | None) -> None:
    """No target for the first token: the time of the expected answer comes off, so that a short one may wait longer."""
    whole = (ClassPolicy("chat", 0, Slo(0.95, e2e_s=9.0)),)
    controller = gate(replace(SERVE, slo=whole[0].slo), whole)
    now = fill(controller)[1]
    assert controller.submit(make_request("late", now, max_tokens=most), now).outcome is AdmissionOutcome.QUEUED
    cost_model = controller.pool.cost_model
    tokens = cost_model.output_mean if most is None else float(most)
    alone_s = cost_model.request_cost(make_request("late", max_tokens=most)).idle_ttft_s
    assert controller.wake_at_s == pytest.approx(now + 9.0 - (tokens - 1) * cost_model.tpot_s[0] - alone_s)
    [refused] = controller.release(controller.wake_at_s + 1e-6)
    assert (refused.request_id, refused.outcome) == ("late", AdmissionOutcome.SHED_SATURATED)
