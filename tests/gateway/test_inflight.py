"""In-flight counts: by tickets, corrected by Envoy's own."""

from __future__ import annotations

from plimsoll.core.picking.choose import Pick
from plimsoll.core.picking.endpoint import Endpoint, Role
from plimsoll.gateway.inflight import DOUBT_SECONDS, OLDEST_SECONDS, InFlight

A = Endpoint("a", "pod-a", Role.DECODE, "r", ready=True, routable=True)
B = Endpoint("b", "pod-b", Role.DECODE, "r", ready=True, routable=True)
P = Endpoint("p", "pod-p", Role.PREFILL, "r", ready=True)


def held(inflight: InFlight, address: str) -> int:
    return inflight.loads[address].inflight


def begin(inflight: InFlight, pick: Pick, now: float) -> str:
    ticket = inflight.ticket()
    inflight.begin("s", pick, ticket, now)
    return ticket


def test_a_ticket_counts_at_both_endpoints_until_its_record_comes() -> None:
    inflight = InFlight()
    ticket = begin(inflight, Pick(A, (), P), 0.0)
    assert (held(inflight, "a"), held(inflight, "p")) == (1, 1)
    flight = inflight.end(ticket, "a", 1.0)
    assert flight is not None
    assert flight.service == "s"
    assert (held(inflight, "a"), held(inflight, "p")) == (0, 0)
    assert inflight.end(ticket, "a", 1.0) is None
    assert held(inflight, "a") == 0


def test_turns_go_up_with_every_pick() -> None:
    inflight = InFlight()
    begin(inflight, Pick(A), 0.0)
    begin(inflight, Pick(B), 0.0)
    assert inflight.loads["a"].turn < inflight.loads["b"].turn


def test_an_answer_from_elsewhere_casts_doubt_on_the_picked_one_for_a_while() -> None:
    inflight = InFlight()
    inflight.end(begin(inflight, Pick(A, (B,)), 0.0), "b", 1.0)
    inflight.settle(1.0 + DOUBT_SECONDS - 0.1)
    assert inflight.loads["a"].doubtful
    inflight.settle(1.0 + DOUBT_SECONDS)
    assert not inflight.loads["a"].doubtful


def test_after_a_restart_envoys_counts_are_believed_at_once_and_foreign_records_take_from_them() -> None:
    inflight = InFlight()
    inflight.reconcile({"a": 3}, 0.0)
    assert held(inflight, "a") == 3
    inflight.end("other-1", "a", 0.5)
    assert held(inflight, "a") == 2
    for _ in range(5):
        inflight.end("other-2", "a", 0.6)
    assert held(inflight, "a") == 0


def test_a_request_on_its_way_is_not_corrected_away() -> None:
    inflight = InFlight()
    inflight.reconcile({"a": 0}, 0.0)
    begin(inflight, Pick(A), 1.9)
    inflight.reconcile({"a": 0}, 2.0)
    assert held(inflight, "a") == 1
    inflight.reconcile({"a": 1}, 4.0)
    assert held(inflight, "a") == 1


def test_requests_past_the_picker_are_counted_once_they_stay() -> None:
    inflight = InFlight()
    inflight.reconcile({"a": 0}, 0.0)
    inflight.reconcile({"a": 4}, 2.0)
    assert held(inflight, "a") == 0
    inflight.reconcile({"a": 4}, 4.0)
    assert held(inflight, "a") == 4


def test_tickets_of_an_engine_that_envoy_knows_to_be_idle_are_dropped() -> None:
    inflight = InFlight()
    begin(inflight, Pick(A, (), P), 0.0)
    inflight.reconcile({"a": 0}, 1.0)
    assert (held(inflight, "a"), len(inflight)) == (0, 1)
    inflight.reconcile({"a": 0}, 2.0)
    assert (held(inflight, "a"), held(inflight, "p"), len(inflight)) == (0, 0, 0)
    begin(inflight, Pick(A), 2.5)
    assert held(inflight, "a") == 1


def test_a_record_that_never_comes_is_forgotten_in_the_end() -> None:
    inflight = InFlight()
    begin(inflight, Pick(A), 0.0)
    inflight.reconcile({"a": 1}, 1.0)
    inflight.reconcile({"a": 1}, OLDEST_SECONDS + 1)
    assert len(inflight) == 0
    assert held(inflight, "a") == 1


def test_an_engine_that_envoy_lost_keeps_its_running_requests() -> None:
    inflight = InFlight()
    ticket = begin(inflight, Pick(A), 0.0)
    inflight.reconcile({"a": 1}, 1.0)
    inflight.reconcile({}, 2.0)
    assert held(inflight, "a") == 1
    inflight.keep(set())
    assert held(inflight, "a") == 1
    inflight.end(ticket, "a", 3.0)
    inflight.keep(set())
    assert inflight.loads == {}
