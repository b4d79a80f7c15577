"""The bound on request bodies: what is announced, read, given back and refused."""

from __future__ import annotations

import itertools

import pytest

from plimsoll.gateway.body_budget import IDLE_AGE_SECONDS, MAX_AGE_SECONDS, MAX_ENDED, BodyBudget
from plimsoll.gateway.errors import RejectionReason
from plimsoll.gateway.gateway_limit import GatewayLimit

LIMIT, LARGEST = 100, 60
CLIENTS = map(str, itertools.count())  # each body of another one


@pytest.fixture
def budget() -> BodyBudget:
    return BodyBudget(LIMIT, LARGEST)


def test_room_is_refused_beyond_limit_and_given_back(budget: BodyBudget) -> None:
    assert budget.reserve("a", b"50", 0.0, next(CLIENTS)) is None
    assert budget.reserve("b", b"50", 0.0, next(CLIENTS)) is None
    rejection = budget.reserve("c", b"1", 0.0, next(CLIENTS))
    assert rejection is not None
    assert (rejection.reason, rejection.limit) == (RejectionReason.GATEWAY_FULL, GatewayLimit.BODY_BYTES)
    budget.release("a")
    assert budget.reserve("c", b"50", 0.0, next(CLIENTS)) is None
    assert budget.reserved_bytes == 100


@pytest.mark.parametrize("announced", [b"", b"-", b"-1", b"1e3", b"9" * 40])
def test_body_of_unknown_length_takes_room_of_largest(budget: BodyBudget, announced: bytes) -> None:
    assert budget.reserve("a", announced, 0.0, next(CLIENTS)) is None
    assert budget.reserved_bytes == LARGEST
    budget.record("a", 3, 0.0)
    assert budget.reserved_bytes == 3


def test_single_body_always_fits() -> None:
    assert BodyBudget(10, 60).reserve("a", b"60", 0.0, next(CLIENTS)) is None


def test_one_client_leaves_room_to_others(budget: BodyBudget) -> None:
    for n in range(3):
        assert budget.reserve(f"hostile-{n}", b"25", 0.0, "hostile") is None
    rejection = budget.reserve("hostile", b"1", 0.0, "hostile")
    assert rejection is not None
    assert (rejection.reason, rejection.limit) == (RejectionReason.GATEWAY_FULL, GatewayLimit.CLIENT_BODY_BYTES)
    assert "for this client" in rejection.message
    assert budget.reserve("good", b"25", 0.0, "good") is None
    budget.record("hostile-0", 5, 0.0)  # the true size
    assert budget.reserve("hostile", b"20", 0.0, "hostile") is None
    budget.release("hostile")
    budget.release("hostile-1")
    assert budget.reserve("hostile", b"45", 0.0, "hostile") is None


def test_single_body_fits_into_its_clients_share() -> None:
    assert BodyBudget(60, 60).reserve("a", b"60", 0.0, "one") is None


def test_body_that_envoy_rejects_takes_no_room(budget: BodyBudget) -> None:
    assert budget.reserve("a", b"61", 0.0, next(CLIENTS)) is None
    assert budget.reserved_bytes == 0


def test_small_bodies_are_counted_and_not_refused(budget: BodyBudget) -> None:
    for n in range(200):
        budget.record(f"r{n}", 1, 0.0)
    assert budget.reserved_bytes == 200
    assert budget.reserve("large", b"1", 0.0, next(CLIENTS)) is not None


def test_release_of_unknown_request_changes_nothing(budget: BodyBudget) -> None:
    budget.reserve("a", b"5", 0.0, next(CLIENTS))
    budget.release("b")
    budget.release("")
    assert budget.reserved_bytes == 5


def test_body_read_after_the_end_takes_no_room(budget: BodyBudget) -> None:
    """A client leaves while the picker is busy: Envoy's record may come before the body that it has sent."""
    budget.release("small")
    budget.record("small", 50, 0.0)
    assert budget.reserve("large", b"50", 0.0, next(CLIENTS)) is None
    budget.release("large")
    budget.record("large", 50, 0.0)
    budget.release("question")
    assert budget.reserve("question", b"50", 0.0, next(CLIENTS)) is None
    assert budget.reserved_bytes == 0
    budget.record("next", 50, 0.0)
    assert budget.reserved_bytes == 50


def test_ended_requests_are_remembered_within_a_bound(budget: BodyBudget) -> None:
    for n in range(MAX_ENDED + 10):
        budget.release(f"r{n}")
        budget.record(f"read-{n}", 1, 0.0)
        budget.release(f"read-{n}")
    budget.record("r0", 7, 0.0)
    budget.record(f"r{MAX_ENDED}", 7, 0.0)
    assert budget.reserved_bytes == 7, "the oldest is forgotten, and those whose body was read are not remembered"


def test_lost_records_give_back_room_in_time(budget: BodyBudget) -> None:
    budget.reserve("old", b"5", 0.0, next(CLIENTS))
    budget.reserve("new", b"7", MAX_AGE_SECONDS, next(CLIENTS))
    budget.expire(MAX_AGE_SECONDS + 1, envoy_is_idle=False)
    assert budget.reserved_bytes == 7
    budget.expire(MAX_AGE_SECONDS + 1, envoy_is_idle=True)
    assert budget.reserved_bytes == 7
    budget.expire(MAX_AGE_SECONDS + IDLE_AGE_SECONDS + 1, envoy_is_idle=True)
    assert budget.reserved_bytes == 0


def test_new_envoy_holds_nothing(budget: BodyBudget) -> None:
    budget.reserve("a", b"5", 0.0, next(CLIENTS))
    budget.clear()
    assert budget.reserved_bytes == 0
