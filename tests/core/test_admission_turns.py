"""Thousands of queued requests change at once, and no call of the controller works on more than a bounded number."""

from __future__ import annotations

import heapq
from random import Random

import pytest

from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.controller import RENEWALS_PER_DECISION, AdmissionController
from plimsoll.core.admission.request import AdmissionDecision, AdmissionOutcome
from plimsoll.core.admission.retry_reservations import RetryReservations
from tests.core.admission_fixtures import outcomes
from tests.core.admission_invariants import NUMBERS, check, gate, make_request

LIMIT = 8  # decisions in one call of `release`
HELD = 2_000
ADMITTED, QUEUED = AdmissionOutcome.ADMITTED, AdmissionOutcome.QUEUED


def held_gate(held: int = HELD, adapter: str = "") -> AdmissionController:
    """A controller without engines that holds requests of five tenants, the last of which arrived at 1.0."""
    controller = gate(0)
    for k in range(held):
        arrived_s = k / held
        request = make_request(f"h{k}", arrived_s, tenant=f"t{k % 5}", prompt_tokens=100 + k % 7, adapter=adapter)
        assert controller.submit(request, arrived_s).outcome is QUEUED
    return controller


def take_all(controller: AdmissionController, now: float, limit: int = LIMIT) -> list[AdmissionDecision]:
    """The decisions of all turns that the controller asks for at `now`."""
    decisions = controller.release(now, limit)
    while controller.wake_at_s <= now:
        decisions += controller.release(now, limit)
    return decisions


class CallCount:
    """Counts the calls of a function in each turn."""

    def __init__(self, controller: AdmissionController, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.count = 0
        self._call = getattr(controller.pool, name)
        monkeypatch.setattr(controller.pool, name, self)

    def __call__(self, *args: object) -> object:
        self.count += 1
        return self._call(*args)

    def take(self) -> int:
        count, self.count = self.count, 0
        return count


def test_first_engine_renews_a_bounded_number_per_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = held_gate()
    costs = CallCount(controller, monkeypatch, "estimate_cost")
    controller.set_replicas({"a": NUMBERS.batch}, 1.0)
    turns = [costs.take()]
    decisions: list[AdmissionDecision] = []
    while not decisions:
        decisions = controller.release(1.0, LIMIT)
        turns.append(costs.take())
        assert controller.wake_at_s == 1.0, "the next turn comes at once"
    assert max(turns) <= RENEWALS_PER_DECISION * LIMIT
    assert sum(turns) == HELD
    check(controller)


def test_prefills_renew_a_bounded_number_per_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = held_gate()
    controller.set_replicas({"a": 1}, 1.0)
    take_all(controller, 1.0)
    queued, costs = controller.queued, CallCount(controller, monkeypatch, "estimate_cost")
    controller.set_replicas({"a": 1}, 1.0, frozenset({"p"}))
    turns = [costs.take()]
    while sum(turns) < queued:
        controller.release(1.0, LIMIT)
        turns.append(costs.take())
    assert max(turns) <= RENEWALS_PER_DECISION * LIMIT


def test_parking_takes_a_bounded_number_per_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine has no room for the adapter that all wait for, and the other has not loaded it."""
    controller = held_gate(200, adapter="a")
    controller.pool.adapters.configure(1, {"a": {"loaded-never"}})
    controller.set_replicas({"full": 0, "loaded-never": NUMBERS.batch}, 1.0)
    places = CallCount(controller, monkeypatch, "place")
    turns = []
    for _ in range(200):
        controller.release(1.0, LIMIT)
        turns.append(places.take())
    assert max(turns) <= LIMIT + 1
    assert sum(turns) >= 200
    assert controller.wake_at_s > 1.0, "it waits for an event when all are parked"


def test_adapters_with_a_place_take_no_more_than_the_limit() -> None:
    controller, adapters = gate(0), [f"a{k}" for k in range(12)]
    for k in range(240):
        request = make_request(f"h{k}", k / 240, prompt_tokens=10, adapter=adapters[k % 12])
        assert controller.submit(request, k / 240).outcome is QUEUED
    controller.pool.adapters.configure(20, {key: {"loaded-never"} for key in adapters})
    controller.set_replicas({"full": 0, "loaded-never": NUMBERS.batch}, 1.0)
    assert take_all(controller, 1.0) == [], "all are parked"
    controller.pool.adapters.configure(20, {})
    assert len(controller.release(1.0, LIMIT)) == LIMIT
    assert controller.wake_at_s == 1.0, "the others follow in the next turn"
    assert controller.release(1.0, LIMIT) != []


@pytest.mark.parametrize("limit", [1, 2, LIMIT])
def test_turns_end_when_no_engine_has_room(limit: int) -> None:
    controller = held_gate(20)
    controller.set_replicas({"full": 0}, 1.0)
    for _ in range(20):
        assert controller.release(1.0, limit) == []
    assert controller.wake_at_s > 1.0


@pytest.mark.parametrize("now", [1.0, 1.3, 2.0])  # none, some and all of them are late
def test_turns_decide_as_one_call_does(now: float) -> None:
    whole, in_turns = held_gate(), held_gate()
    for controller in (whole, in_turns):
        controller.set_replicas({"a": NUMBERS.batch, "b": 3}, now)
    expected = take_all(whole, now, limit=1 << 31)
    assert ADMITTED in outcomes(expected)
    assert take_all(in_turns, now) == expected


def test_new_request_waits_while_others_are_renewed() -> None:
    controller = held_gate()
    controller.set_replicas({"a": NUMBERS.batch}, 10.0)  # all are late: new requests go first
    assert controller.release(10.0, LIMIT) == []
    assert controller.submit(make_request("new", 10.0), 10.0).outcome is QUEUED
    first = take_all(controller, 10.0)[0]
    assert (first.request_id, first.outcome) == ("new", ADMITTED)
    check(controller)


@pytest.mark.parametrize("seed", range(20))
def test_engines_that_change_between_turns_lose_nothing(seed: int) -> None:
    random, controller, now = Random(seed), held_gate(500), 1.0
    controller.tick(now, CapacityAnnouncement(ready_at_s=60.0, spare_rate=1.0))
    waiting = {f"h{k}" for k in range(500)}
    decided: list[str] = []
    for turn in range(300):
        now += random.choice((0.0, 0.001, 0.05))
        if random.random() < 0.1:
            engines = {str(k): random.choice((0, 1, NUMBERS.batch)) for k in range(random.randrange(3))}
            controller.set_replicas(engines, now, frozenset(random.choice(("", "p"))))
        if random.random() < 0.2 and controller.submit(make_request(f"n{turn}", now), now).outcome is QUEUED:
            waiting.add(f"n{turn}")
        if waiting and random.random() < 0.1:
            gone = random.choice(sorted(waiting))
            assert controller.cancel(gone, now) is not None
            waiting.discard(gone)
        for decision in controller.release(now, LIMIT):
            decided.append(decision.request_id)
            waiting.remove(decision.request_id)  # each once, and none that was cancelled
        assert controller.queued == len(waiting)
        check(controller)
    controller.set_replicas({}, now)
    decided += [decision.request_id for decision in take_all(controller, now + 100.0)]
    assert controller.queued == 0
    assert len(set(decided)) == len(decided)


def test_expired_reservations_leave_without_a_rebuild(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rebuild of the heap takes milliseconds with 10,000 reservations."""
    reservations = RetryReservations()
    rebuilds: list[object] = []
    for k in range(1000):
        reservations.reserve(make_request(f"r{k}", body_hash=k + 1), 1.0, 0.0, 0.0)
    monkeypatch.setattr(heapq, "heapify", rebuilds.append)
    reservations.expire(1e6)
    assert (len(reservations), reservations.work_s, rebuilds) == (0, 0.0, [])
