"""Picking against fleets that change under its hands, ties and twins, hashes that collide, and prefixes that are hot.

What a pick says is checked against plain counting, and what is believed to be held against what was sent.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.cost_model import ClassPolicy, engine_cost_model
from plimsoll.core.admission.request import AdmissionOutcome, AdmissionRequest
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.engine_model.step_time import EngineLimits, StepModel
from plimsoll.core.routing.endpoint import Endpoint, EndpointLoad, Leaving, Prompt
from plimsoll.core.routing.inflight_reconciliation import reconcile_inflight
from plimsoll.core.routing.picker import FALLBACKS, EndpointIndex
from plimsoll.core.routing.prefix_index import MIN_SHARED_CONTINUATIONS, PrefixIndex, RecentPrefixes
from plimsoll.core.slo import Slo
from plimsoll.core.types import KV_BLOCK_TOKENS, Role
from plimsoll.core.workload import from_samples

SHORT, LONG = Prompt(KV_BLOCK_TOKENS - 1), Prompt(KV_BLOCK_TOKENS)


def endpoint(address: str, role: Role = Role.SERVE, revision: str = "r1", **changes: bool) -> Endpoint:
    made = Endpoint(address, f"pod-{address}", role, revision, ready=True, routable=role is not Role.PREFILL)
    return replace(made, **changes)


# The fleet


def test_pick_all_draining_endpoints_returns_none() -> None:
    for gone in ({"leaving": Leaving.AT_ONCE}, {"ready": False}, {"ready": False, "leaving": Leaving.HANDS_OVER}):
        draining = EndpointIndex([endpoint(name, **gone) for name in "abc"], {})
        assert draining.pick(LONG) is None
        assert draining.pick_at("a", None, LONG) is None
    assert EndpointIndex([], {}).pick(LONG) is None


def test_pick_at_missing_replica_is_none_prefill_is_replaced() -> None:
    decode, prefill, other = (endpoint("d", Role.DECODE), endpoint("p", Role.PREFILL), endpoint("q", Role.PREFILL))

    def pick_prefill(*endpoints: Endpoint) -> Endpoint | None:
        found = EndpointIndex(endpoints, {}).pick_at("d", "p", LONG)
        assert found is not None
        return found.prefill

    assert pick_prefill(decode, prefill, other) == prefill
    assert pick_prefill(decode, replace(prefill, leaving=Leaving.AT_ONCE), other) == other
    assert pick_prefill(decode) is None
    assert EndpointIndex([prefill], {}).pick_at("d", "p", LONG) is None


def test_pick_new_pod_at_same_address_replaces_old() -> None:
    old, new = endpoint("a", leaving=Leaving.AT_ONCE), replace(endpoint("a"), pod="pod-new")
    for reported in ([old, new], [new, old]):
        found = EndpointIndex(reported, {}).pick(LONG)
        assert found is not None
        assert (found.endpoint, found.fallbacks) == (new, ())


def test_pick_duplicate_address_is_listed_once() -> None:
    found = EndpointIndex([endpoint("a"), endpoint("a"), endpoint("b")], {"a": EndpointLoad(1)}).pick(LONG)
    assert found is not None
    assert [found.endpoint.address, *(spare.address for spare in found.fallbacks)] == ["b", "a"]


def test_pick_same_address_in_two_roles_shares_load() -> None:
    """A pod that was a prefill engine and comes back as a decode engine, while both are told: one load, two orders."""
    fleet = [endpoint(name, Role.DECODE) for name in "abc"] + [endpoint(name, Role.PREFILL) for name in "bcd"]
    loads = {name: EndpointLoad() for name in "abcd"}
    standing, rng = EndpointIndex(fleet, loads), random.Random(1)
    for turn in range(1, 400):
        loads[rng.choice("abcd")].update(rng.randrange(4), turn)
        found = standing.pick(LONG)
        assert found is not None
        assert found.prefill is not None
        best, pick_prefill = loads[found.endpoint.address], loads[found.prefill.address]
        assert (best.inflight, best.last_pick) == min((loads[name].inflight, loads[name].last_pick) for name in "abc")
        assert (pick_prefill.inflight, pick_prefill.last_pick) == min(
            (loads[name].inflight, loads[name].last_pick) for name in "bcd"
        )


def test_pick_large_fleet_always_least_loaded() -> None:
    names = [f"10.{n // 250}.{n % 250}.1:8000" for n in range(3000)]
    loads = {name: EndpointLoad() for name in names}
    standing, rng = EndpointIndex([endpoint(name) for name in names], loads), random.Random(2)
    running: list[str] = []
    for turn in range(1, 5000):
        found = standing.pick(SHORT)
        assert found is not None
        picked = loads[found.endpoint.address]
        assert picked.inflight == 0 or turn > len(names)
        picked.update(picked.inflight + 1, turn)
        running.append(found.endpoint.address)
        if turn > 4500:
            loads[running.pop(rng.randrange(len(running)))].inflight -= 1
    held = [load.inflight for load in loads.values()]
    assert sum(held) == len(running)
    assert max(held) <= 2, "as one queue for all, however many they are"


ENDPOINTS = st.lists(
    st.builds(
        Endpoint,
        address=st.sampled_from("abcdef"),
        pod=st.sampled_from(("old", "new")),
        role=st.sampled_from(Role),
        revision=st.sampled_from(("r1", "r2")),
        ready=st.booleans(),
        leaving=st.sampled_from(Leaving),
        routable=st.booleans(),
    ),
    max_size=12,
)


@given(ENDPOINTS, st.integers(0, 300), st.sampled_from("abcdef"), st.sampled_from([None, *"abcdef"]))
def test_pick_duplicate_and_unknown_endpoints_is_valid(
    endpoints: list[Endpoint], tokens: int, address: str, wished: str | None
) -> None:
    standing = EndpointIndex(endpoints, {"a": EndpointLoad(3, suspect=True), "b": EndpointLoad(2)})
    for found in (standing.pick(Prompt(tokens)), standing.pick_at(address, wished, Prompt(tokens))):
        if found is None:
            continue
        named = (found.endpoint, *found.fallbacks)
        assert len({one.address for one in named}) == len(named) <= 1 + FALLBACKS
        assert all(
            one in endpoints and one.available and one.routable and one.role is not Role.PREFILL for one in named
        )
        if found.prefill is not None:
            assert found.prefill.available
            assert found.prefill.role is Role.PREFILL
            assert {one.revision for one in (*named, found.prefill)} == {found.endpoint.revision}


# Counts


@given(st.lists(st.tuples(st.integers(-3, 3), st.sampled_from([0, 1, 1, 2])), max_size=60))
def test_reconcile_inflight_drift_converges_in_two_reads(steps: list[tuple[int, int]]) -> None:
    """Ours against the proxy's, which is right: requests come and go, and are told once, twice, or never."""
    ours = proxy = 0
    before: int | None = None

    def look() -> None:
        nonlocal ours, before
        difference = proxy - ours
        ours += reconcile_inflight(before, difference)
        assert abs(proxy - ours) <= abs(difference), "no look makes it worse"
        before = difference

    for came, reported in steps:
        moved = max(-proxy, came)
        proxy, ours = proxy + moved, ours + reported * moved
        look()
    for _ in range(3):
        look()
    assert ours == proxy


# Hashes that collide


@given(st.lists(st.lists(st.integers(0, 9), max_size=8), max_size=80), st.lists(st.integers(1, 12), min_size=1))
def test_recent_blocks_hash_collisions_stay_within_capacity(prompts: list[list[int]], capacities: list[int]) -> None:
    """Any numbers in any order, as somebody could make them: a block that stands behind two beginnings."""
    recent = RecentPrefixes(capacities[0])
    for turn, prompt in enumerate(prompts):
        capacity = capacities[turn % len(capacities)]
        recent.resize(capacity)
        assert len(recent) <= capacity
        recent.use("a", prompt)
        assert len(recent) <= capacity
        assert 0 <= recent.match_depth(prompt, len(prompt)) <= len(prompt)
    most = max(capacities)
    recent.resize(most)
    recent.use("b", range(100, 100 + most))  # an honest prompt that fills it
    assert recent.match_depth(range(100, 100 + most), most) == len(recent) == most
    assert not any(recent.match_depth([number], 1) for number in range(10))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 9), max_size=6)), max_size=40), st.data())
def test_prefix_index_hash_collisions_name_known_endpoints(
    sent: list[tuple[str, list[int]]], data: st.DataObject
) -> None:
    held, there = PrefixIndex(), {"a": 3, "b": 5, "c": 1}
    held.set_endpoints(there)
    for address, blocks in sent:
        if data.draw(st.booleans()):
            there = {name: data.draw(st.integers(1, 6)) for name in data.draw(st.sets(st.sampled_from("abc")))}
            held.set_endpoints(there)
        depth = held.match_depth(blocks)
        assert 0 <= depth <= len(blocks)
        for found in (held.cached_on(blocks, depth) if depth else None, held.hash_home(blocks, depth)):
            assert found is None or found in there
        if address in there:
            held.record(address, blocks)


def test_prefix_index_unknown_endpoint_raises() -> None:
    held = PrefixIndex()
    held.set_endpoints({"a": 100})
    held.record("a", [1, 2, 100])
    for number in range(2 * MIN_SHARED_CONTINUATIONS):
        with pytest.raises(KeyError):
            held.record("gone", [1, 2, 300 + number])
        assert held.match_depth([1, 2, 300 + number]) == 2
    assert held.hash_home([1, 2, 99], 2) is None, "that beginning is no shared one: nobody here has gone on from it"


# A prefix that is hot


SLO = Slo(0.95, 0.5, 0.0, 0.05)
HOT = StepModel(4.742e-3, -1.3e-3, 2.265e-5, 1.035e-9, 1.816e-5, 3.048e-8)  # an 8B on an H200
SERVE = TierSpec(Role.SERVE, HOT, from_samples([1000.0], [0.0], [200.0]), EngineLimits(1024, 919_824, 8192), SLO)
CHAT = (ClassPolicy("chat", 0, SLO),)


def gate(replicas: str, now: float = 0.0) -> AdmissionController:
    made = AdmissionController(CHAT, engine_cost_model(SERVE, CHAT), {})
    made.tick(now, CapacityAnnouncement())
    made.set_replicas(dict.fromkeys(replicas, made.pool.cost_model.batch), now)
    return made


@pytest.mark.parametrize("shared", [4, 20, 49])
def test_hot_prefix_spreads_before_slo_is_violated(shared: int) -> None:
    """More than one replica can take, all with one beginning: who holds it is filled, and then the others take it."""
    controller, where = gate("abcd"), Counter[str]()
    beginning = tuple(range(shared))
    for number in range(1200):
        blocks = (*beginning, *(10_000 + 100 * number + k for k in range(50 - shared)))
        now = 10.0 + 0.02 * number
        found = controller.submit(AdmissionRequest(f"r{number}", "chat", "t", now, 6400, block_hashes=blocks), now)
        if found.outcome is AdmissionOutcome.ADMITTED:
            assert found.address is not None
            assert found.first_token_s <= (SLO.ttft_s or 0.0)
            where[found.address] += 1
    assert set(where) == set("abcd"), where
    assert max(where.values()) <= 2 * min(where.values()), where


def test_cached_replica_that_vanished_is_not_awaited() -> None:
    controller, blocks = gate("ab"), tuple(range(50))
    first = controller.submit(AdmissionRequest("first", "chat", "t", 1.0, 6400, block_hashes=blocks), 1.0)
    assert first.address is not None
    (other,) = {"a", "b"} - {first.address}
    controller.set_replicas({other: controller.pool.cost_model.batch}, 2.0)
    again = controller.submit(AdmissionRequest("again", "chat", "t", 2.0, 6400, block_hashes=blocks), 2.0)
    assert (again.outcome, again.address) == (AdmissionOutcome.ADMITTED, other)
    controller.set_replicas({}, 3.0)
    assert controller.submit(AdmissionRequest("late", "chat", "t", 3.0, 6400, block_hashes=blocks), 3.0).address is None
