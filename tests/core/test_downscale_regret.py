"""Needs that came back: what is counted as one, what is learned of it, and how long a replica stays for it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core import codec
from plimsoll.core.autoscaling.decide import decide
from plimsoll.core.autoscaling.decision_state import (
    DecisionState,
    DownscaleRegret,
    TierDecisionState,
    TimedReplicas,
)
from plimsoll.core.autoscaling.downscale_regret import record_trials, return_probability
from plimsoll.core.autoscaling.observations import ServiceObservation
from plimsoll.core.autoscaling.scaling_decision import TierDecision
from plimsoll.core.autoscaling.scaling_policy import ScalingPolicy
from plimsoll.core.autoscaling.stabilize import stabilization_window_s
from plimsoll.core.demand.standby_value import MISS_COST
from plimsoll.core.types import Unavailable
from tests.core.scaling_fixtures import (
    HORIZON_S,
    NO_GROWTH,
    SLO,
    make_forecast,
    observed_tier,
    replica_bounds,
    step_message,
)

TICK_S = 2.0


class SimulatedTier:
    """A tier of many replicas that start in a start-up, under loads of so many replicas' work."""

    def __init__(self, state: TierDecisionState | None = None, least: int = 1, miss_cost: float = 0.0) -> None:
        self.state = DecisionState() if state is None else DecisionState(0.0, {"serve": state})
        self.policy = ScalingPolicy({"serve": replica_bounds(least, 30)}, SLO, miss_cost=miss_cost)
        self.now_s, self.ordered, self.ready_s = 0.0, 1, [0.0]
        self.downs: list[tuple[float, int]] = []
        self.last: TierDecision

    def play(self, work: float | Unavailable, seconds: float) -> SimulatedTier:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += TICK_S
            ready = sum(ready_s <= self.now_s for ready_s in self.ready_s)
            demand = work if isinstance(work, Unavailable) else make_forecast(work, NO_GROWTH)
            observed = observed_tier(demand, self.ordered, ready)
            found = decide(ServiceObservation({"serve": observed}, self.state), self.policy, self.now_s)
            self.last, self.state, count = found.tiers["serve"], found.state, found.tiers["serve"].replicas
            if count < self.ordered:
                self.downs.append((self.now_s, count))
            self.ready_s = [*self.ready_s, *[self.now_s + HORIZON_S] * (count - self.ordered)][:count]
            self.ordered = count
        return self

    def through(self, works: Iterable[tuple[float, float]]) -> SimulatedTier:
        for work, seconds in works:
            self.play(work, seconds)
        return self

    @property
    def regret(self) -> DownscaleRegret:
        return self.state.tiers["serve"].downscale_regret

    def seconds_to_scale_down(self) -> float:
        """From 10 replicas' load to 4 replicas', seconds until any goes."""
        self.play(9.5, 200.0)
        fell_s, before = self.now_s + TICK_S, len(self.downs)
        self.play(3.5, 200.0)
        return self.downs[before][0] - fell_s


def test_hold_time_without_history_follows_growth_odds() -> None:
    assert SimulatedTier().seconds_to_scale_down() == 0.0  # there are none


def test_regret_short_troughs_are_learned_and_bridged() -> None:
    sawtooth = SimulatedTier().through([(9.5, 120.0), (3.5, 40.0)] * 12)
    assert sawtooth.regret.needed_again > 0.9 * sawtooth.regret.trials > 20.0
    first, *later = sawtooth.downs
    assert first[0] == 120.0 + TICK_S, "nothing was known then"
    assert all(at_s < 600.0 for at_s, _ in later), "troughs of 40 s are still not bridged by a start-up of 60"
    assert sawtooth.seconds_to_scale_down() > 0.9 * HORIZON_S


def test_regret_long_trough_is_bridged_if_misses_cost_more() -> None:
    """Held for a start-up and given back then, replicas were paid for in full and not there when they were needed."""
    free, dear = (SimulatedTier(miss_cost=cost).through([(9.5, 120.0), (3.5, 90.0)] * 12) for cost in (0.0, MISS_COST))
    assert (dear.regret.needed_again, dear.regret.trials) == pytest.approx(
        (free.regret.needed_again, free.regret.trials), rel=0.1
    )
    assert len(free.downs) >= 12, "a start is all that a return costs where a miss costs nothing"
    assert all(at_s < 600.0 for at_s, _ in dear.downs), "troughs of 90 s are still not bridged"
    assert dear.seconds_to_scale_down() == pytest.approx(2.0 * HORIZON_S, abs=TICK_S)


def test_regret_miss_cost_without_returns_holds_nothing() -> None:
    """A leap that was not seen is what the reserve is for."""
    dear = SimulatedTier(miss_cost=MISS_COST).through([(9.5, 150.0), (3.5, 130.0)] * 10)
    assert (dear.regret.needed_again, dear.seconds_to_scale_down()) == (0.0, 0.0)


@pytest.mark.parametrize("trough_s", [130.0, 400.0])
def test_regret_troughs_over_two_startups_are_ignored(trough_s: float) -> None:
    played = SimulatedTier().through([(9.5, 150.0), (3.5, trough_s)] * 10)
    assert (played.regret.needed_again, played.seconds_to_scale_down()) == (0.0, 0.0)


@pytest.mark.parametrize("stairs", [(2.0, 4.0, 6.0, 8.0, 10.0), (10.0, 8.0, 6.0, 4.0, 2.0)])
def test_regret_stepwise_load_counts_no_return(stairs: tuple[float, ...]) -> None:
    played = SimulatedTier().through((rate, 200.0) for rate in stairs)
    assert (played.regret.needed_again, played.seconds_to_scale_down()) == (0.0, 0.0)


def test_regret_unused_overshoot_counts_no_return() -> None:
    """A leap reads high at first; what it ordered too many goes before it has served, and the next step needs it."""
    climb: list[tuple[float, float]] = []
    for rate in (2.0, 4.0, 6.0, 8.0):
        climb += [(1.4 * rate, 10.0), (rate, 90.0)]
    played = SimulatedTier().through(climb)
    assert len(played.downs) > 2
    assert (played.regret.needed_again, played.seconds_to_scale_down()) == (0.0, 0.0)


def test_regret_partial_return_counts_in_part() -> None:
    part = SimulatedTier().through([(9.5, 120.0), (3.5, 40.0), (6.5, 200.0)]).regret
    assert (part.trials, part.needed_again) == pytest.approx((6.0, 3.0), rel=0.05)  # 5, 6 and 7 of 5 to 10; faded once
    beyond = SimulatedTier().through([(4.5, 120.0), (2.5, 40.0), (20.5, 30.0)]).regret
    assert (beyond.trials, beyond.needed_again) == (2.0, 2.0)


def test_regret_is_counted_for_removed_and_retained_replicas() -> None:
    eager = DownscaleRegret(trials=20.0, needed_again=20.0)
    went = SimulatedTier().through([(9.5, 120.0), (3.5, 40.0), (9.5, 10.0)])
    stayed = SimulatedTier(TierDecisionState(downscale_regret=eager)).through([(9.5, 120.0), (3.5, 40.0), (9.5, 10.0)])
    assert (went.regret.trials, len(went.downs), len(stayed.downs)) == (6.0, 1, 0)
    assert stayed.regret.trials == pytest.approx(20.0 * 31 / 32 + 6.0)


def test_regret_old_history_decays() -> None:
    played = SimulatedTier().through([(9.5, 120.0), (3.5, 40.0)] * 12)
    learned = stabilization_window_s(played.regret, HORIZON_S, 0.0, 0.0)
    for _ in range(5):
        played.through([(9.5, 150.0), (3.5, 400.0)])
    halfway = stabilization_window_s(played.regret, HORIZON_S, 0.0, 0.0)
    played.through([(9.5, 150.0), (3.5, 400.0)] * 60)
    assert learned > 0.9 * HORIZON_S > 0.8 * HORIZON_S > halfway
    assert stabilization_window_s(played.regret, HORIZON_S, 0.0, 0.0) < 0.15 * halfway


def test_regret_unavailable_demand_ends_trial() -> None:
    lost = SimulatedTier().through([(9.5, 120.0), (3.5, 20.0)])
    assert lost.regret.idle
    assert lost.play(Unavailable("silent"), 10.0).play(9.5, 20.0).regret.trials == 0.0


def test_regret_replicas_kept_by_minimum_are_no_trial() -> None:
    assert SimulatedTier(least=10).through([(9.5, 120.0), (3.5, 40.0)] * 5).regret.trials == 0.0


def test_regret_replicas_kept_by_limit_are_one_trial() -> None:
    known = DownscaleRegret(served=5)
    for second in range(1000):
        known = record_trials(known, 5, 5, 2, 2, 1, HORIZON_S, float(second))
    assert (known.trials, known.needed_again, known.served, known.idle) == (3.0, 0.0, 2, ())


def test_regret_clock_set_back_keeps_trial() -> None:
    known = record_trials(DownscaleRegret(served=5), 5, 5, 2, 2, 1, HORIZON_S, 1e9)
    known = record_trials(known, 5, 5, 5, 5, 1, HORIZON_S, 0.0)
    assert (known.trials, known.needed_again) == (3.0, 3.0)


def test_regret_explains_retained_replica() -> None:
    played = SimulatedTier().through([(9.5, 120.0), (3.5, 40.0)] * 8).play(9.5, 60.0).play(3.5, 10.0)
    why = step_message(played.last, "stabilization").reason
    known = played.regret
    assert why.startswith("9 would be enough; scale down in 5")
    assert why.endswith(
        f"({known.needed_again:.0f} of {known.trials:.0f} idle replicas were needed again within 120 s)"
    )
    assert (
        "were idle" not in step_message(SimulatedTier().play(9.5, 120.0).play(3.5, TICK_S).last, "stabilization").reason
    )


shares = st.floats(0.0, 1.0)
amounts = st.floats(0.0, 1e3)


@given(shares, amounts, amounts, amounts)
def test_regret_chance_and_hold_time_are_monotone(prior: float, again: float, more: float, others: float) -> None:
    known = DownscaleRegret(trials=again + others, needed_again=again)
    more_often = DownscaleRegret(trials=again + more + others, needed_again=again + more)
    assert prior <= return_probability(known, prior) <= 1.0
    for missed in (0.0, MISS_COST):
        longer, shorter = (stabilization_window_s(one, HORIZON_S, prior, missed) for one in (more_often, known))
        assert 2.0 * HORIZON_S >= longer >= shorter * (1.0 - 1e-12)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12), st.integers(0, 3), st.floats(0.0, 90.0)), max_size=60)
)
def test_regret_any_sequence_stays_valid_and_round_trips(
    looks: list[tuple[int, int, int, float]],
) -> None:
    known, now_s = DownscaleRegret(), 0.0
    for before, need, above, passed_s in looks:
        now_s += passed_s
        known = record_trials(known, before, before, need, need + above, 1, HORIZON_S, now_s)
        assert 0.0 <= known.needed_again <= known.trials < 12 * 33
        assert known.served <= 12
        assert len(known.idle) != 1
        levels, since = [mark.replicas for mark in known.idle], [mark.since_s for mark in known.idle]
        assert levels == sorted(set(levels), reverse=True)
        assert since[1:] == sorted(since[1:])
    state = DecisionState(1.0, {"serve": TierDecisionState(downscale_regret=known)})
    assert codec.decode(DecisionState, json.loads(json.dumps(codec.encode(state)))) == state


def test_load_decision_state_without_regret_is_accepted() -> None:
    state = DecisionState(
        1.0, {"serve": TierDecisionState((TimedReplicas(2, 1.0),), downscale_regret=DownscaleRegret((), 3, 2.0, 1.0))}
    )
    old = codec.encode(state)
    del old["tiers"]["serve"]["returns"]
    assert codec.decode(DecisionState, old).tiers["serve"] == TierDecisionState((TimedReplicas(2, 1.0),))


@pytest.mark.parametrize(
    "bad", [7, [], [[], 1, 1.0, 2.0], [[], -1, 1.0, 1.0], [[], 1, math.nan, 0.0], [[[1]], 1, 1.0, 1.0]]
)
def test_load_decision_state_invalid_regret_raises(bad: Any) -> None:
    stored = codec.encode(DecisionState(1.0, {"serve": TierDecisionState()}))
    stored["tiers"]["serve"]["returns"] = bad
    with pytest.raises(ValueError, match="scaling state"):
        codec.decode(DecisionState, stored)
