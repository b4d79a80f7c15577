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

SOON, LATER = Told(7.2, 8, True), Told(75.0, 60, True)
NOBODY_KNOWS, NEVER = Told(None, None, True), Told(None, None, False)
RUSH = [Asked(float(n), 1000, 100) for n in range(30)] + [Asked(30.0 + n / 40, 1500, 300) for n in range(1200)]


def refused(told: Told | None, manner: Manner, attempt: int = 1, client: str = "") -> tuple[Visit, float | None]:
    """An attempt that was told this, and when its client is back."""
    clients = Clients(manner, Random(1))
    visit = Visit(5, Asked(0.0, 1, 1, client=client), None, attempt=attempt)
    clients.tell(visit, told)
    return visit, clients.back_s(visit, told)


@pytest.mark.parametrize("told", [SOON, LATER, NOBODY_KNOWS, NEVER, None])
def test_who_does_not_come_back_stays_away(told: Told | None) -> None:
    assert refused(told, Manner.NONE)[1] is None


@pytest.mark.parametrize("manner", [Manner.HONOUR, Manner.IGNORE, Manner.MIXED])
def test_nobody_tries_more_often_than_an_sdk_does(manner: Manner) -> None:
    assert refused(SOON, manner, attempt=ATTEMPTS - 1)[1] is not None
    assert refused(SOON, manner, attempt=ATTEMPTS)[1] is None


def test_who_honours_does_as_it_is_told() -> None:
    assert [refused(told, Manner.HONOUR)[1] for told in (SOON, LATER, NEVER)] == [8.0, 60.0, None]
    assert 10.0 <= (refused(NOBODY_KNOWS, Manner.HONOUR)[1] or 0.0) <= 30.0


def test_who_is_told_nothing_or_ignores_it_has_the_sdks_backoff() -> None:
    for told, manner in ((None, Manner.HONOUR), *((one, Manner.IGNORE) for one in (SOON, LATER, NOBODY_KNOWS, NEVER))):
        assert 0.375 <= (refused(told, manner)[1] or 0.0) <= 0.5
        assert 0.75 <= (refused(told, manner, attempt=2)[1] or 0.0) <= 1.0


def test_a_mixed_crowd_is_half_and_half_and_each_client_always_alike() -> None:
    honour = [refused(SOON, Manner.MIXED, client=f"c{n}")[0].honours for n in range(400)]
    assert 160 <= sum(honour) <= 240
    assert honour == [refused(LATER, Manner.MIXED, client=f"c{n}")[0].honours for n in range(400)]


def test_a_ticket_is_a_refusal_that_names_a_time() -> None:
    visits = [refused(told, Manner.HONOUR)[0] for told in (SOON, LATER, NOBODY_KNOWS, NEVER, None)]
    assert [visit.ticket_s for visit in visits] == [7.2, 75.0, None, None, None]
    assert [visit.retry_after_s for visit in visits][:2] == [8, 60]


@pytest.fixture(scope="module")
def honoured() -> lab.Done:
    return lab.simulate(RUSH, clients=Manner.HONOUR)


def test_every_attempt_ends_once_and_all_of_a_demand_have_its_number(honoured: lab.Done) -> None:
    attempts = Counter((visit.id, visit.attempt) for visit in honoured.visits)
    assert set(attempts.values()) == {1}
    assert {number for number, _ in attempts} == set(range(1, len(RUSH) + 1))
    again = [visit for visit in honoured.visits if visit.attempt > 1]
    assert again
    ends = {(visit.id, visit.attempt): visit for visit in honoured.visits}
    for visit in again:
        before = ends[visit.id, visit.attempt - 1]
        assert before.end is End.SHED
        assert before.end_s is not None
        assert before.retry_after_s is not None
        assert visit.asked.at_s == pytest.approx(before.end_s + before.retry_after_s)
    assert not honoured.world.in_flight


def test_retries_are_no_demand_to_the_operator_nor_to_the_figures(honoured: lab.Done) -> None:
    [reading] = [gateway.reading() for gateway in honoured.world.gateways]
    again = [visit for visit in honoured.visits if visit.attempt > 1]
    assert (reading.arrived, reading.retried) == (len(RUSH), len(again))
    result = Result(lab.plant(), [Role.SERVE], lab.service().spec.slo.to_core())  # type: ignore[union-attr]
    for visit in honoured.visits:
        result.take(visit)
    found = result.summary(honoured.world, "p", 0, RUSH[-1].at_s, 0.0)
    first = Counter(visit.end for visit in honoured.visits if visit.attempt == 1)
    assert (found["offered"], found["shed"], found["completed"]) == (len(RUSH), first[End.SHED], first[End.OK])
    assert found["retries"] == len(again)
    assert found["recovered"] == sum(visit.end is End.OK for visit in again) > 0
    tickets = found["tickets"]
    assert tickets["refused"] == first[End.SHED]
    assert tickets["given"] == sum(v.ticket_s is not None for v in honoured.visits if v.attempt == 1)
    assert tickets["first_ok"] + tickets["second_ok"] <= tickets["given"]


def test_a_further_attempt_says_so_in_its_line(honoured: lab.Done) -> None:
    for visit in honoured.visits:
        assert row(visit).get("attempt", 1) == visit.attempt


def test_the_same_seed_gives_the_same_crowd() -> None:
    def run(seed: int) -> str:
        visits = lab.simulate(RUSH[:600], clients=Manner.MIXED, gateways=2, seed=seed).visits
        return json.dumps([row(visit) for visit in visits])

    assert run(3) == run(3) != run(4)
