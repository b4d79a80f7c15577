"""In-flight counts: by tickets, corrected by Envoy's own."""

from __future__ import annotations

from plimsoll.core.picking.choose import Pick
from plimsoll.core.picking.endpoint import Endpoint, Role
from plimsoll.gateway.inflight import DOUBT_SECONDS, OLDEST_SECONDS, InFlight

A = Endpoint("a", "pod-a", Role.DECODE, "r", ready=True, routable=True)
B = Endpoint("b", "pod-b", Role.DECODE, "r", ready=True, routable=True)
P = Endpoint("p", "pod-p", Role.PREFILL, "r", ready=True)


def inflight_count(inflight: InFlight, address: str) -> int:
    return inflight.loads[address].inflight


def begin(inflight: InFlight, pick: Pick, now: float) -> str:
    ticket = inflight.ticket()
    inflight.begin("s", pick, ticket, now)
    return ticket


def test_request_counts_at_both_endpoints_until_record() -> None:
    inflight = InFlight()
    ticket = begin(inflight, Pick(A, (), P), 0.0)
    assert (inflight_count(inflight, "a"), inflight_count(inflight, "p")) == (1, 1)
    flight = inflight.end(ticket, "a", 1.0)
    assert flight is not None
    assert flight.service == "s"
    assert (inflight_count(inflight, "a"), inflight_count(inflight, "p")) == (0, 0)
    assert inflight.end(ticket, "a", 1.0) is None
    assert inflight_count(inflight, "a") == 0


def test_last_pick_increases_with_every_pick() -> None:
    inflight = InFlight()
    begin(inflight, Pick(A), 0.0)
    begin(inflight, Pick(B), 0.0)
    assert inflight.loads["a"].turn < inflight.loads["b"].turn


def test_endpoint_is_suspect_after_response_from_another() -> None:
    inflight = InFlight()
    inflight.end(begin(inflight, Pick(A, (B,)), 0.0), "b", 1.0)
    inflight.settle(1.0 + DOUBT_SECONDS - 0.1)
    assert inflight.loads["a"].doubtful
    inflight.settle(1.0 + DOUBT_SECONDS)
    assert not inflight.loads["a"].doubtful


def test_reconcile_after_restart_adopts_envoy_counts() -> None:
    inflight = InFlight()
    inflight.reconcile({"a": 3}, 0.0)
    assert inflight_count(inflight, "a") == 3
    inflight.end("other-1", "a", 0.5)
    assert inflight_count(inflight, "a") == 2
    for _ in range(5):
        inflight.end("other-2", "a", 0.6)
    assert inflight_count(inflight, "a") == 0


def test_reconcile_keeps_request_in_transit() -> None:
    inflight = InFlight()
    inflight.reconcile({"a": 0}, 0.0)
    begin(inflight, Pick(A), 1.9)
    inflight.reconcile({"a": 0}, 2.0)
    assert inflight_count(inflight, "a") == 1
    inflight.reconcile({"a": 1}, 4.0)
    assert inflight_count(inflight, "a") == 1


def test_reconcile_counts_persistent_external_requests() -> None:
    inflight = InFlight()
    inflight.reconcile({"a": 0}, 0.0)
    inflight.reconcile({"a": 4}, 2.0)
    assert inflight_count(inflight, "a") == 0
    inflight.reconcile({"a": 4}, 4.0)
    assert inflight_count(inflight, "a") == 4


def test_reconcile_drops_requests_of_idle_engine() -> None:
    inflight = InFlight()
    begin(inflight, Pick(A, (), P), 0.0)
    inflight.reconcile({"a": 0}, 1.0)
    assert (inflight_count(inflight, "a"), len(inflight)) == (0, 1)
    inflight.reconcile({"a": 0}, 2.0)
    assert (inflight_count(inflight, "a"), inflight_count(inflight, "p"), len(inflight)) == (0, 0, 0)
    begin(inflight, Pick(A), 2.5)
    assert inflight_count(inflight, "a") == 1


def test_reconcile_forgets_request_without_record() -> None:
    inflight = InFlight()
    begin(inflight, Pick(A), 0.0)
    inflight.reconcile({"a": 1}, 1.0)
    inflight.reconcile({"a": 1}, OLDEST_SECONDS + 1)
    assert len(inflight) == 0
    assert inflight_count(inflight, "a") == 1


def test_keep_only_retains_running_requests_of_lost_engine() -> None:
    inflight = InFlight()
    ticket = begin(inflight, Pick(A), 0.0)
    inflight.reconcile({"a": 1}, 1.0)
    inflight.reconcile({}, 2.0)
    assert inflight_count(inflight, "a") == 1
    inflight.keep(set())
    assert inflight_count(inflight, "a") == 1
    inflight.end(ticket, "a", 3.0)
    inflight.keep(set())
    assert inflight.loads == {}
