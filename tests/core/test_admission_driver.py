"""What the gateway and the simulator do around the admission controller of a service."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from plimsoll.core.admission.admission_driver import AdmissionDriver, usable_replicas
from plimsoll.core.admission.cost_model import engine_cost_model
from plimsoll.core.admission.publication import AdmissionLimits
from plimsoll.core.admission.request import MAX_QUEUE_S, AdmissionOutcome, AdmissionRequest
from plimsoll.core.routing.endpoint import Endpoint, EndpointLoad
from plimsoll.core.types import Role
from tests.core.admission_fixtures import ONE_CLASS, SERVE, make_request

LIMITS = AdmissionLimits(("chat",), replace(engine_cost_model(SERVE, ONE_CLASS), batch=1))


@dataclass
class Sent:
    """A request at an engine."""

    request: AdmissionRequest
    address: str
    registered_late: bool = False


def driver(max_queued: int = 10, max_queue_time_s: float = 300.0) -> AdmissionDriver[AdmissionRequest, Sent]:
    return AdmissionDriver(
        "gateway-0",
        (replace(ONE_CLASS[0], max_queue_time_s=max_queue_time_s),),
        {},
        LIMITS,
        max_queued,
        0.0,
        queued_request=lambda request: request,
        sent_request=lambda sent: sent.request,
    )


def test_full_queue_rejects_and_keeps_the_queued() -> None:
    admission = driver(max_queued=1)
    assert admission.submit(make_request("a"), 0.0).outcome is AdmissionOutcome.QUEUED
    assert admission.submit(make_request("b"), 0.0).outcome is AdmissionOutcome.SHED_STARTING
    assert list(admission.queued) == ["a"]
    assert admission.controller.queued == 1


def test_gateway_without_memory_queues_nothing() -> None:
    admission = driver()
    assert admission.submit(make_request("a"), 0.0, lambda _: False).outcome is AdmissionOutcome.SHED_STARTING
    assert (admission.queued, admission.controller.queued) == ({}, 0)


def test_request_leaves_the_queue_at_the_upper_bound() -> None:
    admission = driver()
    admission.submit(make_request("a"), 0.0)
    admission.tick(MAX_QUEUE_S - 1.0, 0.0)
    assert admission.release(MAX_QUEUE_S - 1.0) == []
    admission.tick(MAX_QUEUE_S, 0.0)
    ((request, decision),) = admission.release(MAX_QUEUE_S)
    assert (request.id, decision.outcome, admission.queued) == ("a", AdmissionOutcome.SHED_STARTING, {})


def test_request_registered_late_updates_no_margin() -> None:
    admission, sent = driver(), Sent(make_request("a"), "0")
    admission.set_replicas({"0": 1}, frozenset(), [sent], 0.0)
    assert sent.registered_late
    margin_s = admission.controller._margins[0].margin_s
    admission.on_first_token("a", sent, 9.0, 9.0)
    admission.on_end("a", sent, 100, 9.0, 10.0)
    assert admission.controller._margins[0].margin_s == margin_s
    assert admission.controller.pool.replicas["0"].sequences == 0


def test_limits_without_cost_model_are_invalid() -> None:
    with pytest.raises(ValueError, match="no cost model"):
        driver().update_limits(AdmissionLimits(("chat",)), 0.0, 0.0)


def endpoint(name: str, role: Role = Role.DECODE, revision: str = "1") -> Endpoint:
    return Endpoint(name, name, role, revision, True, routable=role is not Role.PREFILL)


def test_requests_from_elsewhere_take_slots() -> None:
    slots, _ = usable_replicas([endpoint("a"), endpoint("b")], {}, 4, {"a": 1, "b": 9}.__getitem__)
    assert slots == {"a": 3, "b": 0}


@pytest.mark.parametrize(("suspects", "expected"), [("a", {"a": 0, "b": 4}), ("ab", {"a": 4, "b": 4})])
def test_suspect_replica_has_no_slots_unless_all_are(suspects: str, expected: dict[str, int]) -> None:
    loads = {name: EndpointLoad(suspect=True) for name in suspects}
    assert usable_replicas([endpoint("a"), endpoint("b")], loads, 4)[0] == expected


def test_prefill_replica_needs_a_decode_replica_of_its_revision() -> None:
    endpoints = [endpoint("d"), endpoint("p", Role.PREFILL), endpoint("q", Role.PREFILL, "2")]
    assert usable_replicas(endpoints, {}, 4)[1] == {"p"}
