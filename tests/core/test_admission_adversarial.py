"""Admission under what should not happen: broken numbers, hostile clients, replicas that vanish."""

from __future__ import annotations

import math
from random import Random

import pytest

from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.capacity_shares import ShareAllocator, split_by_demand
from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.cost_model import ClassPolicy, EngineCostModel, engine_cost_model
from plimsoll.core.admission.placement import CANDIDATES
from plimsoll.core.admission.quota import TenantPolicy
from plimsoll.core.admission.replica import MIN_RETRY_S
from plimsoll.core.admission.request import AdmissionDecision, AdmissionOutcome, AdmissionRequest
from plimsoll.core.admission.ttft_margin import TtftMargin
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.engine_model.batching import step_time_budget_s
from plimsoll.core.engine_model.step_time import EngineLimits, StepModel, serve_tier
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import from_samples

HOT = StepModel(4.742e-3, -1.3e-3, 2.265e-5, 1.035e-9, 1.816e-5, 3.048e-8)
SLO = Slo(0.95, 0.5, 0.0, 0.05)
MIX = from_samples([500.0, 1000.0, 2000.0], [0.0, 0.0, 0.0], [100.0, 200.0, 400.0])
TIER = TierSpec(Role.SERVE, HOT, MIX, EngineLimits(1024, 200_000, 8192), SLO)
CLASSES = (ClassPolicy("high", 1, SLO), ClassPolicy("low", 0, SLO, max_utilization=0.9, guaranteed_share=0.1))
NUMBERS = engine_cost_model(TIER, CLASSES)
HUGE = 10**18


def gate(
    replicas: int = 1,
    announcement: CapacityAnnouncement = CapacityAnnouncement(30.0, 1.0),  # noqa: B008 - a value
) -> AdmissionController:
    made = AdmissionController(CLASSES, NUMBERS, {"limited": TenantPolicy(requests_per_s=5.0)})
    made.tick(0.0, announcement)
    made.set_replicas({str(k): NUMBERS.batch for k in range(replicas)}, 0.0)
    return made


def make_request(id: str, now: float = 0.0, **other: object) -> AdmissionRequest:
    return AdmissionRequest(
        **({"id": id, "request_class": "high", "tenant": "t", "arrived_s": now, "prompt_tokens": 1000} | other)
    )  # type: ignore[arg-type]


def full(controller: AdmissionController, now: float = 0.0) -> float:
    """Fills it with requests f0, f1, ...; returns the time."""
    for k in range(2000):
        if controller.submit(make_request(f"f{k}", now), now).outcome is not AdmissionOutcome.ADMITTED:
            controller.cancel(f"f{k}", now)
            return now
        now += 0.04
    raise AssertionError("it never fills")


def check(controller: AdmissionController) -> None:
    """Nothing is below zero, and what is counted twice agrees."""
    held = running = 0
    for replica in controller.pool.replicas.values():
        sums = (replica.sequences, replica.sequence_tokens, replica.kv_mean_tokens, replica.step_s)
        assert all(0 <= value < math.inf for value in sums)
        assert min(replica.running_per_class) >= 0
        assert sum(replica.running_per_class) == len(replica.running)
        assert replica.sequences == sum(r.cost.sequences for r in replica.running.values())
        assert 0.5 <= replica.step_time_ratio <= 4.0
        running += len(replica.running)
    held = controller.queued
    assert running == len(controller.pool)
    assert 0 <= controller.queued_work_s < math.inf
    assert (controller.queued_work_s == 0) == (held == 0)
    assert 0 <= controller.reservations.work_s < math.inf
    assert 0 <= controller.reservations.pending_work_s < math.inf
    assert all(count >= 0 for count in controller.outcomes.values())


@pytest.mark.parametrize(
    "broken",
    [
        {"prompt_tokens": -1},
        {"prompt_tokens": math.nan},
        {"prompt_tokens": HUGE},
        {"cached_tokens": 1001},
        {"cached_tokens": -1},
        {"cached_tokens": math.nan},
        {"max_tokens": 0},
        {"max_tokens": -5},
        {"max_tokens": math.nan},
        {"sequences": 0},
        {"sequences": HUGE},
        {"sequences": math.nan},
        {"arrived_s": math.nan},
        {"deadline_s": math.nan},
    ],
)
def test_request_invalid_field_raises_error_naming_field(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(broken))):
        make_request("a", **broken)


@pytest.mark.parametrize(
    "extreme",
    [
        {"prompt_tokens": 0},
        {"max_tokens": 1},
        {"max_tokens": HUGE},
        {"cached_tokens": 1000},
        {"deadline_s": math.inf},
        {"deadline_s": -math.inf},
        {"arrived_s": -math.inf},
        {"arrived_s": math.inf},
        {"prompt_tokens": 100_000_000},
        {"sequences": 1_000_000},
        {"idempotency_key": ""},
        {"tenant": ""},
    ],
)
def test_submit_extreme_request_returns_outcome(extreme: dict[str, object]) -> None:
    controller = gate()
    decision = controller.submit(make_request("a", **extreme), 0.0)
    check(controller)
    assert decision.outcome in AdmissionOutcome
    controller.complete("a", 1.0, HUGE, math.nan)
    check(controller)


def test_submit_request_larger_than_kv_is_shed_without_retry() -> None:
    controller = gate()
    decision = controller.submit(make_request("a", prompt_tokens=300_000), 0.0)
    assert decision.outcome is AdmissionOutcome.SHED_NO_CAPACITY
    assert decision.retry is not None
    assert not decision.retry.retryable
    assert (
        controller.submit(make_request("b", prompt_tokens=300_000, has_fallback=True), 0.0).outcome
        is AdmissionOutcome.DOWNGRADED
    )
    assert controller.submit(make_request("c", prompt_tokens=190_000), 0.0).outcome is AdmissionOutcome.ADMITTED
    assert (
        controller.submit(make_request("d", prompt_tokens=190_000), 0.0).outcome is AdmissionOutcome.QUEUED
    )  # it fits, but not beside the other
    assert (
        controller.submit(make_request("e", 40.0), 40.0).outcome is AdmissionOutcome.ADMITTED
    )  # the long prompt has been computed


def test_submit_with_fallback_downgrades_instead_of_queueing() -> None:
    """Held until the last moment, a request would come to the fallback too late for its target."""
    controller = gate()
    for n in range(10_000):
        decision = controller.submit(make_request(f"n{n}", 0.0, has_fallback=True), 0.0)
        if decision.outcome is not AdmissionOutcome.ADMITTED:
            break
    assert decision.outcome is AdmissionOutcome.DOWNGRADED
    assert controller.queued == 0
    controller.set_replicas({}, 1.0)
    assert (
        controller.submit(make_request("from zero", 1.0, has_fallback=True), 1.0).outcome is AdmissionOutcome.DOWNGRADED
    )


def test_submit_sequences_above_batch_need_empty_replica() -> None:
    controller = gate()
    assert (
        controller.submit(make_request("a", sequences=NUMBERS.batch + 10, prompt_tokens=10), 0.0).outcome
        is AdmissionOutcome.ADMITTED
    )
    assert (
        controller.submit(make_request("b", sequences=1100, prompt_tokens=10), 0.0).outcome is AdmissionOutcome.QUEUED
    )
    check(controller)
    controller.complete("a", 0.1)
    assert [decision.outcome for decision in controller.release(0.1)] == [AdmissionOutcome.ADMITTED]
    check(controller)


@pytest.mark.parametrize(("prompt_tokens", "sequences"), [(199_990, 1), (30_000, 17)])
def test_prompts_that_fit_one_by_one_are_admitted(prompt_tokens: int, sequences: int) -> None:
    """Sequences take turns in the cache of 200,000 tokens, and the context ends an answer."""
    controller = gate()
    large = make_request("a", prompt_tokens=prompt_tokens, sequences=sequences)
    assert controller.submit(large, 0.0).outcome is AdmissionOutcome.ADMITTED
    assert controller.submit(make_request("b"), 0.0).outcome is not AdmissionOutcome.SHED_NO_CAPACITY
    check(controller)
    controller.complete("a", 5.0)
    controller.release(5.0)
    assert controller.submit(make_request("c", 40.0), 40.0).outcome is AdmissionOutcome.ADMITTED
    check(controller)


def test_submit_past_deadline_is_shed() -> None:
    controller = gate()
    for fallback in (False, True):
        decision = controller.submit(make_request(f"a{fallback}", 5.0, deadline_s=4.0, has_fallback=fallback), 5.0)
        assert decision.outcome is AdmissionOutcome.SHED_DEADLINE
    assert controller.submit(make_request("late", 5.0), 50.0).outcome is AdmissionOutcome.SHED_SATURATED
    assert len(controller.pool) == 0


def test_controller_clock_going_backwards_keeps_invariants() -> None:
    controller = gate()
    now = full(controller)
    controller.submit(make_request("h", now), now)
    for back in (now - 100.0, -math.inf, math.nan):
        assert controller.release(back) == []
        controller.tick(back, CapacityAnnouncement(30.0, 1.0))
        check(controller)
    controller.complete("f0", now - 50.0)
    assert [d.outcome for d in controller.release(now - 50.0)] == [AdmissionOutcome.ADMITTED]
    assert controller.submit(make_request("i", now - 50.0), now - 50.0).outcome in AdmissionOutcome
    controller.tick(1e12, CapacityAnnouncement(30.0, 1.0))
    check(controller)
    with pytest.raises(ValueError, match="now"):
        AdmissionController(CLASSES, NUMBERS, {}).submit(make_request("a"), math.nan)


def test_submit_duplicate_id_raises_and_changes_nothing() -> None:
    controller = gate()
    controller.submit(make_request("a"), 0.0)
    with pytest.raises(ValueError, match="'a'"):
        controller.submit(make_request("a"), 0.0)
    now = full(controller, 1.0)
    assert controller.submit(make_request("h", now), now).outcome is AdmissionOutcome.QUEUED
    with pytest.raises(ValueError, match="'h'"):
        controller.submit(make_request("h", now), now)
    assert controller.queued == 1
    assert controller.complete("a", now)
    assert not controller.complete("a", now)
    assert not controller.complete("never seen", now)
    check(controller)


def test_controller_unknown_class_or_bad_limits_raises() -> None:
    with pytest.raises(ValueError, match="request_class"):
        gate().submit(make_request("a", request_class="none"), 0.0)
    with pytest.raises(ValueError, match=r"cost[_ ]model"):
        AdmissionController(CLASSES[:1], NUMBERS, {})
    with pytest.raises(ValueError, match=r"cost[_ ]model"):
        gate().tick(1.0, CapacityAnnouncement(), engine_cost_model(TIER, CLASSES[:1]))
    with pytest.raises(ValueError, match="classes"):
        AdmissionController((), NUMBERS, {})
    with pytest.raises(ValueError, match="classes"):
        AdmissionController((CLASSES[0], CLASSES[0]), NUMBERS, {})
    for broken in ({"max_queue_time_s": math.nan}, {"guaranteed_share": 2.0}, {"max_utilization": 0.0}):
        with pytest.raises(ValueError, match=next(iter(broken))):
            ClassPolicy("a", 0, SLO, **broken)
    for weight in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="weight"):
            TenantPolicy(weight=weight)


def test_replica_loss_keeps_queue_until_replicas_return() -> None:
    controller = gate(2)
    now = full(controller)
    for k in range(5):
        assert controller.submit(make_request(f"h{k}", now), now).outcome is AdmissionOutcome.QUEUED
    controller.set_replicas({}, now)
    assert (len(controller.pool), controller.queued, controller.release(now)) == (0, 5, [])
    assert controller.needs_wakeup
    assert not controller.complete("f0", now)
    controller.set_replicas({"new": NUMBERS.batch}, now + 0.1)
    assert {d.outcome for d in controller.release(now + 0.1)} == {AdmissionOutcome.ADMITTED}
    controller.set_replicas({}, now + 0.2)
    assert controller.submit(make_request("z", now + 0.2), now + 0.2).outcome is AdmissionOutcome.QUEUED
    assert [d.outcome for d in controller.release(now + 100)] == [AdmissionOutcome.SHED_STARTING]
    check(controller)


def test_replica_with_zero_share_admits_nothing() -> None:
    controller = gate(0)
    controller.set_replicas({"a": 0, "b": -3}, 0.0)
    assert controller.submit(make_request("a"), 0.0).outcome is not AdmissionOutcome.ADMITTED
    controller.set_replicas({"a": 0, "b": 5}, 0.0)
    check(controller)


@pytest.mark.parametrize(
    "announcement",
    [
        CapacityAnnouncement(math.nan, math.nan),
        CapacityAnnouncement(math.inf, math.inf),
        CapacityAnnouncement(-math.inf, -1.0),
        CapacityAnnouncement(-5.0, 0.0),
        CapacityAnnouncement(1e300, 1e-300),
        CapacityAnnouncement(None, math.inf),
    ],
)
def test_invalid_capacity_announcement_gives_valid_retry_advice(announcement: CapacityAnnouncement) -> None:
    controller = gate(1, announcement)
    now = full(controller)
    for k in range(200):
        advice = controller.submit(make_request(f"h{k}", now, body_hash=k), now).retry
        if advice is not None:
            assert advice.retry_after_s is None or (advice.retryable and 1 <= advice.retry_after_s <= 60)
            assert advice.eta_s is None or 0 <= advice.eta_s < math.inf
    check(controller)


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
    assert (controller.queued, len(controller.pool), len(controller.reservations), controller.known_tenants) == (
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
    assert allocator.remove_gateway("nobody") == {}
    assert allocator.confirm("nobody", 5) == {}
    assert allocator.limit("nobody") == 0
    allocator.rebalance(10, {"a": 1.0})
    allocator.remove_gateway("a")
    assert (allocator.free_slots, allocator.total_slots) == (10, 10)
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
