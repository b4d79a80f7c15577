"""In-flight counts: by tickets, corrected by Envoy's own."""

from __future__ import annotations

from plimsoll.core.routing.endpoint import Endpoint
from plimsoll.core.routing.picker import Pick
from plimsoll.core.types import Role
from plimsoll.gateway.inflight import MAX_REQUEST_AGE_SECONDS, SUSPECT_SECONDS, InFlightTracker

A = Endpoint("a", "pod-a", Role.DECODE, "r", ready=True, routable=True)
B = Endpoint("b", "pod-b", Role.DECODE, "r", ready=True, routable=True)
P = Endpoint("p", "pod-p", Role.PREFILL, "r", ready=True)


def inflight_count(inflight: InFlightTracker, address: str) -> int:
    return inflight.loads[address].inflight


def begin(inflight: InFlightTracker, pick: Pick, now: float) -> str:
    ticket = inflight.new_request_id()
    inflight.begin("s", pick, ticket, now)
    return ticket


def test_request_counts_at_both_endpoints_until_record() -> None:
    inflight = InFlightTracker()
    ticket = begin(inflight, Pick(A, (), P), 0.0)
    assert (inflight_count(inflight, "a"), inflight_count(inflight, "p")) == (1, 1)
    flight = inflight.complete(ticket, "a", 1.0)
    assert flight is not None
    assert flight.service == "s"
    assert (inflight_count(inflight, "a"), inflight_count(inflight, "p")) == (0, 0)
    assert inflight.complete(ticket, "a", 1.0) is None
    assert inflight_count(inflight, "a") == 0


def test_last_pick_increases_with_every_pick() -> None:
    inflight = InFlightTracker()
    begin(inflight, Pick(A), 0.0)
    begin(inflight, Pick(B), 0.0)
    assert inflight.loads["a"].last_pick < inflight.loads["b"].last_pick


def test_endpoint_is_suspect_after_response_from_another() -> None:
    inflight = InFlightTracker()
    inflight.complete(begin(inflight, Pick(A, (B,)), 0.0), "b", 1.0)
    inflight.expire_suspects(1.0 + SUSPECT_SECONDS - 0.1)
    assert inflight.loads["a"].suspect
    inflight.expire_suspects(1.0 + SUSPECT_SECONDS)
    assert not inflight.loads["a"].suspect


def test_reconcile_after_restart_adopts_envoy_counts() -> None:
    inflight = InFlightTracker()
    inflight.reconcile({"a": 3}, 0.0)
    assert inflight_count(inflight, "a") == 3
    inflight.complete("other-1", "a", 0.5)
    assert inflight_count(inflight, "a") == 2
    for _ in range(5):
        inflight.complete("other-2", "a", 0.6)
    assert inflight_count(inflight, "a") == 0


def test_reconcile_keeps_request_in_transit() -> None:
    inflight = InFlightTracker()
    inflight.reconcile({"a": 0}, 0.0)
    begin(inflight, Pick(A), 1.9)
    inflight.reconcile({"a": 0}, 2.0)
    assert inflight_count(inflight, "a") == 1
    inflight.reconcile({"a": 1}, 4.0)
    assert inflight_count(inflight, "a") == 1


def test_reconcile_counts_persistent_external_requests() -> None:
    inflight = InFlightTracker()
    inflight.reconcile({"a": 0}, 0.0)
    inflight.reconcile({"a": 4}, 2.0)
    assert inflight_count(inflight, "a") == 0
    inflight.reconcile({"a": 4}, 4.0)
    assert inflight_count(inflight, "a") == 4


def test_reconcile_drops_requests_of_idle_engine() -> None:
    inflight = InFlightTracker()
    begin(inflight, Pick(A, (), P), 0.0)
    inflight.reconcile({"a": 0}, 1.0)
    assert (inflight_count(inflight, "a"), len(inflight)) == (0, 1)
    inflight.reconcile({"a": 0}, 2.0)
    assert (inflight_count(inflight, "a"), inflight_count(inflight, "p"), len(inflight)) == (0, 0, 0)
    begin(inflight, Pick(A), 2.5)
    assert inflight_count(inflight, "a") == 1


def test_reconcile_forgets_request_without_record() -> None:
    inflight = InFlightTracker()
    begin(inflight, Pick(A), 0.0)
    inflight.reconcile({"a": 1}, 1.0)
    inflight.reconcile({"a": 1}, MAX_REQUEST_AGE_SECONDS + 1)
    assert len(inflight) == 0
    assert inflight_count(inflight, "a") == 1


def test_keep_only_retains_running_requests_of_lost_engine() -> None:
    inflight = InFlightTracker()
    ticket = begin(inflight, Pick(A), 0.0)
    inflight.reconcile({"a": 1}, 1.0)
    inflight.reconcile({}, 2.0)
    assert inflight_count(inflight, "a") == 1
    inflight.keep_only(set())
    assert inflight_count(inflight, "a") == 1
    inflight.complete(ticket, "a", 3.0)
    inflight.keep_only(set())
    assert inflight.loads == {}


def test_service_without_unbooked_requests_is_not_kept() -> None:
    inflight = InFlightTracker()
    for request_id in ("a", "b"):
        inflight.begin("s", Pick(A), request_id, 0.0, is_booked=False)
    inflight.complete("a", "a", 1.0)
    assert inflight.unbooked.by_service == {"s": 1}
    inflight.complete("b", "a", 1.0)
    assert list(inflight.unbooked.by_service) == []
