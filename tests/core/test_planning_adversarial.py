"""Plans against questions without sense, workloads at the edge, arrivals in heaps, and every arrangement by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core.capacity.sizing import Infeasible
from plimsoll.core.planning import workloads
from plimsoll.core.planning.arrangement import (
    MAX_DISAGGREGATED_GPU_RATIO,
    aggregated_tier,
    choose_arrangement,
    disaggregated_tiers,
    size_arrangement,
)
from plimsoll.core.planning.expected_latency import plan_attainment
from plimsoll.core.planning.fleet_plan import FleetPlan, PlanFailure, PlanRequest, make_plan
from plimsoll.core.slo import Slo
from plimsoll.core.workload import Workload
from tests.core.test_planning import CHAT, H200, SLO

FEW = [H200[0], H200[3]]  # two chunk budgets


def plan_request(**changes: object) -> PlanRequest:
    return replace(PlanRequest(CHAT, SLO, 24.0, [FEW]), **changes)  # type: ignore[arg-type]


@cache
def planned(rate_per_s: float, ttft_s: float, tpot_s: float) -> FleetPlan | PlanFailure:
    return make_plan(plan_request(rate_per_s=rate_per_s, slo=Slo(0.95, ttft_s, 0.0, tpot_s)))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("rate_per_s", (0.0, -1.0, math.nan, math.inf, 1e7)),
        ("arrival_cv2", (-1.0, math.nan, math.inf)),
        ("headroom", (-0.1, 1.0, 1.5, math.nan)),
        ("itl_limit_s", (0.0, -1.0, math.nan, math.inf)),
        ("bytes_per_s", (0.0, -1.0, math.nan, math.inf)),
        ("accepted_tokens", (0.0, 0.99, 4.1, math.nan)),
        ("machines", ([], [[]])),
    ],
)
def test_plan_request_invalid_value_raises_naming_field(name: str, values: tuple[object, ...]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=name):
            plan_request(**{name: value})


@pytest.mark.parametrize(
    "workload",
    [
        workloads.lognormal_workload(1, 1),
        workloads.lognormal_workload(1, 4000),
        workloads.lognormal_workload(20_000, 1),
        workloads.lognormal_workload(1e6, 10),
        workloads.lognormal_workload(1000, 200, 3.0, 3.0),
        workloads.lognormal_workload(1000, 200, cached_share=0.999),
    ],
    ids=["one token", "all answer", "all prompt", "longer than any cache", "of any length", "all cached"],
)
def test_plan_extreme_workload_meets_slo_or_gives_reason(workload: Workload) -> None:
    found = make_plan(plan_request(workload=workload, slo=Slo(0.95, 2.0, 0.0, 0.05)))
    if isinstance(found, PlanFailure):
        assert all(found.reasons)
        return
    feasible = math.prod(1.0 - one.infeasible_share for one in found.chosen.sizings)
    assert plan_attainment(found.chosen.tiers, 24.0, found.chosen.replicas) >= 0.95 * feasible * (1 - 1e-9)
    assert all(0.0 <= time < math.inf for time in vars(found.expected_latency).values() if time is not None)
    assert found.chosen.slo_capacity_per_s >= 24.0 * (1 - 1e-9)


def test_plan_gpus_are_monotone_in_rate_and_slo() -> None:
    rates, targets = (0.01, 5.0, 21.0, 60.0), ((0.2, 0.012), (0.5, 0.012), (0.5, 0.05), (5.0, 0.5))
    for ttft_s, tpot_s in targets:
        gpus = [found.chosen.gpus for rate in rates if isinstance(found := planned(rate, ttft_s, tpot_s), FleetPlan)]
        assert len(gpus) == len(rates)
        assert gpus == sorted(gpus)
    for rate in rates:
        one = [planned(rate, *target) for target in targets]
        gpus = [found.chosen.gpus for found in one if isinstance(found, FleetPlan)]
        assert gpus == sorted(gpus, reverse=True)


@pytest.mark.parametrize("gap_cv2", [4.0, 100.0, 2000.0])
def test_plan_bursty_arrivals_need_more_gpus_but_are_feasible(gap_cv2: float) -> None:
    """Dealt out to enough replicas no heap is one; an idle replica that gets all of it is no reason."""
    calm, heaped = make_plan(plan_request()), make_plan(plan_request(arrival_cv2=gap_cv2))
    assert isinstance(calm, FleetPlan)
    assert isinstance(heaped, FleetPlan)
    assert heaped.chosen.gpus >= calm.chosen.gpus
    assert plan_attainment(heaped.chosen.tiers, 24.0, heaped.chosen.replicas) >= 0.95


# By hand


@pytest.mark.parametrize("rate", [7.0, 24.0, 55.0])
def test_size_arrangement_single_tier_is_minimal(rate: float) -> None:
    tier = aggregated_tier(H200[3], CHAT, SLO)
    found = size_arrangement((tier,), (H200[3],), rate)
    assert not isinstance(found, Infeasible)
    by_hand = next(count for count in range(1, 100) if plan_attainment((tier,), rate, (count,)) >= 0.95)
    assert found.replicas == (by_hand,)


@pytest.mark.parametrize("rate", [10.0, 40.0])
def test_size_arrangement_pair_is_within_one_replica_of_optimum(rate: float) -> None:
    """It is grown from what each tier needs for itself, the weaker one first, so it may miss the best by one."""
    tiers = disaggregated_tiers(H200[-1], H200[0], CHAT, Slo(0.95, 0.3, 0.0, 0.012), 100e9)
    found = size_arrangement(tiers, (H200[-1], H200[0]), rate)
    assert not isinstance(found, Infeasible)
    assert plan_attainment(tiers, rate, found.replicas) >= 0.95
    splits = product(range(1, 9), repeat=2)
    by_hand = min(sum(counts) for counts in splits if plan_attainment(tiers, rate, counts) >= 0.95)
    assert by_hand <= sum(found.replicas) <= by_hand + 1


def test_choose_arrangement_pair_only_if_it_saves_the_margin() -> None:
    tier = aggregated_tier(H200[3], CHAT, SLO)
    whole = size_arrangement((tier,), (H200[3],), 400.0)
    assert not isinstance(whole, Infeasible)
    for spared in range(whole.gpus):
        less = replace(whole, sizings=(replace(whole.sizings[0], replicas=whole.gpus - spared),))
        assert (choose_arrangement(whole, less) is less) == (less.gpus < MAX_DISAGGREGATED_GPU_RATIO * whole.gpus)
        assert choose_arrangement(Infeasible(whole.binding_constraint, None), less) is less
        assert choose_arrangement(less, Infeasible(whole.binding_constraint, None)) is less


@given(st.lists(st.floats(0, 5000), min_size=2, max_size=60), st.floats(1, 3000))
def test_busiest_window_has_most_arrivals(arrivals: list[float], window_s: float) -> None:
    at = np.sort(arrivals)
    if not at[-1] - at[0] > workloads.MIN_TRACE_SPAN_S:
        return
    found = workloads.busiest_window(at, window_s)
    if at[-1] - at[0] <= window_s:
        assert (found.first, found.end) == (0, at.size)
    else:
        most = max(int(np.sum((at >= begun) & (at < begun + window_s))) for begun in at)
        assert found.end - found.first == most
        assert found.rate_per_s == pytest.approx(most / window_s)
    assert found.rate_per_s > 0.0
    assert 1.0 <= found.arrival_cv2 < math.inf


@pytest.mark.parametrize("arrivals", [[0.0, math.nan, 1.0], [0.0, math.inf], [math.nan, math.nan], [[0.0, 1.0]]])
def test_busiest_window_invalid_times_raise(arrivals: list[float]) -> None:
    with pytest.raises(ValueError, match="arrivals_s"):
        workloads.busiest_window(arrivals)
