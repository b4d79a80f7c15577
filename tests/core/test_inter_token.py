"""The promise of gaps between tokens: their law, what it leaves a replica, and promises that no fleet keeps."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.core.admission.cost_model import ClassPolicy, engine_cost_model
from plimsoll.core.capacity import slo_capacity, tier_model
from plimsoll.core.capacity.sizing import Infeasible, Sizing, size_tier
from plimsoll.core.capacity.tier_model import Constraint, TierSpec
from plimsoll.core.engine_model.inter_token import ITL_SHARE, InterTokenLatency, itl_quantile_s, max_rate_within_itl
from plimsoll.core.engine_model.step_time import EngineLimits, StepModel, serve_tier
from plimsoll.core.planning.engine_settings import max_sequences
from plimsoll.core.slo import Slo
from plimsoll.core.workload import from_samples
from tests.core.test_sizing import DECODE, GUIDE, PREFILL, SERVE, replicas

SHARED = {"serve": SERVE, "guide": GUIDE, "decode": DECODE}
BINDING_S = {"serve": 0.05, "guide": 0.1, "decode": 0.01}  # that each can keep, and that bind before its other targets


def with_itl(tier: TierSpec, itl_s: float | None) -> TierSpec:
    return replace(tier, slo=replace(tier.slo, itl_s=itl_s))


def test_itl_equal_prompts_follow_poisson_distribution() -> None:
    """No clusters to speak of at a low rate: a step has N prompts, P(N > n) by Poisson."""
    model = StepModel(0.01, 0.0, 1e-4, 0.0, 0.0, 1e-9)
    own = InterTokenLatency(serve_tier(model, from_samples([100.0], [0.0], [50.0])), 8192)
    rate = 5.0  # a step of 10.5 ms, a prompt of 10 ms
    step = float(own.work.tpot_s(rate))
    some, two = -math.expm1(-rate * step), 1 - math.exp(-rate * step) * (1 + rate * step)
    assert own.share_above(rate, 0.0105) == pytest.approx(some, rel=0.06)
    assert own.share_above(rate, 0.0205) == pytest.approx(two, rel=0.25)  # what a long step gathers comes on top
    assert two < own.share_above(rate, 0.0205)


def test_itl_percentile_at_low_rate_is_plain_step() -> None:
    own = tier_model.inter_token_latency(SERVE)[0]
    plain, with_prompts = itl_quantile_s(own, 0.5), itl_quantile_s(own, 4.0)
    assert plain == pytest.approx(SERVE.model.base_s, rel=0.1)
    assert with_prompts > 4 * plain


def test_itl_is_bounded_by_chunk_budget() -> None:
    longest = {}
    for budget in (512, 2048, 8192):
        own = InterTokenLatency(serve_tier(SERVE.model, from_samples([8000.0], [0.0], [200.0])), budget)
        longest[budget] = itl_quantile_s(own, 2.0)
        full_s = SERVE.model.base_s + budget * SERVE.model.prefill_token_s
        assert 0.9 < longest[budget] / full_s < 1.4  # attention and decoding come on top
        assert own.share_above(2.0, 0.9 * full_s) >= ITL_SHARE * 2.0 * own.work.base_s * (8000 // budget)


def test_itl_exceedance_is_monotone_in_rate() -> None:
    for tier in SHARED.values():
        own, most = tier_model.inter_token_latency(tier)
        for limit_s in (0.02, 0.05, 0.1, 0.3):
            shares = [own.share_above(float(rate), limit_s) for rate in np.linspace(0.0, most, 25)]
            assert np.all(np.diff(shares) >= -1e-3)
            assert 0.0 <= min(shares) <= max(shares) <= 1.0


@given(
    rate=st.floats(0.02, 0.9),
    budget=st.sampled_from([512, 2048, 8192]),
    prompt=st.floats(50.0, 9000.0),
    output=st.floats(20.0, 1000.0),
    spread=st.floats(0.0, 1.0),
    share=st.sampled_from([0.5, 0.95, 0.99]),
)
@settings(max_examples=40, deadline=None)
def test_itl_quantile_inverts_exceedance(
    rate: float, budget: int, prompt: float, output: float, spread: float, share: float
) -> None:
    z = np.linspace(-2, 2, 41)
    mix = from_samples(prompt * np.exp(spread * z), np.zeros(41), output * np.exp(-spread * z))
    own = InterTokenLatency(serve_tier(SERVE.model, mix), budget)
    per_s = rate / own.work.work_s
    found = itl_quantile_s(own, per_s, share)
    assert own.share_above(per_s, found) <= 1 - share + 1e-9
    assert own.share_above(per_s, 0.99 * found) >= 1 - share - 0.02
    assert found >= own.work.base_s


@pytest.mark.parametrize("name", SHARED)
def test_itl_target_binding_is_reported_loose_is_ignored(name: str) -> None:
    tier = with_itl(SHARED[name], BINDING_S[name])
    reduced = tier_model.build_profile(tier)
    line, before = (
        float(slo_capacity.slo_capacity_per_s(tier_model.build_profile(one), 1)[0]) for one in (tier, SHARED[name])
    )
    assert 0 < line < before
    assert slo_capacity.binding_constraint(reduced, [line], 1) == [Constraint.ITL]
    assert Constraint.ITL == "itl"
    found = size_tier(tier, 50.0)
    assert isinstance(found, Sizing)
    assert found.constraint is Constraint.ITL
    assert found.slo_capacity_per_s >= 50.0
    assert found.replicas >= 50.0 / float(reduced.itl_limit_per_s[0]) - 1e-6
    loose = with_itl(SHARED[name], 2.0)
    assert size_tier(loose, 50.0) == size_tier(SHARED[name], 50.0)


@pytest.mark.parametrize("name", ["serve", "guide"])
def test_itl_rate_limit_is_tight(name: str) -> None:
    tier = with_itl(SHARED[name], BINDING_S[name])
    own = tier_model.inter_token_latency(tier)[0]
    limit = float(tier_model.build_profile(tier).itl_limit_per_s[0])
    assert own.share_above(limit, BINDING_S[name]) <= 1 - ITL_SHARE
    assert own.share_above(1.01 * limit, BINDING_S[name]) > 1 - ITL_SHARE
    line = float(slo_capacity.slo_capacity_per_s(tier_model.build_profile(tier), 7)[0])
    assert line == pytest.approx(7 * limit)


def test_itl_decode_batch_fits_steps_and_kv_posts() -> None:
    tier = with_itl(DECODE, 0.01)
    reduced = tier_model.build_profile(tier)
    batch = float(reduced.slots[0])
    even = DECODE.transfer.step_factor * float(DECODE.model.step_s(0, 0, batch, batch * 1300)) if DECODE.transfer else 0
    assert even < 0.01
    assert reduced.slots[0] < tier_model.build_profile(DECODE).slots[0]
    assert max_sequences(tier) == pytest.approx(batch, abs=16)
    assert math.isinf(reduced.itl_limit_per_s[0])


def test_itl_target_does_not_affect_prefill_tier() -> None:
    assert slo_capacity.slo_capacity_per_s(
        tier_model.build_profile(with_itl(PREFILL, 0.005)), 2
    ) == slo_capacity.slo_capacity_per_s(tier_model.build_profile(PREFILL), 2)


@given(rate=st.floats(0.5, 100), itl_s=st.floats(0.022, 0.2), more=st.floats(1.0, 2.0), name=st.sampled_from([*SHARED]))
@settings(max_examples=25, deadline=None)
def test_itl_looser_target_or_lower_rate_never_needs_more(rate: float, itl_s: float, more: float, name: str) -> None:
    before = replicas(with_itl(SHARED[name], itl_s), rate * 1.003)
    assert replicas(with_itl(SHARED[name], itl_s * more), rate) <= before
    assert replicas(with_itl(SHARED[name], itl_s), rate / more) <= before
    assert replicas(SHARED[name], rate) <= before


@pytest.mark.parametrize(("name", "too_short_s"), [("serve", 0.012), ("serve", 0.004), ("decode", 0.002)])
def test_itl_infeasible_target_reports_feasible_one(name: str, too_short_s: float) -> None:
    tier = with_itl(SHARED[name], too_short_s)
    found = size_tier(tier, 5.0)
    assert isinstance(found, Infeasible)
    assert found.constraint is Constraint.ITL
    assert found.nearest_slo is not None
    assert found.nearest_slo == replace(tier.slo, itl_s=found.nearest_slo.itl_s)
    assert too_short_s < (found.nearest_slo.itl_s or 0.0) < 0.1
    assert isinstance(size_tier(replace(tier, slo=found.nearest_slo), 5.0), Sizing)
    assert isinstance(size_tier(with_itl(tier, (found.nearest_slo.itl_s or 0.0) / 1.3), 5.0), Infeasible)


def test_itl_infeasible_by_prompts_names_remedy() -> None:
    chunks, plain = size_tier(with_itl(SERVE, 0.012), 5.0), size_tier(with_itl(SERVE, 0.004), 5.0)
    assert isinstance(chunks, Infeasible)
    assert isinstance(plain, Infeasible)
    assert chunks.remedy == "a smaller --max-num-batched-tokens, or a prefill tier, makes the gaps shorter"
    assert plain.remedy == ""  # the step alone is longer: nothing but another engine helps
    small = replace(with_itl(SERVE, 0.022), limits=EngineLimits(1024, 919_824, 512))
    assert isinstance(size_tier(small, 5.0), Sizing)


def test_itl_and_tpot_infeasible_are_both_loosened() -> None:
    found = size_tier(replace(SERVE, slo=Slo(0.95, 0.5, tpot_s=0.004, itl_s=0.01)), 5.0)
    assert isinstance(found, Infeasible)
    assert found.nearest_slo is not None
    assert (found.nearest_slo.tpot_s or 0.0) > 0.004
    assert (found.nearest_slo.itl_s or 0.0) > 0.01


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_slo_invalid_itl_raises(bad: float) -> None:
    with pytest.raises(ValueError, match="itl_s"):
        Slo(0.95, 0.5, itl_s=bad)


def test_slo_with_itl_only_raises() -> None:
    with pytest.raises(ValueError, match="ttft_s, tpot_s or e2e_s is needed"):
        Slo(0.95, itl_s=0.1)


# ---------------------------------------------------------------- the gate


def step_budget_of(tier: TierSpec) -> float:
    """Of a class with targets of its own, none of which is the gaps'."""
    cost_model = engine_cost_model(
        tier, (ClassPolicy("chat", 1, tier.slo), ClassPolicy("loose", 0, Slo(0.95, 2.0, tpot_s=1.0)))
    )
    return cost_model.step_budget_s[1]


@pytest.mark.parametrize("name", SHARED)
def test_admission_step_budget_respects_itl_rate_limit(name: str) -> None:
    free, held = step_budget_of(SHARED[name]), step_budget_of(with_itl(SHARED[name], BINDING_S[name]))
    own, most = tier_model.inter_token_latency(with_itl(SHARED[name], BINDING_S[name]))
    limit = max_rate_within_itl(own, most, BINDING_S[name])
    assert own.work.tpot_s(limit) <= held * (1 + 1e-9)  # what sizing sends there is let in
    assert held < free
    assert step_budget_of(with_itl(SHARED[name], 2.0)) == free
    assert step_budget_of(with_itl(SHARED[name], 0.001)) == pytest.approx(2 * own.work.step_s(1.0))
