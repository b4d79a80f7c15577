"""Reservations of clients that return, and the shares of several gateways."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.capacity_shares import ShareAllocator, split_by_demand
from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.cost_model import ClassPolicy, engine_cost_model
from plimsoll.core.admission.quota import TenantPolicy
from plimsoll.core.admission.request import AdmissionOutcome
from plimsoll.core.admission.retry_reservations import RetryReservations
from tests.core.admission_engine import ClientRequest, StepEngine
from tests.core.admission_fixtures import (
    CHAT,
    GUIDE,
    HOT,
    ONE_CLASS,
    ROOMY,
    SERVE,
    SLO,
    SLOW,
    fill,
    gate,
    make_request,
    scaled,
)
from tests.core.admission_simulator import ControllerPolicy, poisson, run

# Tickets.


def test_retries_of_one_client_share_one_reservation() -> None:
    controller = gate(replicas=0, announcement=CapacityAnnouncement(100.0, 0.5))
    first = controller.submit(make_request("a0", body_hash=9), 0.0)
    offered = controller.offered_work_s
    assert first.retry is not None
    assert first.retry.retry_after_s == 60  # 100 s in two steps
    for k, now in enumerate((0.1, 0.2, 30.0, 60.0), start=1):  # five attempts, some of them at once
        advice = controller.submit(make_request(f"a{k}", now, body_hash=9), now).retry
        assert advice is not None
        assert advice.eta_s == pytest.approx(100.0 - now, abs=1.0)
    assert advice.retry_after_s in (40, 41)
    assert (len(controller.reservations), controller.retries, controller.offered_work_s) == (1, 4, offered)
    assert controller.reservations.work_s == pytest.approx(offered)
    controller.set_replicas({"a": 100}, 100.0)
    assert controller.submit(make_request("a5", 101.0, body_hash=9), 101.0).outcome is AdmissionOutcome.ADMITTED
    assert (len(controller.reservations), controller.reservations.work_s, controller.reservations.pending_work_s) == (
        0,
        0.0,
        0.0,
    )


def test_retry_without_reservation_uses_quota_not_demand() -> None:
    controller = gate(tenants={"t": TenantPolicy(requests_per_s=0.1)})
    controller.submit(make_request("a", body_hash=1), 0.0)
    offered = controller.offered_work_s
    refused = controller.submit(make_request("b", body_hash=2, is_retry=True), 0.0)
    assert (refused.outcome, controller.offered_work_s, controller.retries) == (AdmissionOutcome.SHED_QUOTA, offered, 1)


def test_reservation_without_eta_lasts_max_retry_time() -> None:
    controller = gate(announcement=CapacityAnnouncement(None))
    _, now = fill(controller)
    while (
        decision := controller.submit(make_request(f"h{controller.queued}", now, body_hash=controller.queued), now)
    ).outcome is AdmissionOutcome.QUEUED:
        pass
    assert decision.retry == (None, None, True)
    hash_ = int(decision.request_id[1:])
    assert controller.submit(make_request("soon", now, body_hash=hash_), now + 1).retry == (None, None, True)
    controller.submit(make_request("later", now + 29, body_hash=hash_), now + 29)
    assert (controller.retries, len(controller.reservations)) == (2, 0)


def test_reservation_etas_are_spread_over_backlog_work() -> None:
    controller = gate(replicas=0, announcement=CapacityAnnouncement(35.0, 0.5))
    advice = [controller.submit(make_request(f"r{k}", body_hash=k), 0.0).retry for k in range(2000)]
    etas = [t.eta_s for t in advice if t is not None and t.retryable]
    work_s = controller.reservations.work_s / len(etas)
    assert np.diff(etas) == pytest.approx(work_s / 0.45, rel=0.01)
    assert max(etas) <= 120
    assert all(t is not None and not t.retryable and t.retry_after_s is None for t in advice[len(etas) :])
    assert max(t.retry_after_s or 0 for t in advice if t is not None) == 60
    assert controller.reservations.pending_work_s == pytest.approx(controller.reservations.work_s)
    controller.tick(200.0, CapacityAnnouncement(35.0, 0.5))
    assert controller.reservations.pending_work_s == 0


def test_reservation_etas_respect_capacity_announcement() -> None:
    """One in 35 s that leaves little to spare, one in 55 s that leaves much."""
    controller = gate(replicas=0, announcement=CapacityAnnouncement(35.0, 0.1, later_steps=((55.0, 0.5),)))
    advice = [controller.submit(make_request(f"r{k}", body_hash=k), 0.0).retry for k in range(300)]
    etas = np.array([t.eta_s for t in advice if t is not None and t.eta_s is not None])
    work_s = controller.reservations.work_s / len(etas)
    first, later = etas[etas < 55.0], etas[etas > 55.0]
    assert len(first) == int(20.0 * 0.09 / work_s)
    assert np.diff(first) == pytest.approx(work_s / 0.09, rel=0.01)
    assert np.diff(later) == pytest.approx(work_s / 0.45, rel=0.01)
    assert etas[-1] == pytest.approx(55.0 + (len(etas) * work_s - 20.0 * 0.09) / 0.45)


@pytest.mark.parametrize("later", [(), ((math.nan, math.nan),), ((math.inf, 1.0),), ((-5.0, 0.0),)])
def test_reservation_eta_is_finite_or_none(later: tuple[tuple[float, float], ...]) -> None:
    for at_s, spare in ((35.0, 0.5), (35.0, 0.0), (35.0, math.nan), (math.inf, 0.5), (-math.inf, 1e-300)):
        tickets = RetryReservations()
        tickets.set_capacity_steps(at_s, spare, later)
        advice = tickets.reserve(make_request("a", body_hash=1), 0.1, 0.0, 0.0)
        assert advice.eta_s is None or 0.0 <= advice.eta_s < math.inf


def test_retry_on_time_precedes_new_requests_late_does_not() -> None:
    controller = gate(announcement=CapacityAnnouncement(2.0, 5.0))
    _, now = fill(controller)
    while (
        decision := controller.submit(make_request(f"h{controller.queued}", now, body_hash=controller.queued), now)
    ).outcome is AdmissionOutcome.QUEUED:
        pass
    assert decision.retry is not None
    assert decision.retry.retry_after_s is not None
    controller.release(now + 1)
    back = now + decision.retry.retry_after_s
    assert controller.submit(make_request("new", back), back).outcome is AdmissionOutcome.QUEUED
    assert (
        controller.submit(make_request("back", back, body_hash=int(decision.request_id[1:])), back).outcome
        is AdmissionOutcome.QUEUED
    )
    controller.complete("fill0", back)
    controller.complete("fill1", back)
    assert next(d.request_id for d in controller.release(back)) == "back"


@pytest.mark.parametrize("last_s", [75.0, 105.0])
def test_retries_after_load_step_are_admitted_in_one_wave(last_s: float) -> None:
    """One replica, 1.5 times its load line, one more after 75 s, and another: a backlog of some 25 s of what all three
    leave spare then."""
    rate, ready_s = 28.0, 75.0
    plant = scaled(HOT, SLOW)
    classes = (ClassPolicy("chat", 0, SLO),)
    tier = replace(SERVE, model=scaled(HOT, (1.1,) * 6))
    work_s = float(
        CHAT.mean(tier.model.prefill_work_s(CHAT.uncached_tokens, 0))
        + CHAT.mean(tier.model.decode_work_s(CHAT.prompt_tokens, CHAT.output_tokens))
    )

    def announcement(controller: AdmissionController, now: float) -> None:
        two, three = (count * controller.pool.cost_model.full_utilization - rate * work_s for count in (2, 3))
        if last_s == ready_s:
            controller.tick(now, CapacityAnnouncement(ready_s + 2.0, three))
        else:
            controller.tick(now, CapacityAnnouncement(ready_s + 2.0, two, later_steps=((last_s + 2.0, three),)))

    refusals: list[tuple[float, bool]] = []

    def back(job: ClientRequest, now: float) -> list[float]:
        advice = job.retry_advice[-1] if len(job.retry_advice) == job.attempts else None
        refusals.append((now, advice is not None))
        if advice is None or job.attempts > 3:
            return []
        return [now + advice + 0.05]

    offered = poisson(rate, 125.0, np.random.default_rng(11))
    policy = ControllerPolicy(gate(tier, classes, 0), announcement)
    run(policy, [StepEngine(plant, ROOMY) for _ in range(3)], offered, 140.0, [0.0, ready_s, last_s], back)
    refused = [job for job in offered if job.retry_advice]
    first = [job for job in refused if sum(job.retry_advice[:1]) < 60]
    second = [job for job in refused if job.retry_advice[0] == 60]
    at_first = np.mean([job.admitted_s is not None and job.attempts <= 2 for job in first])
    at_second = np.mean([job.admitted_s is not None and job.attempts <= 3 for job in second]) if second else 1.0
    carried = np.mean([ticket for _, ticket in refusals])
    later = sum(now > ready_s + 10 for now, _ in refusals)
    print(
        f"\n{len(refused)} refused, {carried:.1%} with a ticket; in at the first retry {at_first:.1%} of {len(first)}, "
        f"at the second {at_second:.1%} of {len(second)}; {later} refused after the start"
    )
    assert min(len(first), len(second)) > 100
    assert carried >= 0.9
    assert at_first >= 0.95
    assert at_second >= 0.95
    assert later <= 0.02 * len(refused)
    assert len(policy.gate.reservations) <= 5


# Several gateways.


def test_split_by_demand_sums_to_cap_and_follows_demand() -> None:
    rng = np.random.default_rng(2)
    for _ in range(300):
        cap, n = int(rng.integers(0, 500)), int(rng.integers(1, 6))
        demand = {f"g{k}": float(rng.exponential()) * float(rng.integers(0, 2)) for k in range(n)}
        shares = split_by_demand(cap, demand)
        assert sum(shares.values()) == cap
        total = sum(demand.values())
        if total and cap >= n:
            rest = cap - n
            assert all(abs(shares[g] - 1 - rest * demand[g] / total) < 1 + 1e-9 for g in demand)
    assert split_by_demand(10, {"a": 0.0, "b": 0.0, "c": 0.0}) == {"a": 4, "b": 3, "c": 3}
    assert split_by_demand(5, {}) == {}


@pytest.mark.parametrize("gateways", [2, 3])
def test_share_allocator_slots_sum_to_cap_on_gateway_loss(gateways: int) -> None:
    rng = np.random.default_rng(gateways)
    names = [f"g{k}" for k in range(gateways)]
    for _ in range(50):
        allocator, alive, cap = ShareAllocator(100), list(names), 100
        using = dict.fromkeys(names, 0)  # what each lets itself have, never told before the ledger grants it
        allocator.rebalance(cap, dict.fromkeys(alive, 1.0))
        assert sum(allocator.granted.values()) == allocator.total_slots == 100
        for step in range(60):
            kind = rng.integers(0, 4)
            if kind == 0:
                cap = int(rng.integers(80, 121)) if step % 3 == 0 else cap
                allocator.rebalance(cap, {g: float(rng.exponential()) for g in alive})
            elif kind == 1:
                g = alive[rng.integers(len(alive))]
                using[g] = min(using[g], max(allocator.limit(g), int(rng.integers(0, 60))))  # streams end
                allocator.confirm(g, using[g])
            elif kind == 2:
                g = alive[rng.integers(len(alive))]
                using[g] = max(using[g], allocator.limit(g))  # news of a grant arrives some time later
            elif step == 30 and len(alive) > 1:
                g = alive.pop()
                using[g] = 0
                allocator.rebalance(cap, dict.fromkeys(alive, 1.0))
            granted = allocator.granted
            assert sum(granted.values()) == allocator.total_slots
            assert all(units >= 0 for units in granted.values())
            assert all(using[g] <= granted[g] for g in alive)
            assert sum(using.values()) <= allocator.total_slots
        for _ in range(2):
            for g in alive:
                using[g] = min(using[g], allocator.limit(g))
                allocator.confirm(g, 0)
        assert sum(allocator.granted.values()) == allocator.total_slots == cap


def test_two_gateways_fill_replica_like_one() -> None:
    whole = fill(gate())[0]
    halves = 0
    for cap in split_by_demand(engine_cost_model(SERVE, ONE_CLASS).batch, {"a": 1.0, "b": 1.0}).values():
        controller = gate(replicas=0)
        controller.set_replicas({"r": cap}, 0.0)
        halves += fill(controller, step_s=0.08)[0]
    assert halves == pytest.approx(whole, rel=0.05)


def test_idle_engine_takes_a_prompt_beyond_the_gateways_share() -> None:
    """Each of eight gateways has an eighth of the KV cache; what fits the engine would never fit one of them."""
    controller = gate(GUIDE, (ClassPolicy("chat", 0, GUIDE.slo),), replicas=0)
    batch, kv_tokens = controller.pool.cost_model.batch, controller.pool.cost_model.kv_tokens
    controller.set_replicas({"r": batch // 8}, 0.0)
    large = make_request("large", prompt_tokens=kv_tokens // 2)
    assert controller.submit(large, 0.0).outcome is AdmissionOutcome.ADMITTED
    assert (
        controller.submit(make_request("second", prompt_tokens=kv_tokens // 2), 0.0).outcome
        is not AdmissionOutcome.ADMITTED
    )


def test_idle_engine_takes_what_it_serves_in_time_again() -> None:
    """The margin for errors of prediction is for contention: nothing is gained by a rejection at an idle engine."""
    controller = gate()
    lengths = range(1000, 30_000, 100)
    longest = next(
        n
        for n in lengths
        if controller.pool.estimate_cost(make_request("x", prompt_tokens=n)).idle_ttft_s > 0.9 * (SLO.ttft_s or 0.0)
    )
    count, now = fill(controller)
    ids = [f"fill{k}" for k in range(count)]
    rejected = False
    while not rejected:
        ids.append(f"q{len(ids)}")
        decision = controller.submit(make_request(ids[-1], now, prompt_tokens=longest), now)
        rejected = decision.outcome is AdmissionOutcome.SHED_SATURATED
        now += 0.001
    for id in ids:
        controller.cancel(id, now)
        controller.complete(id, now)
    assert len(controller.pool) == 0
    assert (
        controller.submit(make_request("alone", now, prompt_tokens=longest), now).outcome is AdmissionOutcome.ADMITTED
    )
