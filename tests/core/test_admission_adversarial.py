"""Admission under what should not happen: broken numbers, hostile clients, replicas that vanish."""

from __future__ import annotations

import math
from random import Random

import pytest

from plimsoll.core.admission import (
    ClassPolicy,
    Decision,
    Gate,
    Ledger,
    Limits,
    Outcome,
    Outlook,
    Request,
    TenantPolicy,
    limits,
    split,
)
from plimsoll.core.admission.fleet import LOOKS
from plimsoll.core.admission.margin import Margin
from plimsoll.core.admission.replica import SOON_S
from plimsoll.core.batch import step_budget_s
from plimsoll.core.knee import Tier
from plimsoll.core.latency import EngineLimits, StepModel, serve_tier
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.slo import Slo
from plimsoll.core.workload import from_samples

HOT = StepModel(4.742e-3, -1.3e-3, 2.265e-5, 1.035e-9, 1.816e-5, 3.048e-8)
SLO = Slo(0.95, 0.5, 0.0, 0.05)
MIX = from_samples([500.0, 1000.0, 2000.0], [0.0, 0.0, 0.0], [100.0, 200.0, 400.0])
TIER = Tier(Role.SERVE, HOT, MIX, EngineLimits(1024, 200_000, 8192), SLO)
CLASSES = (ClassPolicy("high", 1, SLO), ClassPolicy("low", 0, SLO, fill=0.9, guaranteed_share=0.1))
NUMBERS = limits(TIER, CLASSES)
HUGE = 10**18


def gate(replicas: int = 1, outlook: Outlook = Outlook(30.0, 1.0)) -> Gate:  # noqa: B008 - a value
    made = Gate(CLASSES, NUMBERS, {"limited": TenantPolicy(requests_per_s=5.0)})
    made.tick(0.0, outlook)
    made.set_replicas({str(k): NUMBERS.batch for k in range(replicas)}, 0.0)
    return made


def ask(id: str, now: float = 0.0, **other: object) -> Request:
    return Request(**({"id": id, "klass": "high", "tenant": "t", "arrived_s": now, "prompt_tokens": 1000} | other))  # type: ignore[arg-type]


def full(door: Gate, now: float = 0.0) -> float:
    """Fills it with requests f0, f1, ...; returns the time."""
    for k in range(2000):
        if door.offer(ask(f"f{k}", now), now).outcome is not Outcome.ADMITTED:
            door.cancel(f"f{k}", now)
            return now
        now += 0.04
    raise AssertionError("it never fills")


def check(door: Gate) -> None:
    """Nothing is below zero, and what is counted twice agrees."""
    held = running = 0
    for replica in door.fleet.replicas.values():
        sums = (replica.sequences, replica.sequence_tokens, replica.kv_mean, replica.step_s)
        assert all(0 <= value < math.inf for value in sums)
        assert min(replica.counts) >= 0
        assert sum(replica.counts) == len(replica.residents)
        assert replica.sequences == sum(r.need.sequences for r in replica.residents.values())
        assert 0.5 <= replica.pace <= 4.0
        running += len(replica.residents)
    held = door.held
    assert running == len(door.fleet)
    assert 0 <= door.held_work_s < math.inf
    assert (door.held_work_s == 0) == (held == 0)
    assert 0 <= door.tickets.work_s < math.inf
    assert 0 <= door.tickets.coming_s < math.inf
    assert all(count >= 0 for count in door.outcomes.values())


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
def test_broken_requests_are_refused_by_name(broken: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(broken))):
        ask("a", **broken)


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
def test_extreme_requests_get_an_outcome(extreme: dict[str, object]) -> None:
    door = gate()
    decision = door.offer(ask("a", **extreme), 0.0)
    check(door)
    assert decision.outcome in Outcome
    door.end("a", 1.0, HUGE, math.nan)
    check(door)


def test_one_request_larger_than_kv_is_refused_for_good_and_only_it() -> None:
    door = gate()
    decision = door.offer(ask("a", prompt_tokens=300_000), 0.0)
    assert decision.outcome is Outcome.SHED_NO_CAPACITY
    assert decision.told is not None
    assert not decision.told.again
    assert door.offer(ask("b", prompt_tokens=300_000, fallback=True), 0.0).outcome is Outcome.DOWNGRADED
    assert door.offer(ask("c", prompt_tokens=190_000), 0.0).outcome is Outcome.ADMITTED
    assert door.offer(ask("d", prompt_tokens=190_000), 0.0).outcome is Outcome.HELD  # it fits, but not beside the other
    assert door.offer(ask("e", 40.0), 40.0).outcome is Outcome.ADMITTED  # the long prompt has been computed


def test_who_may_go_elsewhere_goes_while_there_is_time_for_it_there() -> None:
    """Held until the last moment, a request would come to the fallback too late for its target."""
    door = gate()
    for n in range(10_000):
        decision = door.offer(ask(f"n{n}", 0.0, fallback=True), 0.0)
        if decision.outcome is not Outcome.ADMITTED:
            break
    assert decision.outcome is Outcome.DOWNGRADED
    assert door.held == 0
    door.set_replicas({}, 1.0)
    assert door.offer(ask("from zero", 1.0, fallback=True), 1.0).outcome is Outcome.DOWNGRADED


def test_more_sequences_than_the_batch_wait_for_an_empty_replica() -> None:
    door = gate()
    assert door.offer(ask("a", sequences=NUMBERS.batch + 10, prompt_tokens=10), 0.0).outcome is Outcome.ADMITTED
    assert door.offer(ask("b", sequences=1100, prompt_tokens=10), 0.0).outcome is Outcome.HELD
    check(door)
    door.end("a", 0.1)
    assert [decision.outcome for decision in door.release(0.1)] == [Outcome.ADMITTED]
    check(door)


@pytest.mark.parametrize(("prompt_tokens", "sequences"), [(199_990, 1), (30_000, 17)])
def test_prompts_that_fit_one_by_one_are_admitted(prompt_tokens: int, sequences: int) -> None:
    """Sequences take turns in the cache of 200,000 tokens, and the context ends an answer."""
    door = gate()
    large = ask("a", prompt_tokens=prompt_tokens, sequences=sequences)
    assert door.offer(large, 0.0).outcome is Outcome.ADMITTED
    assert door.offer(ask("b"), 0.0).outcome is not Outcome.SHED_NO_CAPACITY
    check(door)
    door.end("a", 5.0)
    door.release(5.0)
    assert door.offer(ask("c", 40.0), 40.0).outcome is Outcome.ADMITTED
    check(door)


def test_deadline_in_the_past() -> None:
    door = gate()
    for fallback in (False, True):
        decision = door.offer(ask(f"a{fallback}", 5.0, deadline_s=4.0, fallback=fallback), 5.0)
        assert decision.outcome is Outcome.SHED_DEADLINE
    assert door.offer(ask("late", 5.0), 50.0).outcome is Outcome.SHED_SATURATED
    assert len(door.fleet) == 0


def test_the_clock_goes_backwards() -> None:
    door = gate()
    now = full(door)
    door.offer(ask("h", now), now)
    for back in (now - 100.0, -math.inf, math.nan):
        assert door.release(back) == []
        door.tick(back, Outlook(30.0, 1.0))
        check(door)
    door.end("f0", now - 50.0)
    assert [d.outcome for d in door.release(now - 50.0)] == [Outcome.ADMITTED]
    assert door.offer(ask("i", now - 50.0), now - 50.0).outcome in Outcome
    door.tick(1e12, Outlook(30.0, 1.0))
    check(door)
    with pytest.raises(ValueError, match="now"):
        Gate(CLASSES, NUMBERS, {}).offer(ask("a"), math.nan)


def test_duplicate_ids_are_an_error_and_change_nothing() -> None:
    door = gate()
    door.offer(ask("a"), 0.0)
    with pytest.raises(ValueError, match="'a'"):
        door.offer(ask("a"), 0.0)
    now = full(door, 1.0)
    assert door.offer(ask("h", now), now).outcome is Outcome.HELD
    with pytest.raises(ValueError, match="'h'"):
        door.offer(ask("h", now), now)
    assert door.held == 1
    assert door.end("a", now)
    assert not door.end("a", now)
    assert not door.end("never seen", now)
    check(door)


def test_unknown_class_and_wrong_limits() -> None:
    with pytest.raises(ValueError, match="klass"):
        gate().offer(ask("a", klass="none"), 0.0)
    with pytest.raises(ValueError, match="limits"):
        Gate(CLASSES[:1], NUMBERS, {})
    with pytest.raises(ValueError, match="limits"):
        gate().tick(1.0, Outlook(), limits(TIER, CLASSES[:1]))
    with pytest.raises(ValueError, match="classes"):
        Gate((), NUMBERS, {})
    with pytest.raises(ValueError, match="classes"):
        Gate((CLASSES[0], CLASSES[0]), NUMBERS, {})
    for broken in ({"hold_s": math.nan}, {"guaranteed_share": 2.0}, {"fill": 0.0}):
        with pytest.raises(ValueError, match=next(iter(broken))):
            ClassPolicy("a", 0, SLO, **broken)
    for weight in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="weight"):
            TenantPolicy(weight=weight)


def test_replicas_vanish_while_requests_are_held_and_come_back() -> None:
    door = gate(2)
    now = full(door)
    for k in range(5):
        assert door.offer(ask(f"h{k}", now), now).outcome is Outcome.HELD
    door.set_replicas({}, now)
    assert (len(door.fleet), door.held, door.release(now)) == (0, 5, [])
    assert door.wakes
    assert not door.end("f0", now)
    door.set_replicas({"new": NUMBERS.batch}, now + 0.1)
    assert {d.outcome for d in door.release(now + 0.1)} == {Outcome.ADMITTED}
    door.set_replicas({}, now + 0.2)
    assert door.offer(ask("z", now + 0.2), now + 0.2).outcome is Outcome.HELD
    assert [d.outcome for d in door.release(now + 100)] == [Outcome.SHED_DEADLINE]
    check(door)


def test_a_replica_without_a_share_takes_nothing() -> None:
    door = gate(0)
    door.set_replicas({"a": 0, "b": -3}, 0.0)
    assert door.offer(ask("a"), 0.0).outcome is not Outcome.ADMITTED
    door.set_replicas({"a": 0, "b": 5}, 0.0)
    check(door)


@pytest.mark.parametrize(
    "outlook",
    [
        Outlook(math.nan, math.nan),
        Outlook(math.inf, math.inf),
        Outlook(-math.inf, -1.0),
        Outlook(-5.0, 0.0),
        Outlook(1e300, 1e-300),
        Outlook(None, math.inf),
    ],
)
def test_nonsense_outlooks_never_make_nonsense_tickets(outlook: Outlook) -> None:
    door = gate(1, outlook)
    now = full(door)
    for k in range(200):
        told = door.offer(ask(f"h{k}", now, body_hash=k), now).told
        if told is not None:
            assert told.retry_after_s is None or (told.again and 1 <= told.retry_after_s <= 60)
            assert told.eta_s is None or 0 <= told.eta_s < math.inf
    check(door)


def test_clients_that_never_come_back_leave_nothing() -> None:
    door = gate(0, Outlook(40.0, 5.0))
    for k in range(2000):
        door.offer(ask(f"r{k}", k * 0.01, body_hash=k), k * 0.01)
    assert len(door.tickets) > 100
    for now in range(21, 400):
        door.tick(float(now), Outlook(40.0, 5.0))
        check(door)
    assert (len(door.tickets), door.tickets.work_s, door.tickets.coming_s) == (0, 0.0, 0.0)


def test_a_client_that_ignores_its_ticket_gains_nothing() -> None:
    door = gate(0, Outlook(40.0, 1.0))
    honest = door.offer(ask("honest", body_hash=1), 0.0).told
    for k in range(500):
        door.offer(ask(f"r{k}", k * 0.01, body_hash=2), k * 0.01)
    assert len(door.tickets) == 2
    late = door.offer(ask("late", 5.0, body_hash=3), 5.0).told
    assert honest is not None
    assert honest.eta_s is not None
    assert late is not None
    assert late.eta_s is not None
    assert late.eta_s + 5.0 - honest.eta_s < 0.5  # two places further, not five hundred


def test_a_flood_does_not_push_others_out() -> None:
    door = gate()
    now = full(door)
    for k in range(300):
        door.offer(ask(f"a{k}", now, tenant="flood"), now)
    assert door.offer(ask("b", now, tenant="quiet"), now).outcome is Outcome.HELD
    for k in range(2):
        door.end(f"f{k}", now)
    let_in = [d.id for d in door.release(now)]
    assert now < door.wake_s < now + 0.1  # the room that they leave in its KV is given by and by
    assert "b" in let_in + [d.id for d in door.release(door.wake_s)]


def test_cancelled_requests_leave_nothing() -> None:
    door = gate()
    now = full(door)
    for k in range(3000):
        if door.offer(ask(f"h{k}", now, tenant=f"t{k % 7}"), now).outcome is Outcome.HELD:
            decision = door.cancel(f"h{k}", now)
            assert decision is not None
            assert decision.outcome is Outcome.CLIENT_GONE
    assert door.cancel("h0", now) is None
    assert door.held == 0
    assert door.wake_s == math.inf
    check(door)


class Soak:
    """Random offers, ends, cancels, ticks and vanishing replicas, with what became of each request."""

    def __init__(self) -> None:
        self.random = Random(1)
        self.door = gate(2)
        self.now = 0.0
        self.running: list[str] = []
        self.final: dict[Outcome, int] = dict.fromkeys(Outcome, 0)

    def take(self, *decisions: Decision | None) -> None:
        for decision in decisions:
            if decision is not None and decision.outcome is not Outcome.HELD:
                self.final[decision.outcome] += 1
                if decision.outcome is Outcome.ADMITTED:
                    self.running.append(decision.id)

    def offer(self, k: int) -> None:
        self.now += self.random.expovariate(60.0)
        key = k if self.random.random() < 0.9 else self.random.randrange(k + 1)
        kind = {"klass": "low" if k % 3 else "high", "tenant": f"t{key % 5000}", "body_hash": key}
        asked = ask(f"r{k}", self.now, prompt_tokens=500 + key % 2000, **kind)
        self.take(self.door.offer(asked, self.now))

    def disturb(self, k: int) -> None:
        door, random = self.door, self.random
        if k % 5 == 0:
            if self.running:
                door.end(self.running.pop(random.randrange(len(self.running))), self.now, 200, random.random())
            self.take(*door.release(self.now))
        if k % 50 == 0:
            self.take(door.cancel(f"r{random.randrange(k + 1)}", self.now))
        if k % 2000 == 0:
            door.set_replicas({str(i): NUMBERS.batch for i in range(random.randrange(3))}, self.now)
        if k % 1000 == 0:
            door.tick(self.now, Outlook(self.now + random.uniform(-5, 50), random.uniform(0, 2)))
            check(door)

    def drain(self) -> None:
        while self.running:
            self.now += 0.1
            self.door.end(self.running.pop(), self.now)
            self.take(*self.door.release(self.now))
        for _ in range(5):
            self.now += 100.0
            self.door.tick(self.now, Outlook(None))
            self.take(*self.door.release(self.now))


def test_nothing_leaks_over_100_000_requests() -> None:
    soak = Soak()
    for k in range(100_000):
        soak.offer(k)
        soak.disturb(k)
    soak.drain()
    door = soak.door
    assert sum(soak.final.values()) == 100_000
    assert min(soak.final[o] for o in (Outcome.ADMITTED, Outcome.SHED_SATURATED, Outcome.SHED_STARTING)) > 100
    assert (door.held, len(door.fleet), len(door.tickets), door.tenants_known) == (0, 0, 0, 0)
    assert all(not r.residents and r.kv_mean == 0 and r.sequences == 0 for r in door.fleet.replicas.values())
    check(door)


def test_a_tpot_target_that_no_batch_keeps_still_serves() -> None:
    hopeless = (ClassPolicy("high", 0, Slo(0.95, 0.5, 0.0, 0.001)),)
    door = Gate(hopeless, limits(TIER, hopeless), {})
    door.set_replicas({"a": 100}, 0.0)
    assert sum(door.offer(ask(f"r{k}", k * 0.1), k * 0.1).outcome is Outcome.ADMITTED for k in range(20)) >= 5
    assert step_budget_s(serve_tier(HOT, MIX), math.inf) == math.inf


def test_limits_belong_to_a_tier_that_answers() -> None:
    with pytest.raises(ValueError, match="limits"):
        limits(Tier(Role.PREFILL, HOT, MIX, TIER.limits, SLO), CLASSES)
    with pytest.raises(ValueError, match="limits"):
        limits(TIER, ())
    assert isinstance(NUMBERS, Limits)


def test_a_margin_stays_within_its_bounds() -> None:
    margin = Margin(0.5)
    for error_s in (math.inf, math.nan, -math.inf, 1e300, -1e300, 0.0) * 200:
        margin.observe(error_s)
        assert 0 <= margin.margin_s <= 0.2
    nothing = Margin(None)
    nothing.observe(5.0)
    assert nothing.margin_s == 0


@pytest.mark.parametrize("demand", [math.nan, math.inf, -1.0, 1e308, 0.0])
def test_split_of_nonsense_demand_still_sums_to_the_cap(demand: float) -> None:
    shares = split(7, {"a": demand, "b": 1.0, "c": demand})
    assert sum(shares.values()) == 7
    assert min(shares.values()) >= 1
    assert sum(split(2, {"a": demand, "b": demand, "c": 1.0}).values()) == 2
    with pytest.raises(ValueError, match="cap"):
        split(-1, {"a": 1.0})


def test_a_ledger_without_gateways_keeps_its_units() -> None:
    ledger = Ledger(10)
    assert ledger.gone("nobody") == {}
    assert ledger.confirm("nobody", 5) == {}
    assert ledger.limit("nobody") == 0
    ledger.resplit(10, {"a": 1.0})
    ledger.gone("a")
    assert (ledger.free, ledger.whole) == (10, 10)
    assert ledger.resplit(6, {"b": 1.0}) == {"b": 6}
    with pytest.raises(ValueError, match="cap"):
        Ledger(-1)
    with pytest.raises(ValueError, match="cap"):
        ledger.resplit(-1, {"b": 1.0})


def plainly(door: Gate, request: Request, fill: float, within_s: float, now: float) -> tuple[str | None, float, float]:
    """What `Fleet.place` does, by asking each of a few replicas everything."""
    fleet = door.fleet
    need, budget_s = fleet.need(request), fleet.limits.step_budget_s[0]
    fits = [(r, r.first_token_s(need, now)) for r in fleet.replicas.values() if not r.room_s(need, budget_s, fill, now)]
    behind = [r for r, _ in fits if r.sequences and r.tat_s - now > r.ahead_s]
    free = [(first_s, r.address) for r, first_s in fits if r not in behind]
    again_s = min((max(r.tat_s - r.ahead_s, now + SOON_S) for r in behind), default=math.inf)
    early = [(first_s, address) for first_s, address in free if first_s <= within_s]
    if early:
        first_s, address = min(early, key=lambda each: each[0])
        return address, first_s, again_s
    return None, min((first_s for first_s, _ in free), default=math.inf), again_s


@pytest.mark.parametrize("seed", range(8))
def test_a_place_is_the_one_that_asking_every_replica_everything_gives(seed: int) -> None:
    random, door, now = Random(seed), gate(replicas=LOOKS), 0.0
    running: list[str] = []
    seen = set()
    for k in range(800):
        now += random.expovariate(25.0)
        request = ask(f"r{k}", now, prompt_tokens=random.choice([50, 500, 4000, 30_000]))
        fill, within_s = random.choice([0.5, 1.0]), random.choice([0.02, 0.2, 2.0, math.inf])
        place = door.fleet.place(request, door.fleet.need(request), 0, fill, within_s, now)
        found = None if place.replica is None else place.replica.address
        assert (found, place.first_token_s, place.again_s) == plainly(door, request, fill, within_s, now)
        seen.add((found is None, place.first_token_s < math.inf, place.again_s < math.inf))
        if door.offer(request, now).outcome is Outcome.ADMITTED:
            running.append(request.id)
        if running and random.random() < 0.7:
            door.end(running.pop(random.randrange(len(running))), now, random.randrange(1, 300), 0.1)
            running += [d.id for d in door.release(now) if d.outcome is Outcome.ADMITTED]
    assert {(False, True, False), (False, True, True), (True, True, False)} <= seen
