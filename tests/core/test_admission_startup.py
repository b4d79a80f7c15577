"""Requests that arrive while no engine is ready: queue time, announcement of the start, and release once it ends."""

from __future__ import annotations

import math

from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.request import AdmissionDecision, AdmissionOutcome
from tests.core.admission_fixtures import (
    gate,
    make_request,
    outcomes,
)


def test_scale_from_zero_queues_wakes_and_releases_paced() -> None:
    controller = gate(replicas=0, announcement=CapacityAnnouncement(20.0, 0.5))
    for k in range(300):
        assert controller.submit(make_request(f"r{k}", k * 0.01), k * 0.01).outcome is AdmissionOutcome.QUEUED
    controller.set_replicas({"a": controller.pool.cost_model.batch}, 20.0)
    let_in = [(20.0, d) for d in controller.release(20.0)]
    at_once, now = len(let_in), 20.0
    while controller.queued and now < 40:
        now = max(now + 1e-3, min(controller.wake_at_s, now + 0.1))
        let_in += [(now, d) for d in controller.release(now)]
    assert at_once < 60
    assert {d.outcome for t, d in let_in if t < 30} == {AdmissionOutcome.ADMITTED}
    assert (
        150 < sum(d.outcome is AdmissionOutcome.ADMITTED for _, d in let_in) < 250
    )  # what one replica holds; none has ended


def held_past_their_target(arrival_rate: float = 0.0) -> tuple[AdmissionController, list[AdmissionDecision]]:
    """A replica is ready 20 s after the first of 300 requests, and what it admits at once."""
    controller = gate(replicas=0, announcement=CapacityAnnouncement(20.0, 0.5, arrival_rate=arrival_rate))
    for k in range(300):
        controller.submit(make_request(f"held{k}", k * 0.01), k * 0.01)
    controller.set_replicas({"a": controller.pool.cost_model.batch}, 20.0)
    return controller, [d for d in controller.release(20.0) if d.outcome is AdmissionOutcome.ADMITTED]


def test_requests_past_their_target_leave_time_for_a_new_one() -> None:
    controller, admitted = held_past_their_target()
    assert admitted
    assert controller.submit(make_request("new", 20.0), 20.0).outcome is AdmissionOutcome.ADMITTED
    assert controller.queued > 200


def test_requests_held_past_their_target_go_on_as_prompts_end() -> None:
    controller, admitted = held_past_their_target()
    now = 20.0
    while now < 21.0:
        now = max(now + 1e-3, controller.wake_at_s)
        admitted += [d for d in controller.release(now) if d.outcome is AdmissionOutcome.ADMITTED]
    assert len(admitted) > 10


def test_requests_past_their_target_leave_the_share_of_new_ones() -> None:
    capacity = held_past_their_target()[0].pool.drain_rate
    running = []
    for share in (0.0, 0.5, 1.0):
        controller, _ = held_past_their_target(share * capacity)
        now = 20.0
        while now < 25.0:
            now = max(now + 1e-3, controller.wake_at_s)
            controller.release(now)
        running.append(len(controller.pool))
    none, half, all_of_it = running
    assert none > 1.5 * half > 3 * all_of_it > 0


def test_held_request_that_can_be_in_time_keeps_its_target() -> None:
    controller = gate(replicas=0, announcement=CapacityAnnouncement(0.2, 0.5))
    for k in range(300):
        assert controller.submit(make_request(f"held{k}"), 0.0).outcome is AdmissionOutcome.QUEUED
    controller.set_replicas({"a": controller.pool.cost_model.batch}, 0.2)
    decisions = controller.release(0.2)
    assert AdmissionOutcome.ADMITTED in outcomes(decisions)
    assert controller.wake_at_s < 0.5  # those that wait are shed when they would be late
    assert set(outcomes(controller.release(0.6))) == {AdmissionOutcome.SHED_SATURATED}
    assert not controller.queued


def test_startup_longer_than_hold_time_is_shed_at_once() -> None:
    controller = gate(replicas=0, announcement=CapacityAnnouncement(50.0, 0.5))
    decision = controller.submit(make_request("a"), 0.0)
    assert decision.outcome is AdmissionOutcome.SHED_STARTING
    assert decision.retry is not None
    assert decision.retry.retry_after_s in (51, 52)
    assert (
        gate(replicas=0, announcement=CapacityAnnouncement(starting=False)).submit(make_request("a"), 0.0).outcome
        is AdmissionOutcome.SHED_NO_CAPACITY
    )
    waits = gate(replicas=0)
    assert waits.submit(make_request("a"), 0.0).outcome is AdmissionOutcome.QUEUED
    assert outcomes(waits.release(31.0)) == [AdmissionOutcome.SHED_STARTING]


def test_startup_of_idle_service_is_announced_at_once() -> None:
    """The whole start-up time counts from the request that orders the start; SDKs must not retry into a long one."""
    for startup_s, outcome in ((20.0, AdmissionOutcome.QUEUED), (600.0, AdmissionOutcome.SHED_STARTING)):
        controller = gate(replicas=0, announcement=CapacityAnnouncement(None, 0.5, startup_s=startup_s))
        controller.tick(100.0, CapacityAnnouncement(None, 0.5, startup_s=startup_s))
        decision = controller.submit(make_request("a", 100.0), 100.0)
        assert decision.outcome is outcome
    assert decision.retry is not None
    assert decision.retry.eta_s is not None
    assert startup_s <= decision.retry.eta_s < startup_s + 5.0
    assert decision.retry.retry_after_s == math.ceil(decision.retry.eta_s)
    assert not decision.retry.retryable


def test_queue_end_while_starting_tells_when_to_return() -> None:
    controller = gate(replicas=0, announcement=CapacityAnnouncement(29.0, 0.5))
    assert controller.submit(make_request("a"), 0.0).outcome is AdmissionOutcome.QUEUED
    controller.tick(20.0, CapacityAnnouncement(50.0, 0.5))  # the start takes longer than was expected
    (late,) = controller.release(31.0)
    assert late.outcome is AdmissionOutcome.SHED_STARTING
    assert late.retry is not None
    assert late.retry.retryable
    assert late.retry.retry_after_s in (20, 21, 22)
