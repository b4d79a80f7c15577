"""The reserve of all tiers together: what buying every way would end at, and nothing that the other cannot carry."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.core.autoscaling.standby_sizing import (
    StandbyInput,
    joint_standby_replicas,
    plan_standby,
)
from plimsoll.core.demand.growth_prior import GROWTH_FACTORS, PRIOR_EXCEEDANCE
from plimsoll.core.demand.standby_value import GrowthDistribution, standby_replicas

PRIOR = GrowthDistribution(60.0, GROWTH_FACTORS, PRIOR_EXCEEDANCE[0], 0.0)
SLOWER = GrowthDistribution(240.0, GROWTH_FACTORS, PRIOR_EXCEEDANCE[2], 0.0)
MISS_COST = 25.0
OWN_GROWTH = 9  # replicas: the service has shown more growth than any count here

standby_inputs = st.builds(
    StandbyInput,
    st.sampled_from([PRIOR, SLOWER]),
    st.floats(0.05, 4.0),
    st.floats(0.2, 3.0),
    st.integers(1, 5),
    st.integers(5, 9),
    st.sampled_from([1, 2, 8]),
    st.just(OWN_GROWTH),
)


def net_value(tiers: list[StandbyInput], more: tuple[int, ...], miss_cost: float) -> float:
    """Saved less paid, GPU-seconds a second, from the definition."""
    needed = [tier.replicas * tier.replica_work / tier.work for tier in tiers]
    after = min((t.replicas + n) * t.replica_work / t.work for t, n in zip(tiers, more, strict=True))
    edges = sorted({min(needed), *(growth for growth in needed if growth < after), after})
    saved = 0.0
    for low, high in itertools.pairwise(edges):
        short = [tier.growth for tier, growth in zip(tiers, needed, strict=True) if growth <= low]
        saved += max(short, key=lambda odds: odds.horizon_s).between(low, high)
    work = sum(tier.work * tier.gpus_per_replica for tier in tiers)
    return miss_cost * work * saved - sum(n * tier.gpus_per_replica for n, tier in zip(more, tiers, strict=True))


@given(st.lists(standby_inputs, min_size=2, max_size=2), st.floats(0.0, 60.0))
@settings(max_examples=300)
def test_standby_counts_have_highest_net_value(tiers: list[StandbyInput], miss_cost: float) -> None:
    found = tuple(joint_standby_replicas(tiers, miss_cost))
    every = itertools.product(*(range(tier.max_replicas - tier.replicas + 1) for tier in tiers))
    best = max(net_value(tiers, more, miss_cost) for more in every)
    assert net_value(tiers, found, miss_cost) == pytest.approx(best, abs=1e-9)


@given(standby_inputs, st.floats(0.0, 60.0))
def test_standby_single_tier_equals_greedy_result(tier: StandbyInput, miss_cost: float) -> None:
    bought = standby_replicas(tier.growth, tier.work, tier.replica_work, tier.replicas, tier.max_replicas, miss_cost)
    assert joint_standby_replicas([tier], miss_cost) == [bought]


def test_standby_tier_is_limited_by_other_tier() -> None:
    prefill, full = StandbyInput(PRIOR, 1.8, 0.9, 3, 8), StandbyInput(PRIOR, 0.14, 0.28, 1, 1)
    bought, none = joint_standby_replicas([prefill, full], MISS_COST)
    assert none == 0
    assert (3 + bought) * 0.9 / 1.8 <= 2.0, "what decode carries"
    assert joint_standby_replicas([prefill, StandbyInput(PRIOR, 0.14, 0.28, 3, 3)], MISS_COST)[0] >= bought


def test_standby_tier_is_valued_by_work_of_the_pair() -> None:
    """One decode engine stands before four prefill engines; alone it is never worth it."""
    decode, prefill = StandbyInput(PRIOR, 0.14, 0.2, 1, 4), StandbyInput(PRIOR, 1.8, 0.9, 4, 8)
    assert joint_standby_replicas([decode], MISS_COST) == [0]
    assert joint_standby_replicas([prefill, decode], MISS_COST)[1] == 1


def test_standby_tier_with_headroom_may_start_slowly() -> None:
    """Nobody waits for it after a leap, so how far load grows meanwhile is no matter of the reserve."""
    prefill = StandbyInput(PRIOR, 1.1, 0.94, 2, 8, own_growth_replicas=OWN_GROWTH)
    for count in (1, 2):
        fast, slow = (
            StandbyInput(odds, 0.16, 0.85, count, 8, own_growth_replicas=OWN_GROWTH) for odds in (PRIOR, SLOWER)
        )
        assert joint_standby_replicas([prefill, slow], MISS_COST) == joint_standby_replicas([prefill, fast], MISS_COST)
    found = plan_standby([prefill, slow], MISS_COST)
    assert found.value.cost_gpu_s == found.replicas[0] * PRIOR.horizon_s
    slow_prefill = StandbyInput(SLOWER, 1.1, 0.94, 2, 8, own_growth_replicas=OWN_GROWTH)
    assert joint_standby_replicas([slow_prefill, fast], MISS_COST)[0] > found.replicas[0]


@pytest.mark.parametrize("work", [5e-324, 1e-300])
def test_standby_near_zero_load_is_zero(work: float) -> None:
    tiers = [StandbyInput(PRIOR, work, 1.0, 0, 8), StandbyInput(PRIOR, 1.0, 0.9, 1, 8)]
    assert plan_standby(tiers, MISS_COST).replicas == joint_standby_replicas(tiers, MISS_COST) == [0, 0]


def test_standby_zero_load_or_miss_cost_is_zero() -> None:
    idle_inputs = StandbyInput(PRIOR, 0.0, 1.0, 1, 8)
    busy = StandbyInput(PRIOR, 1.0, 0.9, 1, 8, own_growth_replicas=OWN_GROWTH)
    assert joint_standby_replicas([idle_inputs, busy], MISS_COST) == [0, 0]
    assert joint_standby_replicas([busy, busy], 0.0) == [0, 0]
    found = plan_standby([busy, busy], MISS_COST)
    assert found.replicas[0] == found.replicas[1] > 0
    assert found.value.pays_off
    assert found.value.cost_gpu_s == 2 * found.replicas[0] * PRIOR.horizon_s


@pytest.mark.parametrize(("needed", "own_growth", "expected"), [(3, 0, 1), (3, 2, 2), (3, 3, 3), (25, 0, 3)])
def test_standby_beyond_growth_of_the_service_itself_is_limited(needed: int, own_growth: int, expected: int) -> None:
    """Growth of other services justifies one standby replica, and one more for every ten that are needed."""
    tier = StandbyInput(PRIOR, 0.95 * needed, 1.0, needed, 99, own_growth_replicas=own_growth)
    assert joint_standby_replicas([tier], MISS_COST) == [expected]


def test_standby_of_a_higher_miss_cost_is_larger_at_first() -> None:
    tier = StandbyInput(PRIOR, 0.95, 1.0, 1, 99)
    assert [joint_standby_replicas([tier], times * MISS_COST)[0] for times in (1.0, 1.25, 2.0, 3.2)] == [1, 1, 2, 3]


def test_standby_of_a_pair_is_limited_in_total() -> None:
    prefill, decode = StandbyInput(PRIOR, 1.9, 1.0, 2, 9), StandbyInput(PRIOR, 0.7, 1.0, 1, 9)
    assert joint_standby_replicas([prefill, decode], MISS_COST) == [1, 0]
    grown = [StandbyInput(PRIOR, 1.9, 1.0, 2, 9, 1, 2), StandbyInput(PRIOR, 0.7, 1.0, 1, 9, 1, 1)]
    assert sum(joint_standby_replicas(grown, MISS_COST)) > 1
