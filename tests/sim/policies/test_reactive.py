"""Followers: what they know, what they order, and the cap that may stand in for the operator's admission."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.sim.attempt import AttemptOutcome, TraceRequest
from plimsoll.sim.errors import BadInput
from plimsoll.sim.policies import registry
from plimsoll.sim.policies.base import Observation, PolicyContext
from plimsoll.sim.policies.reactive import ReplicaOrders, StatedRates, TrailingWindow, concurrency_cap
from plimsoll.sim.request_cost import RequestCostModel
from tests.sim import sim_harness

SERVE = PolicyContext({Role.SERVE: (1, 4)}, sim_harness.make_plant(), Slo(0.95, 2.0, tpot_s=0.05))
BOTH = PolicyContext({Role.PREFILL: (1, 9), Role.DECODE: (1, 9)}, sim_harness.make_plant())


def _replicas_per_second(word: str, rate: Callable[[int], int], seconds: int) -> list[int]:
    """What a follower orders at each second of a load."""
    follower = registry.parse(word, SERVE)
    desired = []
    for second in range(seconds):
        for n in range(rate(second)):
            at_s = second + n / rate(second)
            follower.on_arrival(TraceRequest(at_s, 1200, 200), at_s)
        desired.append(follower.desired_replicas(Observation(second + 1.0, {Role.SERVE: 1}))[Role.SERVE])
    return desired


def test_reactive_policy_tracks_load_and_holds() -> None:
    desired = _replicas_per_second("follower:margin=0.5,hold=30,window=10", lambda s: 20 if 50 <= s < 100 else 2, 200)
    assert desired[40] == 1
    assert max(desired) > 1
    first, last = desired.index(max(desired)), len(desired) - desired[::-1].index(max(desired))
    assert 50 <= first <= 65
    assert 125 <= last <= 150
    assert desired[-1] == 1


def test_reactive_policy_ignores_tokens_not_yet_generated() -> None:
    one, work = TraceRequest(0.0, 1000, 500), RequestCostModel(SERVE.plant, SERVE.bounds)
    follower = registry.parse("follower:margin=0.0001,window=1000,hold=0", SERVE)
    follower.on_arrival(one, 0.0)
    written_s = work.decode_s(Role.SERVE, one)
    assert follower.desired_replicas(Observation(written_s - 0.01, {}))[Role.SERVE] == 1
    assert follower.desired_replicas(Observation(written_s + 0.01, {}))[Role.SERVE] == 4


def test_window_trend_is_extrapolated_over_startup() -> None:
    window = TrailingWindow(60.0, 20.0)
    for n in range(4000):  # 2 t dt of work arrives at t
        at_s = (n + 0.5) * 0.05
        window.add(at_s, 2.0 * at_s * 0.05)
    assert window.rate(50.0) == pytest.approx(50.0, rel=0.01)  # not full: the mean so far
    assert window.rate(150.0) == pytest.approx(2.0 * (150.0 + 20.0), rel=0.01)


def test_window_falling_trend_is_floored_at_zero() -> None:
    window = TrailingWindow(10.0, 1000.0)
    for second in range(10):
        window.add(float(second) + 0.5, 10.0 - second)
    assert window.rate(10.0) == 0.0


def test_window_without_trend_is_the_mean_rate() -> None:
    window = TrailingWindow(10.0)
    for second in range(100):
        window.add(second + 0.5, 3.0 if second < 50 else 5.0)
    assert window.rate(50.0) == pytest.approx(3.0)
    assert window.rate(55.0) == pytest.approx(4.0)
    assert window.rate(100.0) == pytest.approx(5.0)


def test_stated_rates_apply_at_or_ahead_of_their_time() -> None:
    steps = [(0.0, 6.0), (600.0, 36.0), (1200.0, 6.0)]
    now, ahead = StatedRates(steps, 0.0, 0.5), StatedRates(steps, 60.0, 0.5)
    assert [now.rate(at_s) for at_s in (0.0, 599.0, 600.0, 1200.0)] == [3.0, 3.0, 18.0, 3.0]
    assert [ahead.rate(at_s) for at_s in (539.0, 540.0, 1199.0, 1200.0)] == [3.0, 18.0, 18.0, 3.0]


def test_orders_take_largest_need_of_hold_within_bounds() -> None:
    orders = ReplicaOrders(0.5, 1, 10.0, (2, 5))
    needs = [(0.0, 0.0), (1.0, 1.0), (2.0, 0.6), (11.0, 0.6), (12.0, 0.0), (30.0, 0.0), (31.0, 9.0)]
    assert [orders.replicas_for(rate, now_s) for now_s, rate in needs] == [2, 3, 3, 3, 3, 2, 5]


def test_reactive_policy_tiers_have_own_settings() -> None:
    follower = registry.parse("follower:margin=0.00001/1000,hold=0,spare=0/2", BOTH)
    follower.on_arrival(TraceRequest(0.0, 1000, 100), 0.0)
    assert follower.desired_replicas(Observation(50.0, {})) == {Role.PREFILL: 9, Role.DECODE: 3}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("follower:margin=0.5/0.6", "margin is one value"),
        ("follower:cap=4,gated=1", "not both"),
        ("follower:cap=x", "cap is a whole number"),
        ("follower:ahead=60", "goes with rates"),
        ("follower:rates=0@6,window=30", "window would do nothing"),
        ("follower:rates=0@6,trend=1,window=30/30", "window, trend would do nothing"),
        ("follower:rates=0@6", "there is none"),
        ("follower:trend=2", "trend is 0 or 1"),
    ],
)
def test_reactive_policy_invalid_options_are_rejected(word: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        registry.parse(word, SERVE)


@pytest.mark.parametrize("rates", ["6", "0@6;600", "5@6", "0@6;600@36;300@6", "0@-1", "0@inf", "0@x", "0@1;0@2"])
def test_reactive_policy_malformed_rates_are_rejected(rates: str) -> None:
    with pytest.raises(BadInput, match="rates are like"):
        registry.parse(f"follower:rates={rates}", replace(SERVE, requests=[TraceRequest(0.0, 100, 100)]))


def test_reactive_policy_rates_use_mean_work_of_trace() -> None:
    requests = [TraceRequest(0.0, 1000, 100), TraceRequest(1.0, 3000, 300)]
    each_s = sum(RequestCostModel(SERVE.plant, SERVE.bounds).cost_s(Role.SERVE, one) for one in requests) / 2
    scene = replace(SERVE, requests=requests)
    rate = 2.5 / each_s
    follower = registry.parse(f"follower:rates=0@{rate:.6f},margin=1,hold=0", scene)
    assert follower.desired_replicas(Observation(0.0, {}))[Role.SERVE] == 3


# -------------------------------------------------------------------- the cap


def _max_concurrency(done: sim_harness.FinishedRun) -> int:
    """The most requests that one engine had at once."""
    events: dict[str, list[tuple[float, int]]] = {}
    for attempt in done.attempts:
        if attempt.admitted_s is not None and attempt.end_s is not None:
            events.setdefault(attempt.address, []).extend([(attempt.admitted_s, 1), (attempt.end_s, -1)])
    most = 0
    for each in events.values():
        there = 0
        for _, change in sorted(each):
            there += change
            most = max(most, there)
    return most


def test_concurrency_cap_bounds_engines_and_rejects_long_waits() -> None:
    requests = sim_harness.PoissonLoad(600, 12.0, seed=4).requests_drawn()
    done = sim_harness.simulate(requests, registry.parse("follower:margin=9,cap=6", SERVE))
    assert _max_concurrency(done) == 6
    patience_s = concurrency_cap(6, SERVE).patience_s
    shed = [attempt for attempt in done.attempts if attempt.outcome is AttemptOutcome.SHED]
    assert 50 < len(shed) < 550
    for attempt in shed:
        assert attempt.reason == "overloaded"
        assert (attempt.end_s or 0.0) - attempt.trace_request.at_s == pytest.approx(patience_s(attempt.trace_request))
    sent = sorted((v for v in done.attempts if v.admitted_s is not None), key=lambda v: (v.admitted_s, v.id))
    assert [v.id for v in sent] == sorted(v.id for v in sent)  # first come, first served
    assert all((v.admitted_s or 0.0) - v.trace_request.at_s <= patience_s(v.trace_request) for v in sent)
    assert done.world.operator is None
    assert not any(gateway.queued for gateway in done.world.gateways)


def test_concurrency_cap_of_several_gateways_is_one_queue() -> None:
    trace_requests = sim_harness.PoissonLoad(600, 12.0, seed=4).requests_drawn()
    alone, shared = (
        sim_harness.simulate(trace_requests, registry.parse("follower:margin=9,cap=7", SERVE), gateways=gateways)
        for gateways in (1, 3)
    )
    assert _max_concurrency(shared) == 7
    assert [(one.id, one.end_s) for one in shared.attempts] == [(one.id, one.end_s) for one in alone.attempts]


def test_concurrency_cap_never_reached_changes_nothing() -> None:
    requests = sim_harness.PoissonLoad(300, 2.0, seed=5).requests_drawn()
    ends = [
        [
            (attempt.id, attempt.end_s)
            for attempt in sim_harness.simulate(requests, registry.parse(word, SERVE)).attempts
        ]
        for word in ("follower:gated=0", "follower:cap=200")
    ]
    assert ends[0] == ends[1]


def test_concurrency_cap_random_values_lose_no_request() -> None:
    random = Random(7)
    for _ in range(5):
        requests = sim_harness.PoissonLoad(200, random.uniform(2.0, 30.0), seed=random.randrange(99)).requests_drawn()
        word = f"follower:cap={random.randrange(3, 30)},margin={random.uniform(0.3, 2.0):.2f},hold=5,window=10"
        done = sim_harness.simulate(requests, registry.parse(word, SERVE), gateways=random.randrange(1, 4))
        assert sorted(attempt.id for attempt in done.attempts) == list(range(1, 201))
        assert {attempt.outcome for attempt in done.attempts} <= {AttemptOutcome.OK, AttemptOutcome.SHED}
