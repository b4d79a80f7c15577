"""Replicas for a rate: brute force, what must be monotone, and promises that no fleet can keep."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.core.capacity import sizing, slo_capacity, tier_model
from plimsoll.core.capacity.sizing import Infeasible, Sizing, size_tier, size_tiers
from plimsoll.core.capacity.tier_model import Constraint, TierSpec
from plimsoll.core.engine_model.step_time import EngineLimits, KvTransfer, StepModel
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import from_samples

RNG = np.random.default_rng(1)
CHAT = from_samples(
    np.ceil(1000 * np.exp(0.6 * RNG.standard_normal(80))),
    np.zeros(80),
    np.ceil(195 * np.exp(0.5 * RNG.standard_normal(80))),
)
SMALL = StepModel(4.742e-3, -1.3e-3, 2.265e-5, 1.035e-9, 1.816e-5, 3.048e-8)
LARGE = StepModel(0.0132, 0.0, 5.2e-5, 1.75e-9, 2.0e-5, 4.6e-8)
ROOMY = EngineLimits(1024, 919_824, 8192)
SERVE = TierSpec(Role.SERVE, SMALL, CHAT, ROOMY, Slo(0.95, 0.5, 0.0, 0.05))
GUIDE = TierSpec(
    Role.SERVE,
    LARGE,
    from_samples([4000.0], [0.0], [1000.0]),
    EngineLimits(1024, 330_000, 8192),
    Slo(0.99, 3.0, 0.0, 0.1),
)
PREFILL = TierSpec(Role.PREFILL, SMALL, CHAT, ROOMY, Slo(0.99, 0.5))
DECODE = TierSpec(Role.DECODE, SMALL, CHAT, ROOMY, Slo(0.95, 0.5, 0.0, 0.025), KvTransfer(32, 128), ttft_outside_s=0.3)
KINDS = [SERVE, GUIDE, PREFILL, DECODE]
NAMES = ["serve", "guide", "prefill", "decode"]
PROFILES = {name: tier_model.build_profile(tier) for name, tier in zip(NAMES, KINDS, strict=True)}


def replicas(tier: TierSpec, rate: float, headroom: float = 0.0) -> float:
    return float(size_tiers(tier_model.build_profile(tier), rate, headroom).replicas[0])


@pytest.mark.parametrize("name", NAMES)
def test_size_tier_is_first_capacity_covering_rate(name: str) -> None:
    reduced = PROFILES[name]
    lines = slo_capacity.slo_capacity_per_s(reduced.select(np.zeros(40, dtype=np.intp)), np.arange(1, 41))
    rates = np.linspace(lines[0] * 0.05, lines[-1] * 0.999, 150)
    found = size_tiers(reduced.select(np.zeros(150, dtype=np.intp)), rates)
    brute = 1 + np.sum(lines[None, :] < rates[:, None] * (1 - 1e-9), axis=1)
    assert found.replicas == pytest.approx(brute)
    assert np.all(found.attainment >= reduced.share[0] - 1e-9)
    assert np.all(found.attainment_one_fewer < found.attainment)


@pytest.mark.parametrize("name", NAMES)
def test_size_tier_is_independent_of_search_start(name: str) -> None:
    reduced = PROFILES[name]
    rates = np.geomspace(0.1, 2000, 60)
    tiled = reduced.select(np.zeros(60, dtype=np.intp))
    cold = size_tiers(tiled, rates).replicas
    for start in (0, 1, 17, 5000, math.inf, cold, cold + 1, cold - 1):
        assert size_tiers(tiled, rates, start=start).replicas == pytest.approx(cold)


def test_size_tier_reports_constraint_and_one_fewer() -> None:
    found = size_tier(GUIDE, 10.0)
    assert isinstance(found, Sizing)
    assert found.constraint is Constraint.KV
    assert (
        found.slo_capacity_per_s
        >= 10.0
        > float(slo_capacity.slo_capacity_per_s(PROFILES["guide"], found.replicas - 1)[0])
    )
    assert found.utilisation == pytest.approx(10 * PROFILES["guide"].work_s[0] / found.replicas)
    assert found.attainment_one_fewer < found.attainment
    assert found.attainment > 0.99
    assert found.infeasible_share == 0


def test_size_tier_without_load_is_zero() -> None:
    found = size_tier(SERVE, 0.0)
    assert isinstance(found, Sizing)
    assert (found.replicas, found.utilisation, found.attainment, found.slo_capacity_per_s) == (0, 0.0, 1.0, 0.0)
    tiny = size_tier(SERVE, 1e-9)
    assert isinstance(tiny, Sizing)
    assert (tiny.replicas, tiny.attainment_one_fewer) == (1, 0.0)


def test_size_tier_headroom_is_share_of_capacity() -> None:
    line = float(slo_capacity.slo_capacity_per_s(PROFILES["serve"], 4)[0])
    assert replicas(SERVE, line * 0.999) == 4
    assert replicas(SERVE, line * 0.999, headroom=0.1) == 5
    assert replicas(SERVE, line * 0.899, headroom=0.1) == 4


MORE = st.floats(1.0, 2.5)


@given(rate=st.floats(0.01, 300), more=MORE, room=st.floats(0, 0.5), kind=st.sampled_from(NAMES))
@settings(max_examples=60)
def test_size_tier_is_monotone_in_load_and_headroom(rate: float, more: float, room: float, kind: str) -> None:
    reduced = PROFILES[kind].select(np.zeros(3, dtype=np.intp))
    first, busier, safer = size_tiers(reduced, [rate, rate * more, rate], [0, 0, room]).replicas
    assert first <= busier
    assert first <= safer


@given(rate=st.floats(0.1, 300), more=MORE, kind=st.sampled_from(KINDS))
@settings(max_examples=12)
def test_size_tier_looser_slo_or_better_engine_never_needs_more(rate: float, more: float, kind: TierSpec) -> None:
    w, m, slo, limits = kind.workload, kind.model, kind.slo, kind.limits
    before = replicas(kind, rate * 1.002)  # as near as the reduction to classes is
    for better in (
        replace(kind, slo=replace(slo, share=slo.share / (1 + 0.05 * (more - 1)))),
        replace(kind, slo=replace(slo, ttft_s=(slo.ttft_s or 1.0) * more)),
        replace(kind, slo=replace(slo, tpot_s=None if slo.tpot_s is None else slo.tpot_s * more)),
        replace(kind, model=StepModel(*(getattr(m, f) / more for f in StepModel.__dataclass_fields__))),
        replace(kind, limits=EngineLimits(int(1024 * more), int(limits.kv_tokens * more), 8192)),
        replace(kind, workload=from_samples(w.uncached_tokens, w.cached_tokens, w.output_tokens / more, w.weights)),
    ):
        assert replicas(better, rate) <= before


@given(rate=st.floats(0.1, 200), more=MORE, kind=st.sampled_from(KINDS))
@settings(max_examples=12)
def test_size_tier_harder_conditions_never_need_fewer(rate: float, more: float, kind: TierSpec) -> None:
    w, before = kind.workload, replicas(kind, rate / 1.002)
    longer = w.uncached_tokens * more**0.5
    for worse in (
        replace(kind, arrival_cv2=more**3),
        replace(kind, ttft_outside_s=kind.ttft_outside_s + 0.02 * more),
        replace(kind, tpot_tail_scale=1 + 0.2 * (more - 1)),
        replace(kind, gateways=1 + int(2 * more)),
        replace(kind, workload=from_samples(longer, w.cached_tokens, w.output_tokens, w.weights)),
    ):
        found = size_tier(worse, rate)
        assert isinstance(found, Infeasible) or found.replicas >= before


def test_size_tier_ttft_below_prefill_is_infeasible() -> None:
    found = size_tier(replace(SERVE, slo=Slo(0.95, 0.005, 0.0, 0.05)), 10.0)
    assert isinstance(found, Infeasible)
    assert found.constraint is Constraint.TTFT
    assert found.nearest_slo is not None
    assert found.nearest_slo.tpot_s == 0.05
    assert 0.005 < (found.nearest_slo.ttft_s or 0) < 0.2
    assert isinstance(size_tier(replace(SERVE, slo=found.nearest_slo), 10.0), Sizing)


def test_size_tier_tpot_below_base_step_is_infeasible() -> None:
    found = size_tier(replace(SERVE, slo=Slo(0.95, 0.5, 0.0, 0.004)), 10.0)
    assert isinstance(found, Infeasible)
    assert found.constraint is Constraint.TPOT
    assert found.nearest_slo is not None
    assert (found.nearest_slo.ttft_s, found.nearest_slo.share) == (0.5, 0.95)
    assert 4.742e-3 < (found.nearest_slo.tpot_s or 0) < 0.01
    assert isinstance(size_tier(replace(SERVE, slo=found.nearest_slo), 10.0), Sizing)


def test_size_tier_decode_tpot_below_batch_of_one_is_infeasible() -> None:
    base = float(PROFILES["decode"].base_s[0])
    found = size_tier(replace(DECODE, slo=Slo(0.95, 0.5, 0.0, base * 1.001)), 1.0)
    assert isinstance(found, Infeasible)
    assert found.constraint is Constraint.TPOT
    assert found.nearest_slo is not None
    assert isinstance(size_tier(replace(DECODE, slo=found.nearest_slo), 1.0), Sizing)


def test_size_tier_request_exceeding_kv_has_no_feasible_slo() -> None:
    assert size_tier(replace(GUIDE, limits=EngineLimits(64, 4000, 512)), 1.0) == Infeasible(Constraint.KV, None)


def test_size_tier_infeasible_long_prompts_leave_rest_feasible() -> None:
    mixed = from_samples([500.0, 30_000.0], [0.0, 0.0], [200.0, 200.0], [0.9, 0.1])
    found = size_tier(replace(SERVE, workload=mixed), 5.0)
    assert isinstance(found, Sizing)
    assert found.infeasible_share == pytest.approx(0.1)


def test_size_tiers_infeasible_tier_leaves_others_unchanged() -> None:
    hopeless = tier_model.build_profile(replace(SERVE, slo=Slo(0.95, 0.5, 0.0, 0.004)))
    found = size_tiers(tier_model.stack_profiles([PROFILES["serve"], hopeless, PROFILES["guide"]]), [30.0, 30.0, 3.0])
    assert math.isinf(found.replicas[1])
    assert (found.attainment[1], found.utilisation[1]) == (0, 0)
    assert found.replicas[[0, 2]] == pytest.approx([replicas(SERVE, 30.0), replicas(GUIDE, 3.0)])


def test_size_tier_very_large_fleet_is_supported() -> None:
    found = size_tiers(PROFILES["guide"], 50_000.0)
    assert found.replicas[0] * 1.54083205 == pytest.approx(50_000, rel=1e-3)
    assert math.isinf(size_tiers(PROFILES["guide"], 500_000.0).replicas[0])  # beyond MAX_REPLICAS
    assert sizing.MAX_SIZED_REPLICAS == 100_000


def test_prefill_only_tier_is_sized_by_ttft_without_tpot() -> None:
    """An embedding model: one token each, which the prefill makes."""
    tier = replace(SERVE, workload=replace(CHAT, output_tokens=np.ones(CHAT.weights.size)), slo=Slo(0.95, 0.5))
    one, many = size_tier(tier, 5.0), size_tier(tier, 500.0)
    assert isinstance(one, Sizing)
    assert isinstance(many, Sizing)
    assert (one.constraint, many.constraint) == (Constraint.TTFT, Constraint.TTFT)
    assert one.replicas == 1 < many.replicas
