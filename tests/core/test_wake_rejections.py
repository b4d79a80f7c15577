"""A request that waits for the first engine is rejected with the time once that is later than its class may wait."""

from __future__ import annotations

import math

import pytest

from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.request import AdmissionOutcome
from tests.core.admission_fixtures import gate, make_request

MAX_QUEUE_S = 30.0  # of the gate's class


def test_start_beyond_wait_is_told_when_it_is_known() -> None:
    """The first request comes before anything is known of the start that it orders."""
    controller = gate(replicas=0)
    assert controller.submit(make_request("a"), 0.0).outcome is AdmissionOutcome.QUEUED
    controller.tick(2.0, CapacityAnnouncement(600.0, 0.5))
    (told,) = controller.release(2.0)
    assert told.outcome is AdmissionOutcome.SHED_STARTING
    assert told.retry is not None
    assert told.retry.retry_after_s == math.ceil(told.retry.eta_s or 0) >= 598
    assert not told.retry.retryable
    assert controller.release(3.0) == []


@pytest.mark.parametrize("ready_at_s", [None, 1.0, 29.0, MAX_QUEUE_S])
def test_start_within_wait_keeps_request_queued(ready_at_s: float | None) -> None:
    controller = gate(replicas=0)
    assert controller.submit(make_request("a"), 0.0).outcome is AdmissionOutcome.QUEUED
    controller.tick(2.0, CapacityAnnouncement(ready_at_s, 0.5))
    assert controller.release(2.0) == []


def test_ready_replica_serves_despite_later_ones() -> None:
    controller = gate(replicas=0)
    controller.submit(make_request("a"), 0.0)
    controller.tick(2.0, CapacityAnnouncement(20.0, 0.5))
    controller.set_replicas({"new": 8}, 3.0)
    controller.tick(3.0, CapacityAnnouncement(600.0, 0.5))
    assert [one.outcome for one in controller.release(3.0)] == [AdmissionOutcome.ADMITTED]


@pytest.mark.parametrize(
    "announcement", [CapacityAnnouncement(600.0, 0.0), CapacityAnnouncement(None, 0.0, startup_s=600.0)]
)
def test_known_start_without_spare_capacity_has_retry_after(announcement: CapacityAnnouncement) -> None:
    """New arrivals take all that the replica will carry: nothing can be reserved, but its time is known."""
    controller = gate(replicas=0, announcement=announcement)
    controller.tick(0.0, announcement)
    told = controller.submit(make_request("a"), 0.0)
    assert told.outcome is AdmissionOutcome.SHED_STARTING
    assert told.retry == (600.0, 600, False)


def test_overdue_start_tells_no_time() -> None:
    """SDKs must not return each second to a start that is late by an unknown time."""
    announcement = CapacityAnnouncement(600.0, 0.0)
    controller = gate(replicas=0, announcement=announcement)
    controller.tick(0.0, announcement)
    told = controller.reject(make_request("a"), 605.0)
    assert told.outcome is AdmissionOutcome.SHED_STARTING
    assert told.retry is None or not told.retry.retryable


@pytest.mark.parametrize("spare_rate", [0.0, 0.5, 10.0])
@pytest.mark.parametrize("ready_s", [31.0, 60.0, 119.0, 119.99, 120.0, 120.01, 3000.0])
def test_each_known_start_has_retry_after(ready_s: float, spare_rate: float) -> None:
    """Also if the capacity is there within the two minutes of a reservation, and the request is served after them."""
    announcement = CapacityAnnouncement(None, spare_rate, startup_s=ready_s)
    controller = gate(replicas=0, announcement=announcement)
    controller.tick(0.0, announcement)
    rejected = controller.submit(make_request("a"), 0.0)
    assert rejected.outcome is AdmissionOutcome.SHED_STARTING
    assert rejected.retry is not None
    assert rejected.retry.retry_after_s is not None
    assert rejected.retry.retry_after_s >= min(60, ready_s)
