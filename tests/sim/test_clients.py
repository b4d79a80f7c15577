"""Clients that come back: when, how often, and that their further attempts are the same demand."""

from __future__ import annotations

import json
from collections import Counter
from random import Random

import pytest

from plimsoll.core.admission.retry_advice import RetryAdvice
from plimsoll.core.types import Role
from plimsoll.sim.attempt import Attempt, AttemptOutcome, TraceRequest
from plimsoll.sim.clients import MAX_ATTEMPTS, RetryBehavior, RetryingClients
from plimsoll.sim.result import RunResult, request_row
from tests.sim import sim_harness

SOON_ADVICE, LATER_ADVICE = RetryAdvice(7.2, 8, True), RetryAdvice(75.0, 60, True)
UNKNOWN_ADVICE, NO_RETRY_ADVICE = RetryAdvice(None, None, True), RetryAdvice(None, None, False)
OVERLOAD_REQUESTS = [TraceRequest(float(n), 1000, 100) for n in range(30)] + [
    TraceRequest(30.0 + n / 40, 1500, 300) for n in range(1200)
]


def rejected_attempt(
    advice: RetryAdvice | None, behavior: RetryBehavior, attempt: int = 1, client: str = ""
) -> tuple[Attempt, float | None]:
    """An attempt that was told this, and when its client is back."""
    clients = RetryingClients(behavior, Random(1))
    client_attempt = Attempt(5, TraceRequest(0.0, 1, 1, client=client), None, attempt=attempt)
    clients.on_rejection(client_attempt, advice)
    return client_attempt, clients.retry_delay_s(client_attempt, advice)


@pytest.mark.parametrize("advice", [SOON_ADVICE, LATER_ADVICE, UNKNOWN_ADVICE, NO_RETRY_ADVICE, None])
def test_client_without_retries_stays_away(advice: RetryAdvice | None) -> None:
    assert rejected_attempt(advice, RetryBehavior.NONE)[1] is None


@pytest.mark.parametrize("behavior", [RetryBehavior.HONOUR, RetryBehavior.IGNORE, RetryBehavior.MIXED])
def test_client_attempts_never_exceed_sdk_maximum(behavior: RetryBehavior) -> None:
    assert rejected_attempt(SOON_ADVICE, behavior, attempt=MAX_ATTEMPTS - 1)[1] is not None
    assert rejected_attempt(SOON_ADVICE, behavior, attempt=MAX_ATTEMPTS)[1] is None


def test_client_honouring_retry_after_waits_as_advised() -> None:
    assert [
        rejected_attempt(advice, RetryBehavior.HONOUR)[1] for advice in (SOON_ADVICE, LATER_ADVICE, NO_RETRY_ADVICE)
    ] == [
        8.0,
        60.0,
        None,
    ]
    assert 10.0 <= (rejected_attempt(UNKNOWN_ADVICE, RetryBehavior.HONOUR)[1] or 0.0) <= 30.0


def test_client_without_advice_uses_sdk_backoff() -> None:
    for advice, behavior in (
        (None, RetryBehavior.HONOUR),
        *((one, RetryBehavior.IGNORE) for one in (SOON_ADVICE, LATER_ADVICE, UNKNOWN_ADVICE, NO_RETRY_ADVICE)),
    ):
        assert 0.375 <= (rejected_attempt(advice, behavior)[1] or 0.0) <= 0.5
        assert 0.75 <= (rejected_attempt(advice, behavior, attempt=2)[1] or 0.0) <= 1.0


def test_client_mixed_behavior_is_half_and_stable_per_client() -> None:
    honour = [
        rejected_attempt(SOON_ADVICE, RetryBehavior.MIXED, client=f"c{n}")[0].honours_retry_after for n in range(400)
    ]
    assert 160 <= sum(honour) <= 240
    assert honour == [
        rejected_attempt(LATER_ADVICE, RetryBehavior.MIXED, client=f"c{n}")[0].honours_retry_after for n in range(400)
    ]


def test_attempt_retry_reservation_requires_a_known_wait() -> None:
    visits = [
        rejected_attempt(advice, RetryBehavior.HONOUR)[0]
        for advice in (SOON_ADVICE, LATER_ADVICE, UNKNOWN_ADVICE, NO_RETRY_ADVICE, None)
    ]
    assert [client_attempt.reservation_s for client_attempt in visits] == [7.2, 75.0, None, None, None]
    assert [client_attempt.retry_after_s for client_attempt in visits][:2] == [8, 60]


@pytest.fixture(scope="module")
def honouring_run() -> sim_harness.FinishedRun:
    return sim_harness.simulate(OVERLOAD_REQUESTS, retry_behavior=RetryBehavior.HONOUR)


def test_attempts_end_once_and_share_the_request_number(honouring_run: sim_harness.FinishedRun) -> None:
    attempts = Counter((client_attempt.id, client_attempt.attempt) for client_attempt in honouring_run.attempts)
    assert set(attempts.values()) == {1}
    assert {number for number, _ in attempts} == set(range(1, len(OVERLOAD_REQUESTS) + 1))
    again = [client_attempt for client_attempt in honouring_run.attempts if client_attempt.attempt > 1]
    assert again
    ends = {(client_attempt.id, client_attempt.attempt): client_attempt for client_attempt in honouring_run.attempts}
    for client_attempt in again:
        before = ends[client_attempt.id, client_attempt.attempt - 1]
        assert before.outcome is AttemptOutcome.SHED
        assert before.end_s is not None
        assert before.retry_after_s is not None
        assert client_attempt.trace_request.at_s == pytest.approx(before.end_s + before.retry_after_s)
    assert not honouring_run.world.in_flight


def test_retries_are_excluded_from_demand_and_summary(honouring_run: sim_harness.FinishedRun) -> None:
    [reading] = [gateway.reading() for gateway in honouring_run.world.gateways]
    again = [client_attempt for client_attempt in honouring_run.attempts if client_attempt.attempt > 1]
    assert (reading.arrived, reading.retried) == (len(OVERLOAD_REQUESTS), len(again))
    result = RunResult(sim_harness.make_plant(), [Role.SERVE], sim_harness.serve_manifest().spec.slo.to_core())  # type: ignore[union-attr]
    for client_attempt in honouring_run.attempts:
        result.add(client_attempt)
    found = result.summary(honouring_run.world, "p", 0, OVERLOAD_REQUESTS[-1].at_s, 0.0)
    first = Counter(client_attempt.outcome for client_attempt in honouring_run.attempts if client_attempt.attempt == 1)
    assert (found["offered"], found["shed"], found["completed"]) == (
        len(OVERLOAD_REQUESTS),
        first[AttemptOutcome.SHED],
        first[AttemptOutcome.OK],
    )
    assert found["retries"] == len(again)
    assert found["recovered"] == sum(client_attempt.outcome is AttemptOutcome.OK for client_attempt in again) > 0
    tickets = found["retry_reservations"]
    assert tickets["refused"] == first[AttemptOutcome.SHED]
    assert tickets["given"] == sum(v.reservation_s is not None for v in honouring_run.attempts if v.attempt == 1)
    assert tickets["first_ok"] + tickets["second_ok"] <= tickets["given"]


def test_row_retry_states_its_attempt_number(honouring_run: sim_harness.FinishedRun) -> None:
    for client_attempt in honouring_run.attempts:
        assert request_row(client_attempt).get("attempt", 1) == client_attempt.attempt


def test_clients_same_seed_gives_same_run() -> None:
    def run(seed: int) -> str:
        visits = sim_harness.simulate(
            OVERLOAD_REQUESTS[:600], retry_behavior=RetryBehavior.MIXED, gateways=2, seed=seed
        ).attempts
        return json.dumps([request_row(client_attempt) for client_attempt in visits])

    assert run(3) == run(3) != run(4)
