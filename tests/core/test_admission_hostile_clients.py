"""Admission under floods, disobedient clients and changing state: nothing starves and nothing leaks."""

from __future__ import annotations

import math
from random import Random

import pytest

from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.capacity_shares import ShareAllocator, split_by_demand
from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.cost_model import ClassPolicy, EngineCostModel, engine_cost_model
from plimsoll.core.admission.placement import CANDIDATES
from plimsoll.core.admission.replica import MIN_RETRY_S
from plimsoll.core.admission.request import AdmissionDecision, AdmissionOutcome, AdmissionRequest
from plimsoll.core.admission.ttft_margin import TtftMargin
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.engine_model.batching import step_time_budget_s
from plimsoll.core.engine_model.step_time import serve_tier
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from tests.core.admission_invariants import CLASSES, HOT, MIX, NUMBERS, SLO, TIER, check, full, gate, make_request


def test_unclaimed_reservations_expire_completely() -> None:
    controller = gate(0, CapacityAnnouncement(40.0, 5.0))
    for k in range(2000):
        controller.submit(make_request(f"r{k}", k * 0.01, body_hash=k), k * 0.01)
    assert len(controller.reservations) > 100
    for now in range(21, 400):
        controller.tick(float(now), CapacityAnnouncement(40.0, 5.0))
        check(controller)
    assert (len(controller.reservations), controller.reservations.work_s, controller.reservations.pending_work_s) == (
        0,
        0.0,
        0.0,
    )


def test_client_ignoring_retry_advice_gains_one_reservation() -> None:
    controller = gate(0, CapacityAnnouncement(40.0, 1.0))
    honest = controller.submit(make_request("honest", body_hash=1), 0.0).retry
    for k in range(500):
        controller.submit(make_request(f"r{k}", k * 0.01, body_hash=2), k * 0.01)
    assert len(controller.reservations) == 2
    late = controller.submit(make_request("late", 5.0, body_hash=3), 5.0).retry
    assert honest is not None
    assert honest.eta_s is not None
    assert late is not None
    assert late.eta_s is not None
    assert late.eta_s + 5.0 - honest.eta_s < 0.5  # two places further, not five hundred


def test_tenant_flood_does_not_starve_other_tenant() -> None:
    controller = gate()
    now = full(controller)
    for k in range(300):
        controller.submit(make_request(f"a{k}", now, tenant="flood"), now)
    assert controller.submit(make_request("b", now, tenant="quiet"), now).outcome is AdmissionOutcome.QUEUED
    for k in range(2):
        controller.complete(f"f{k}", now)
    let_in = [d.request_id for d in controller.release(now)]
    assert now < controller.wake_at_s < now + 0.1  # the room that they leave in its KV is given by and by
    assert "b" in let_in + [d.request_id for d in controller.release(controller.wake_at_s)]


def test_cancel_queued_requests_leaves_no_state() -> None:
    controller = gate()
    now = full(controller)
    for k in range(3000):
        if controller.submit(make_request(f"h{k}", now, tenant=f"t{k % 7}"), now).outcome is AdmissionOutcome.QUEUED:
            decision = controller.cancel(f"h{k}", now)
            assert decision is not None
            assert decision.outcome is AdmissionOutcome.CLIENT_GONE
    assert controller.cancel("h0", now) is None
    assert controller.queued == 0
    assert controller.wake_at_s == math.inf
    check(controller)


class Soak:
    """Random offers, ends, cancels, ticks and vanishing replicas, with what became of each request."""

    def __init__(self) -> None:
        self.random = Random(1)
        self.controller = gate(2)
        self.now = 0.0
        self.running: list[str] = []
        self.final: dict[AdmissionOutcome, int] = dict.fromkeys(AdmissionOutcome, 0)

    def take(self, *decisions: AdmissionDecision | None) -> None:
        for decision in decisions:
            if decision is not None and decision.outcome is not AdmissionOutcome.QUEUED:
                self.final[decision.outcome] += 1
                if decision.outcome is AdmissionOutcome.ADMITTED:
                    self.running.append(decision.request_id)

    def offer(self, k: int) -> None:
        self.now += self.random.expovariate(60.0)
        key = k if self.random.random() < 0.9 else self.random.randrange(k + 1)
        kind = {"request_class": "low" if k % 3 else "high", "tenant": f"t{key % 5000}", "body_hash": key}
        request = make_request(f"r{k}", self.now, prompt_tokens=500 + key % 2000, **kind)
        self.take(self.controller.submit(request, self.now))

    def disturb(self, k: int) -> None:
        controller, random = self.controller, self.random
        if k % 5 == 0:
            if self.running:
                controller.complete(
                    self.running.pop(random.randrange(len(self.running))), self.now, 200, random.random()
                )
            self.take(*controller.release(self.now))
        if k % 50 == 0:
            self.take(controller.cancel(f"r{random.randrange(k + 1)}", self.now))
        if k % 2000 == 0:
            controller.set_replicas({str(i): NUMBERS.batch for i in range(random.randrange(3))}, self.now)
        if k % 1000 == 0:
            controller.tick(self.now, CapacityAnnouncement(self.now + random.uniform(-5, 50), random.uniform(0, 2)))
            check(controller)

    def drain(self) -> None:
        while self.running:
            self.now += 0.1
            self.controller.complete(self.running.pop(), self.now)
            self.take(*self.controller.release(self.now))
        for _ in range(5):
            self.now += 100.0
            self.controller.tick(self.now, CapacityAnnouncement(None))
            self.take(*self.controller.release(self.now))


def test_controller_100k_requests_leaks_no_state() -> None:
    soak = Soak()
    for k in range(100_000):
        soak.offer(k)
        soak.disturb(k)
    soak.drain()
    controller = soak.controller
    assert sum(soak.final.values()) == 100_000
    assert (
        min(
            soak.final[o]
            for o in (AdmissionOutcome.ADMITTED, AdmissionOutcome.SHED_SATURATED, AdmissionOutcome.SHED_STARTING)
        )
        > 100
    )
    assert (controller.queued, len(controller.pool), len(controller.reservations), len(controller._queue.accounts)) == (
        0,
        0,
        0,
        0,
    )
    assert all(not r.running and r.kv_mean_tokens == 0 and r.sequences == 0 for r in controller.pool.replicas.values())
    check(controller)


def test_infeasible_tpot_target_still_admits_requests() -> None:
    hopeless = (ClassPolicy("high", 0, Slo(0.95, 0.5, 0.0, 0.001)),)
    controller = AdmissionController(hopeless, engine_cost_model(TIER, hopeless), {})
    controller.set_replicas({"a": 100}, 0.0)
    assert (
        sum(
            controller.submit(make_request(f"r{k}", k * 0.1), k * 0.1).outcome is AdmissionOutcome.ADMITTED
            for k in range(20)
        )
        >= 5
    )
    assert step_time_budget_s(serve_tier(HOT, MIX), math.inf) == math.inf


def test_cost_model_rejects_prefill_tier_and_no_classes() -> None:
    with pytest.raises(ValueError, match=r"cost[_ ]model"):
        engine_cost_model(TierSpec(Role.PREFILL, HOT, MIX, TIER.limits, SLO), CLASSES)
    with pytest.raises(ValueError, match=r"cost[_ ]model"):
        engine_cost_model(TIER, ())
    assert isinstance(NUMBERS, EngineCostModel)


def test_ttft_margin_extreme_errors_stays_bounded() -> None:
    margin = TtftMargin(0.5)
    for error_s in (math.inf, math.nan, -math.inf, 1e300, -1e300, 0.0) * 200:
        margin.observe(error_s)
        assert 0 <= margin.margin_s <= 0.25
    nothing = TtftMargin(None)
    nothing.observe(5.0)
    assert nothing.margin_s == 0


@pytest.mark.parametrize("demand", [math.nan, math.inf, -1.0, 1e308, 0.0])
def test_split_by_demand_invalid_demand_still_sums_to_cap(demand: float) -> None:
    shares = split_by_demand(7, {"a": demand, "b": 1.0, "c": demand})
    assert sum(shares.values()) == 7
    assert min(shares.values()) >= 1
    assert sum(split_by_demand(2, {"a": demand, "b": demand, "c": 1.0}).values()) == 2
    with pytest.raises(ValueError, match="cap"):
        split_by_demand(-1, {"a": 1.0})


def test_share_allocator_without_gateways_keeps_slots() -> None:
    allocator = ShareAllocator(10)
    assert allocator.confirm("nobody", 5) == {}
    assert allocator.limit("nobody") == 0
    allocator.rebalance(10, {"a": 1.0})
    assert allocator.rebalance(10, {}) == {}
    assert allocator.total_slots == 10
    assert allocator.rebalance(6, {"b": 1.0}) == {"b": 6}
    with pytest.raises(ValueError, match="cap"):
        ShareAllocator(-1)
    with pytest.raises(ValueError, match="cap"):
        allocator.rebalance(-1, {"b": 1.0})


def plainly(
    controller: AdmissionController, request: AdmissionRequest, fill: float, within_s: float, now: float
) -> tuple[str | None, float, float]:
    """What `Fleet.place` does, by asking each of a few replicas everything. When to come back only where none can."""
    fleet = controller.pool
    need, budget_s = fleet.estimate_cost(request), fleet.cost_model.step_budget_s[0]
    room_at_s = {r.address: r.room_at_s(need, budget_s, fill, now) for r in fleet.replicas.values()}
    fits = [(r, r.predict_ttft_s(need, now)) for r in fleet.replicas.values() if not room_at_s[r.address]]
    behind = [r for r, _ in fits if r.sequences and r.prefill_tat_s - now > r.max_prefill_ahead_s]
    free = [(first_s, r.address) for r, first_s in fits if r not in behind]
    again_s = min((max(r.prefill_tat_s - r.max_prefill_ahead_s, now + MIN_RETRY_S) for r in behind), default=math.inf)
    again_s = min(again_s, *(at_s or math.inf for at_s in room_at_s.values()))
    early = [(first_s, address) for first_s, address in free if first_s <= within_s]
    if early:
        first_s, address = min(early, key=lambda each: each[0])
        return address, first_s, math.inf
    return None, min((first_s for first_s, _ in free), default=math.inf), again_s


@pytest.mark.parametrize("seed", range(8))
def test_placement_matches_exhaustive_search(seed: int) -> None:
    random, controller, now = Random(seed), gate(replicas=CANDIDATES), 0.0
    running: list[str] = []
    visited = set()
    for k in range(800):
        now += random.expovariate(25.0)
        request = make_request(f"r{k}", now, prompt_tokens=random.choice([50, 500, 4000, 30_000]))
        fill, within_s = random.choice([0.5, 1.0]), random.choice([0.02, 0.2, 2.0, math.inf])
        place = controller.pool.place(request, controller.pool.estimate_cost(request), 0, fill, within_s, now)
        found = None if place.replica is None else place.replica.address
        again_s = math.inf if found else place.retry_at_s
        assert (found, place.first_token_s, again_s) == plainly(controller, request, fill, within_s, now)
        visited.add((found is None, place.first_token_s < math.inf, place.retry_at_s < math.inf))
        if controller.submit(request, now).outcome is AdmissionOutcome.ADMITTED:
            running.append(request.id)
        if running and random.random() < 0.7:
            controller.complete(running.pop(random.randrange(len(running))), now, random.randrange(1, 300), 0.1)
            running += [d.request_id for d in controller.release(now) if d.outcome is AdmissionOutcome.ADMITTED]
    assert {(False, True, False), (False, True, True), (True, True, False)} <= visited
