"""Clients that come back: when, how often, and that their further attempts are the same demand."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest

from plimsoll.core.admission import Told
from plimsoll.core.picking.endpoint import Role
from plimsoll.sim.clients import ATTEMPTS, Clients, Manner
from plimsoll.sim.result import Result, row
from plimsoll.sim.visit import Asked, End, Visit
from tests.sim import lab

SOON_ADVICE, LATER_ADVICE = Told(7.2, 8, True), Told(75.0, 60, True)
UNKNOWN_ADVICE, NO_RETRY_ADVICE = Told(None, None, True), Told(None, None, False)
OVERLOAD_REQUESTS = [Asked(float(n), 1000, 100) for n in range(30)] + [
    Asked(30.0 + n / 40, 1500, 300) for n in range(1200)
]


def refused(told: Told | None, manner: Manner, attempt: int = 1, client: str = "") -> tuple[Visit, float | None]:
    """An attempt that was told this, and when its client is back."""
    clients = Clients(manner, Random(1))
    visit = Visit(5, Asked(0.0, 1, 1, client=client), None, attempt=attempt)
    clients.tell(visit, told)
    return visit, clients.back_s(visit, told)


@pytest.mark.parametrize("told", [SOON_ADVICE, LATER_ADVICE, UNKNOWN_ADVICE, NO_RETRY_ADVICE, None])
def test_client_without_retries_stays_away(told: Told | None) -> None:
    assert refused(told, Manner.NONE)[1] is None


@pytest.mark.parametrize("manner", [Manner.HONOUR, Manner.IGNORE, Manner.MIXED])
def test_client_attempts_never_exceed_sdk_maximum(manner: Manner) -> None:
    assert refused(SOON_ADVICE, manner, attempt=ATTEMPTS - 1)[1] is not None
    assert refused(SOON_ADVICE, manner, attempt=ATTEMPTS)[1] is None


def test_client_honouring_retry_after_waits_as_advised() -> None:
    assert [refused(told, Manner.HONOUR)[1] for told in (SOON_ADVICE, LATER_ADVICE, NO_RETRY_ADVICE)] == [
        8.0,
        60.0,
        None,
    ]
    assert 10.0 <= (refused(UNKNOWN_ADVICE, Manner.HONOUR)[1] or 0.0) <= 30.0


def test_client_without_advice_uses_sdk_backoff() -> None:
    for told, manner in (
        (None, Manner.HONOUR),
        *((one, Manner.IGNORE) for one in (SOON_ADVICE, LATER_ADVICE, UNKNOWN_ADVICE, NO_RETRY_ADVICE)),
    ):
        assert 0.375 <= (refused(told, manner)[1] or 0.0) <= 0.5
        assert 0.75 <= (refused(told, manner, attempt=2)[1] or 0.0) <= 1.0


def test_client_mixed_behavior_is_half_and_stable_per_client() -> None:
    honour = [refused(SOON_ADVICE, Manner.MIXED, client=f"c{n}")[0].honours for n in range(400)]
    assert 160 <= sum(honour) <= 240
    assert honour == [refused(LATER_ADVICE, Manner.MIXED, client=f"c{n}")[0].honours for n in range(400)]


def test_attempt_retry_reservation_requires_a_known_wait() -> None:
    visits = [
        refused(told, Manner.HONOUR)[0] for told in (SOON_ADVICE, LATER_ADVICE, UNKNOWN_ADVICE, NO_RETRY_ADVICE, None)
    ]
    assert [visit.ticket_s for visit in visits] == [7.2, 75.0, None, None, None]
    assert [visit.retry_after_s for visit in visits][:2] == [8, 60]


@pytest.fixture(scope="module")
def honouring_run() -> lab.Done:
    return lab.simulate(OVERLOAD_REQUESTS, clients=Manner.HONOUR)


def test_attempts_end_once_and_share_the_request_number(honouring_run: lab.Done) -> None:
    attempts = Counter((visit.id, visit.attempt) for visit in honouring_run.visits)
    assert set(attempts.values()) == {1}
    assert {number for number, _ in attempts} == set(range(1, len(OVERLOAD_REQUESTS) + 1))
    again = [visit for visit in honouring_run.visits if visit.attempt > 1]
    assert again
    ends = {(visit.id, visit.attempt): visit for visit in honouring_run.visits}
    for visit in again:
        before = ends[visit.id, visit.attempt - 1]
        assert before.end is End.SHED
        assert before.end_s is not None
        assert before.retry_after_s is not None
        assert visit.asked.at_s == pytest.approx(before.end_s + before.retry_after_s)
    assert not honouring_run.world.in_flight


def test_retries_are_excluded_from_demand_and_summary(honouring_run: lab.Done) -> None:
    [reading] = [gateway.reading() for gateway in honouring_run.world.gateways]
    again = [visit for visit in honouring_run.visits if visit.attempt > 1]
    assert (reading.arrived, reading.retried) == (len(OVERLOAD_REQUESTS), len(again))
    result = Result(lab.plant(), [Role.SERVE], lab.service().spec.slo.to_core())  # type: ignore[union-attr]
    for visit in honouring_run.visits:
        result.take(visit)
    found = result.summary(honouring_run.world, "p", 0, OVERLOAD_REQUESTS[-1].at_s, 0.0)
    first = Counter(visit.end for visit in honouring_run.visits if visit.attempt == 1)
    assert (found["offered"], found["shed"], found["completed"]) == (
        len(OVERLOAD_REQUESTS),
        first[End.SHED],
        first[End.OK],
    )
    assert found["retries"] == len(again)
    assert found["recovered"] == sum(visit.end is End.OK for visit in again) > 0
    tickets = found["tickets"]
    assert tickets["refused"] == first[End.SHED]
    assert tickets["given"] == sum(v.ticket_s is not None for v in honouring_run.visits if v.attempt == 1)
    assert tickets["first_ok"] + tickets["second_ok"] <= tickets["given"]


def test_row_retry_states_its_attempt_number(honouring_run: lab.Done) -> None:
    for visit in honouring_run.visits:
        assert row(visit).get("attempt", 1) == visit.attempt


def test_clients_same_seed_gives_same_run() -> None:
    def run(seed: int) -> str:
        visits = lab.simulate(OVERLOAD_REQUESTS[:600], clients=Manner.MIXED, gateways=2, seed=seed).visits
        return json.dumps([row(visit) for visit in visits])

    assert run(3) == run(3) != run(4)
