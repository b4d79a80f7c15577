"""Replicas for a rate: brute force, what must be monotone, and promises that no fleet can keep."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.core import knee, load_line, sizing
from plimsoll.core.knee import Constraint, Tier
from plimsoll.core.latency import EngineLimits, KvTransfer, StepModel
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.sizing import Infeasible, Sizing, size, size_many
from plimsoll.core.slo import Slo
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
SERVE = Tier(Role.SERVE, SMALL, CHAT, ROOMY, Slo(0.95, 0.5, 0.0, 0.05))
GUIDE = Tier(
    Role.SERVE,
    LARGE,
    from_samples([4000.0], [0.0], [1000.0]),
    EngineLimits(1024, 330_000, 8192),
    Slo(0.99, 3.0, 0.0, 0.1),
)
PREFILL = Tier(Role.PREFILL, SMALL, CHAT, ROOMY, Slo(0.99, 0.5))
DECODE = Tier(Role.DECODE, SMALL, CHAT, ROOMY, Slo(0.95, 0.5, 0.0, 0.025), KvTransfer(32, 128), elsewhere_s=0.3)
KINDS = [SERVE, GUIDE, PREFILL, DECODE]
NAMES = ["serve", "guide", "prefill", "decode"]
PROFILES = {name: knee.profile(tier) for name, tier in zip(NAMES, KINDS, strict=True)}


def replicas(tier: Tier, rate: float, headroom: float = 0.0) -> float:
    return float(size_many(knee.profile(tier), rate, headroom).replicas[0])


@pytest.mark.parametrize("name", NAMES)
def test_size_tier_is_first_capacity_covering_rate(name: str) -> None:
    reduced = PROFILES[name]
    lines = load_line.slo_rate(reduced.take(np.zeros(40, dtype=np.intp)), np.arange(1, 41))
    rates = np.linspace(lines[0] * 0.05, lines[-1] * 0.999, 150)
    found = size_many(reduced.take(np.zeros(150, dtype=np.intp)), rates)
    brute = 1 + np.sum(lines[None, :] < rates[:, None] * (1 - 1e-9), axis=1)
    assert found.replicas == pytest.approx(brute)
    assert np.all(found.attained >= reduced.share[0] - 1e-9)
    assert np.all(found.one_fewer < found.attained)


@pytest.mark.parametrize("name", NAMES)
def test_size_tier_is_independent_of_search_start(name: str) -> None:
    reduced = PROFILES[name]
    rates = np.geomspace(0.1, 2000, 60)
    tiled = reduced.take(np.zeros(60, dtype=np.intp))
    cold = size_many(tiled, rates).replicas
    for start in (0, 1, 17, 5000, math.inf, cold, cold + 1, cold - 1):
        assert size_many(tiled, rates, start=start).replicas == pytest.approx(cold)


def test_size_tier_reports_constraint_and_one_fewer() -> None:
    found = size(GUIDE, 10.0)
    assert isinstance(found, Sizing)
    assert found.constraint is Constraint.KV
    assert found.slo_rate_per_s >= 10.0 > float(load_line.slo_rate(PROFILES["guide"], found.replicas - 1)[0])
    assert found.utilisation == pytest.approx(10 * PROFILES["guide"].work_s[0] / found.replicas)
    assert found.one_fewer < found.attained
    assert found.attained > 0.99
    assert found.infeasible_alone == 0


def test_size_tier_without_load_is_zero() -> None:
    found = size(SERVE, 0.0)
    assert isinstance(found, Sizing)
    assert (found.replicas, found.utilisation, found.attained, found.slo_rate_per_s) == (0, 0.0, 1.0, 0.0)
    tiny = size(SERVE, 1e-9)
    assert isinstance(tiny, Sizing)
    assert (tiny.replicas, tiny.one_fewer) == (1, 0.0)


def test_size_tier_headroom_is_share_of_capacity() -> None:
    line = float(load_line.slo_rate(PROFILES["serve"], 4)[0])
    assert replicas(SERVE, line * 0.999) == 4
    assert replicas(SERVE, line * 0.999, headroom=0.1) == 5
    assert replicas(SERVE, line * 0.899, headroom=0.1) == 4


MORE = st.floats(1.0, 2.5)


@given(rate=st.floats(0.01, 300), more=MORE, room=st.floats(0, 0.5), kind=st.sampled_from(NAMES))
@settings(max_examples=60)
def test_size_tier_is_monotone_in_load_and_headroom(rate: float, more: float, room: float, kind: str) -> None:
    reduced = PROFILES[kind].take(np.zeros(3, dtype=np.intp))
    first, busier, safer = size_many(reduced, [rate, rate * more, rate], [0, 0, room]).replicas
    assert first <= busier
    assert first <= safer


@given(rate=st.floats(0.1, 300), more=MORE, kind=st.sampled_from(KINDS))
@settings(max_examples=12)
def test_size_tier_looser_slo_or_better_engine_never_needs_more(rate: float, more: float, kind: Tier) -> None:
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
def test_size_tier_harder_conditions_never_need_fewer(rate: float, more: float, kind: Tier) -> None:
    w, before = kind.workload, replicas(kind, rate / 1.002)
    longer = w.uncached_tokens * more**0.5
    for worse in (
        replace(kind, arrival_cv2=more**3),
        replace(kind, elsewhere_s=kind.elsewhere_s + 0.02 * more),
        replace(kind, tail_scale=1 + 0.2 * (more - 1)),
        replace(kind, gateways=1 + int(2 * more)),
        replace(kind, workload=from_samples(longer, w.cached_tokens, w.output_tokens, w.weights)),
    ):
        found = size(worse, rate)
        assert isinstance(found, Infeasible) or found.replicas >= before


def test_size_tier_ttft_below_prefill_is_infeasible() -> None:
    found = size(replace(SERVE, slo=Slo(0.95, 0.005, 0.0, 0.05)), 10.0)
    assert isinstance(found, Infeasible)
    assert found.constraint is Constraint.TTFT
    assert found.feasible is not None
    assert found.feasible.tpot_s == 0.05
    assert 0.005 < (found.feasible.ttft_s or 0) < 0.2
    assert isinstance(size(replace(SERVE, slo=found.feasible), 10.0), Sizing)


def test_size_tier_tpot_below_base_step_is_infeasible() -> None:
    found = size(replace(SERVE, slo=Slo(0.95, 0.5, 0.0, 0.004)), 10.0)
    assert isinstance(found, Infeasible)
    assert found.constraint is Constraint.TPOT
    assert found.feasible is not None
    assert (found.feasible.ttft_s, found.feasible.share) == (0.5, 0.95)
    assert 4.742e-3 < (found.feasible.tpot_s or 0) < 0.01
    assert isinstance(size(replace(SERVE, slo=found.feasible), 10.0), Sizing)


def test_size_tier_decode_tpot_below_batch_of_one_is_infeasible() -> None:
    base = float(PROFILES["decode"].base_s[0])
    found = size(replace(DECODE, slo=Slo(0.95, 0.5, 0.0, base * 1.001)), 1.0)
    assert isinstance(found, Infeasible)
    assert found.constraint is Constraint.TPOT
    assert found.feasible is not None
    assert isinstance(size(replace(DECODE, slo=found.feasible), 1.0), Sizing)


def test_size_tier_request_exceeding_kv_has_no_feasible_slo() -> None:
    assert size(replace(GUIDE, limits=EngineLimits(64, 4000, 512)), 1.0) == Infeasible(Constraint.KV, None)


def test_size_tier_infeasible_long_prompts_leave_rest_feasible() -> None:
    mixed = from_samples([500.0, 30_000.0], [0.0, 0.0], [200.0, 200.0], [0.9, 0.1])
    found = size(replace(SERVE, workload=mixed), 5.0)
    assert isinstance(found, Sizing)
    assert found.infeasible_alone == pytest.approx(0.1)


def test_size_tiers_infeasible_tier_leaves_others_unchanged() -> None:
    hopeless = knee.profile(replace(SERVE, slo=Slo(0.95, 0.5, 0.0, 0.004)))
    found = size_many(knee.stack([PROFILES["serve"], hopeless, PROFILES["guide"]]), [30.0, 30.0, 3.0])
    assert math.isinf(found.replicas[1])
    assert (found.attained[1], found.utilisation[1]) == (0, 0)
    assert found.replicas[[0, 2]] == pytest.approx([replicas(SERVE, 30.0), replicas(GUIDE, 3.0)])


def test_size_tier_very_large_fleet_is_supported() -> None:
    found = size_many(PROFILES["guide"], 50_000.0)
    assert found.replicas[0] * 1.54083205 == pytest.approx(50_000, rel=1e-3)
    assert math.isinf(size_many(PROFILES["guide"], 500_000.0).replicas[0])  # beyond MAX_REPLICAS
    assert sizing.MAX_REPLICAS == 100_000
