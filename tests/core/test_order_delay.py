"""A calm tier: what only the model asks for is not ordered, what arrivals ask for is ordered at once."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core.autoscaling.cadence import due_s
from plimsoll.core.autoscaling.decide import decide
from plimsoll.core.autoscaling.decision_state import Calm, DecisionState, TierDecisionState, TimedReplicas
from plimsoll.core.autoscaling.inputs import TierSnapshot
from plimsoll.core.autoscaling.observations import NoDemand, ServiceObservation, TierObservation
from plimsoll.core.autoscaling.order_delay import (
    ORDER_DELAY_S,
    carried_need,
    has_few_misses,
    lasting_replicas,
    next_order_s,
    update_calm,
    update_wanted,
)
from plimsoll.core.autoscaling.scaling_decision import ScalingDecision
from plimsoll.core.autoscaling.scaling_policy import ScalingPolicy
from plimsoll.core.types import Unavailable
from tests.core.scaling_fixtures import (
    FREQUENT_GROWTH,
    REQUEST_GPU_S,
    SLO,
    make_forecast,
    observed_tier,
    replica_bounds,
    sizing_for,
    step_message,
)


def decisions(
    observed: list[TierObservation], missed: float | None = 0.0, miss_cost: float = 0.0
) -> list[ScalingDecision]:
    """One decision each second, each with the state of the one before."""
    state, made = DecisionState(), []
    for at_s, tier in enumerate(observed):
        service = ServiceObservation({"serve": tier}, state, missed_share=missed)
        made.append(decide(service, ScalingPolicy({"serve": replica_bounds()}, SLO, miss_cost=miss_cost), float(at_s)))
        state = made[-1].state
    return made


def counts(made: list[ScalingDecision]) -> list[int]:
    return [decision.tiers["serve"].replicas for decision in made]


CALM_S = int(ORDER_DELAY_S) + 5


def heavier(work: float, replicas: int) -> TierObservation:
    """The rate of 2.9 GPU-seconds per second, each request with more work."""
    sizing = sizing_for(make_forecast(work), replicas)
    return observed_tier(work, replicas, sizing=replace(sizing, rate_per_s=2.9 / REQUEST_GPU_S))


def test_calm_tier_does_not_order_what_only_the_model_needs() -> None:
    made = decisions([observed_tier(2.9, 3)] * CALM_S + [heavier(3.3, 3)] * 200)
    assert set(counts(made)) == {3}
    assert (
        "4 not ordered while the replicas meet the SLO at this rate"
        in step_message(made[-1].tiers["serve"], "sizing").reason
    )


def test_calm_tier_orders_at_once_what_arrivals_need() -> None:
    made = decisions([observed_tier(2.9, 3)] * CALM_S + [observed_tier(3.3, 3)])
    assert counts(made)[-2:] == [3, 4]


@pytest.mark.parametrize("missed", [None, 0.026, 1.0])
def test_tier_with_misses_orders_what_the_model_needs(missed: float | None) -> None:
    made = decisions([observed_tier(2.9, 3)] * CALM_S + [heavier(3.3, 3)], missed)
    assert counts(made)[-2:] == [3, 4]


def test_calm_tier_with_partial_metrics_orders_what_the_model_needs() -> None:
    partial = replace(heavier(3.3, 3), coverage=0.5)
    assert counts(decisions([observed_tier(2.9, 3)] * CALM_S + [partial]))[-1] == 4


def test_calm_tier_orders_a_much_larger_need_once_it_has_lasted() -> None:
    made = decisions([observed_tier(2.9, 3)] * CALM_S + [heavier(6.5, 3)] * (CALM_S + 1))
    ordered = counts(made)[CALM_S:]
    assert ordered[: int(ORDER_DELAY_S)] == [3] * int(ORDER_DELAY_S)
    assert ordered[-1] == 7


@pytest.mark.parametrize("work", [1.9, 5.9])
def test_tier_that_shrank_in_calm_orders_at_once_for_returning_load(work: float) -> None:
    busy, shrunk = [observed_tier(5.9, 6)] * CALM_S, [observed_tier(0.9, 1)] * CALM_S
    made = decisions([*busy, *shrunk, observed_tier(work, 1)])
    assert counts(made)[-2:] == [1, math.ceil(work)]


@pytest.mark.parametrize("unknown", [NoDemand(90.0), Unavailable("no gateway reports")])
def test_tier_without_known_load_is_not_calm_afterwards(unknown: NoDemand | Unavailable) -> None:
    sizing = Unavailable("not sized")
    gap = observed_tier(2.9, 3, sizing=sizing)
    made = decisions([observed_tier(2.9, 3)] * CALM_S + [replace(gap, demand=unknown)] + [heavier(3.3, 3)])
    assert counts(made)[-1] == 4


def test_calm_tier_restores_a_count_that_was_lowered_by_hand() -> None:
    made = decisions([observed_tier(2.9, 3)] * CALM_S + [observed_tier(2.9, 1)])
    assert counts(made)[-1] == 3


def test_standby_by_own_growth_is_ordered_in_calm_once_it_has_lasted() -> None:
    calm = [observed_tier(2.9, 3)] * CALM_S
    grown = observed_tier(make_forecast(2.9, FREQUENT_GROWTH), 3)
    made = counts(decisions(calm + [grown] * (CALM_S + 1), miss_cost=5.0))
    assert made[CALM_S] == 3
    assert made[-1] > 3


@given(st.lists(st.integers(0, 12), min_size=1, max_size=150))
def test_lasting_replicas_are_the_least_of_the_delay(wanted: list[int]) -> None:
    marks: tuple[TimedReplicas, ...] = ()
    for at_s, replicas in enumerate(wanted):
        marks = update_wanted(marks, replicas, float(at_s))
    window = wanted[-int(ORDER_DELAY_S) - 1 :]
    assert lasting_replicas(marks, len(wanted) - 1.0) == (min(window) if len(window) > ORDER_DELAY_S else 0)


def test_calm_begins_anew_with_a_higher_rate_and_ends_with_misses() -> None:
    calm = update_calm(None, 10.0, 4, True, 0.0)
    assert calm == Calm(10.0, 0.0, 4)
    assert update_calm(calm, 10.4, 4, True, 50.0) == calm
    assert update_calm(calm, 5.0, 5, True, 50.0) == calm
    assert update_calm(calm, 10.6, 4, True, 50.0) == Calm(10.6, 50.0, 4)
    assert update_calm(calm, 10.0, 4, True, -1.0) == Calm(10.0, -1.0, 4), "the clock was set back"
    assert update_calm(calm, 10.0, 4, False, 50.0) is None


def test_fewer_replicas_are_calm_at_their_own_rate() -> None:
    assert update_calm(Calm(10.0, 0.0, 4), 5.0, 3, True, 50.0) == Calm(5.0, 0.0, 3)
    assert update_calm(Calm(10.0, 0.0, 4), 10.2, 3, True, 50.0) == Calm(10.0, 0.0, 3)


def test_tier_is_due_when_a_wanted_count_has_lasted() -> None:
    state = TierDecisionState(replicas=3, wanted=(TimedReplicas(3, 10.0), TimedReplicas(7, 41.5)))
    assert next_order_s(state, 100.0) == 41.5 + ORDER_DELAY_S
    assert next_order_s(state, 102.0) == math.inf
    serve = {"serve": TierSnapshot(3, 3, (), None)}
    decision = decisions([observed_tier(2.9, 3)])[-1]
    waiting = replace(decision, state=DecisionState(100.0, {"serve": state}))
    assert due_s(waiting, serve, "a", 101.0) == 41.5 + ORDER_DELAY_S


def test_few_misses_are_half_of_the_error_budget() -> None:
    assert has_few_misses(0.025, SLO)
    assert not has_few_misses(0.026, SLO)
    assert not has_few_misses(None, SLO)
    assert not has_few_misses(0.0, None)


@pytest.mark.parametrize(("need", "ordered", "carried"), [(3, 3, 3), (4, 3, 3), (5, 3, 5), (12, 10, 10), (13, 10, 13)])
def test_carried_need_is_within_the_error_of_the_model(need: int, ordered: int, carried: int) -> None:
    assert carried_need(need, ordered) == carried
