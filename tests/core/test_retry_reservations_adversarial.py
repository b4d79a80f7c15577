"""Tickets against a ledger kept by hand: clients that come back early, late, twice, under one key, on a clock that
jumps, while what is expected changes under them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest

from plimsoll.core.admission.request import AdmissionRequest
from plimsoll.core.admission.retry_advice import MAX_RESERVATION_S, MAX_RETRY_AFTER_S, UNKNOWN_RETRY_RANGE_S
from plimsoll.core.admission.retry_reservations import (
    EARLY_TOLERANCE_S,
    SPARE_UTILIZATION,
    RetryReservations,
)


def make_request(
    id: str, now: float, tenant: str = "t", body: int | None = None, key: str | None = None
) -> AdmissionRequest:
    return AdmissionRequest(id, "chat", tenant, now, 100, body_hash=body, idempotency_key=key)


@dataclass
class ReferenceReservation:
    """One ticket as the ledger by hand has it."""

    work_s: float
    due_s: float
    ends_s: float
    known: bool
    due: bool = False


class ReferenceModel:
    """What `Tickets` is to say, looked up and added up anew each time."""

    def __init__(self) -> None:
        self.slips: dict[object, ReferenceReservation] = {}
        self.steps: list[tuple[float, float]] = []

    def pass_time(self, now: float) -> None:
        for slip in self.slips.values():
            slip.due = slip.due or slip.due_s <= now
        self.slips = {key: slip for key, slip in self.slips.items() if slip.ends_s > now}

    @property
    def work_s(self) -> float:
        return math.fsum(slip.work_s for slip in self.slips.values())

    @property
    def coming_s(self) -> float:
        return math.fsum(slip.work_s for slip in self.slips.values() if not slip.due)

    def done_by(self, at_s: float, now: float) -> float:
        """Work that the spare of all that is expected does from now until then."""
        done = 0.0
        for (from_s, spare), (until_s, _) in zip(self.steps, [*self.steps[1:], (math.inf, 0.0)], strict=True):
            done += SPARE_UTILIZATION * spare * max(0.0, min(at_s, until_s) - max(now, from_s))
        return done


KEYS = [("t", 1, None), ("t", 2, None), ("u", 1, None), ("t", 1, "k"), ("u", None, "k"), ("t", None, "1")]


@pytest.mark.parametrize("seed", range(8))
def test_reservations_match_reference_model(seed: int) -> None:
    rng, real, hand, now = random.Random(seed), RetryReservations(), ReferenceModel(), 1000.0
    jumps = seed % 2
    advised_some = 0
    for number in range(2500):
        now += rng.choice((0.0, 0.01, 0.3, 2.0, 15.0))
        if jumps and rng.random() < 0.01:
            now += rng.choice((-300.0, -2.0, 500.0, 1e6))
        if rng.random() < 0.05:
            first = now + rng.uniform(-20.0, 80.0)
            hand.steps = [(first, rng.uniform(0.0, 2.0)), (first + rng.uniform(0.0, 30.0), rng.uniform(0.0, 4.0))]
            hand.steps = hand.steps if rng.random() < 0.8 else []
            real.set_capacity_steps(*(hand.steps[0] if hand.steps else (None, 0.0)), later_steps=hand.steps[1:])
        tenant, body, key = rng.choice(KEYS)
        request = make_request(f"r{number}", now, tenant, body, key)
        name = (tenant, body if key is None else key)
        hand.pass_time(now)
        found, slip = real.find(request, now), hand.slips.get(name)
        assert (found is None) == (slip is None)
        if found is not None and slip is not None and rng.random() < 0.3:
            assert real.is_due(found, now) == (slip.due_s <= now + EARLY_TOLERANCE_S)
            real.redeem(found)
            real.redeem(found)  # twice is once
            del hand.slips[name]
        elif rng.random() < 0.5:
            work_s, held_s = rng.uniform(0.01, 0.5), rng.uniform(0.0, 1.0)
            advised_some += issued(real, hand, request, name, (work_s, held_s), now)
        real.expire(now)
        hand.pass_time(now)
        assert len(real) == len(hand.slips)
        assert real.work_s == pytest.approx(hand.work_s, abs=1e-9)
        assert real.pending_work_s == pytest.approx(hand.coming_s, abs=1e-9)
        assert len(real._expiry) <= 2 * len(KEYS) + 200, "what is kept of them is bounded"
    assert advised_some > 50


def issued(
    real: RetryReservations,
    hand: ReferenceModel,
    request: AdmissionRequest,
    name: object,
    work: tuple[float, float],
    now: float,
) -> bool:
    """Have one told, and both ledgers hold it; whether it was told a time."""
    work_s, held_s = work
    old = hand.slips.get(name)
    if old is not None and old.due_s <= now + EARLY_TOLERANCE_S:
        del hand.slips[name]
        old = None
    ahead_s = held_s + hand.work_s + work_s
    advice = real.reserve(request, work_s, held_s, now)
    if old is not None:
        if not old.known:
            assert advice == (None, None, True)
            return False
        assert advice.eta_s == pytest.approx(old.due_s - now, abs=1e-6)
        slip = old
    elif not hand.steps:
        assert advice == (None, None, True)
        hand.slips[name] = ReferenceReservation(
            work_s, now + UNKNOWN_RETRY_RANGE_S[0], now + 2 * UNKNOWN_RETRY_RANGE_S[1], False
        )
        return False
    elif advice.eta_s is None or not advice.retryable:
        assert hand.done_by(now + MAX_RESERVATION_S, now) <= ahead_s + 1e-6, (
            "who is sent away for good has to wait longer"
        )
        return False
    else:
        assert hand.done_by(now + advice.eta_s, now) == pytest.approx(ahead_s, abs=1e-6)
        assert advice.eta_s <= MAX_RESERVATION_S
        slip = hand.slips[name] = ReferenceReservation(work_s, now + advice.eta_s, now + advice.eta_s, True)
    assert advice.retry_after_s is not None
    assert 1 <= advice.retry_after_s <= MAX_RETRY_AFTER_S
    assert advice.retry_after_s >= min(advice.eta_s or 0.0, MAX_RETRY_AFTER_S)
    slip.ends_s = max(slip.ends_s, now + 2 * advice.retry_after_s)
    return True


def test_reservation_etas_increase_within_spare_capacity() -> None:
    tickets = RetryReservations()
    tickets.set_capacity_steps(20.0, 1.0)
    etas = []
    for number in range(500):
        eta_s = tickets.reserve(make_request(str(number), 0.0, body=number), 0.1, 0.0, 0.0).eta_s
        if eta_s is not None and eta_s <= MAX_RESERVATION_S:
            etas.append(eta_s)
    assert etas == sorted(set(etas))
    for until_s in (30.0, 60.0, 100.0):
        assert 0.1 * sum(eta_s <= until_s for eta_s in etas) <= SPARE_UTILIZATION * (until_s - 20.0) + 1e-6


def test_reservation_key_collision_is_limited_to_tenant() -> None:
    tickets = RetryReservations()
    tickets.set_capacity_steps(20.0, 1.0)
    first = tickets.reserve(make_request("a", 0.0, "t", 7), 0.5, 0.0, 0.0)
    again = tickets.reserve(make_request("b", 1.0, "t", 7), 9.0, 0.0, 1.0)
    other = tickets.reserve(make_request("c", 1.0, "u", 7), 0.5, 0.0, 1.0)
    assert first.eta_s is not None
    assert again.eta_s == pytest.approx(first.eta_s - 1.0)
    assert other.eta_s is not None
    assert other.eta_s > again.eta_s
    assert (len(tickets), tickets.work_s) == (2, 1.0)


def test_reservation_clock_set_back_bounds_retry_after() -> None:
    tickets = RetryReservations()
    tickets.set_capacity_steps(1020.0, 1.0)
    tickets.reserve(make_request("a", 1000.0, body=1), 0.5, 0.0, 1000.0)
    back = tickets.reserve(make_request("b", 0.0, body=1), 0.5, 0.0, 0.0)
    assert back.retry_after_s == MAX_RETRY_AFTER_S
    assert len(tickets) == 1
    tickets.expire(5000.0)
    assert (len(tickets), tickets.work_s, tickets.pending_work_s) == (0, 0.0, 0.0)
