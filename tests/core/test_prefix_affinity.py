"""Prefix affinity: what is believed to be held, where a talk is at home, and what the fleet makes of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core.admission.capacity_announcement import CapacityAnnouncement
from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.cost_model import ClassPolicy, engine_cost_model
from plimsoll.core.admission.prefix_tokens import PrefixTokens
from plimsoll.core.admission.request import AdmissionDecision, AdmissionOutcome, AdmissionRequest
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.engine_model.step_time import EngineLimits, KvTransfer, StepModel
from plimsoll.core.routing.prefix_index import MIN_SHARED_CONTINUATIONS, PrefixIndex, RecentPrefixes
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import from_samples
from tests.core.admission_engine import PrefixCache

HOT = StepModel(4.742e-3, -1.3e-3, 2.265e-5, 1.035e-9, 1.816e-5, 3.048e-8)  # an 8B on an H200
SLO = Slo(0.95, 0.5, 0.0, 0.05)
SERVE = TierSpec(Role.SERVE, HOT, from_samples([1000.0], [0.0], [200.0]), EngineLimits(1024, 919_824, 8192), SLO)
CHAT = (ClassPolicy("chat", 0, SLO),)
PROMPT = 6400  # tokens, 50 blocks, some 0.15 s


def chain(*seeds: int) -> tuple[int, ...]:
    """Hashes as they come: random, each of its block and all before it."""
    return tuple(hash((seeds[: k + 1], "block")) % 2**64 for k in range(len(seeds)))


def make_prefix_index(capacity: int = 100, addresses: str = "abc") -> PrefixIndex:
    made = PrefixIndex()
    made.set_endpoints(dict.fromkeys(addresses, capacity))
    return made


# What is held.


def test_prefix_index_evicts_ends_before_beginnings() -> None:
    known = make_prefix_index(4)
    known.record("a", [1, 2, 3])
    known.record("a", [1, 9, 8])
    assert known.match_depth_at("a", [1, 2, 3], 3) == 2
    assert known.match_depth_at("a", [1, 9, 8], 3) == 3
    assert known.match_depth_at("b", [1, 2, 3], 3) == 0


@given(st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=60), st.integers(1, 8))
def test_prefix_index_matches_lru_cache(prompts: list[list[int]], capacity: int) -> None:
    recent, cache = RecentPrefixes(capacity), PrefixCache()
    for prompt in prompts:
        blocks = chain(*prompt)
        recent.use("a", blocks)
        cache.use(blocks[:capacity], capacity)
        assert len(recent) == len(cache.blocks) <= capacity
        for other in prompts:
            assert recent.match_depth(chain(*other), len(other)) == cache.hits(chain(*other))


def test_prefix_index_repeated_prompts_stay_bounded() -> None:
    recent = RecentPrefixes(10)
    for _ in range(2000):
        recent.use("a", [1, 2])
        recent.use("a", [1, 2, 3])
    assert len(recent._chains) < 200  # they are swept
    assert recent.match_depth([1, 2, 3], 3) == 3


def test_prefix_index_removed_endpoint_holds_nothing() -> None:
    known = make_prefix_index()
    known.record("a", [1, 2])
    known.set_endpoints({"b": 100})
    assert known.cached_on([1, 2], 2) is None
    known.set_endpoints({"a": 100, "b": 100})
    assert known.match_depth_at("a", [1, 2], 2) == 0


def test_prefix_index_smaller_capacity_evicts() -> None:
    known = make_prefix_index(4)
    known.record("a", [1, 2, 3, 4])
    known.set_endpoints({"a": 2})
    assert known.match_depth_at("a", [1, 2, 3, 4], 4) == 2
    with pytest.raises(ValueError, match="capacity"):
        known.set_endpoints({"a": 0})


# Where a talk is at home.


def test_prefix_home_agrees_across_gateways() -> None:
    system = (11, 12, 13)
    mine, other = make_prefix_index(10_000), make_prefix_index(10_000)
    for number in range(MIN_SHARED_CONTINUATIONS + 1):
        mine.record("abc"[number % 3], chain(*system, 100 + number))
        other.record("cab"[number % 3], chain(*system, 200 + number))
    homes: Counter[str] = Counter()
    for number in range(300):
        begun, later = chain(*system, 1000 + number), chain(*system, 1000 + number, 1, 2)
        home = mine.hash_home(begun, mine.match_depth(begun))
        assert home is not None
        assert other.hash_home(later, other.match_depth(later)) == home
        homes[home] += 1
    assert set(homes) == {"a", "b", "c"}
    assert min(homes.values()) > 50, "the shared beginning does not pile them up"


def test_prefix_home_of_known_or_shared_prefix_is_none() -> None:
    known = make_prefix_index()
    known.record("a", chain(1, 2, 3))
    assert known.hash_home(chain(1, 2, 3, 4), 3) is None
    for number in range(MIN_SHARED_CONTINUATIONS):
        known.record("a", chain(1, 2, 3, 50 + number))
    shared = chain(1, 2, 3)
    assert known.hash_home(shared, known.match_depth(shared)) is None
    assert PrefixIndex().hash_home(chain(1), 0) is None


def test_prefix_home_new_endpoint_moves_few_conversations() -> None:
    few, more = make_prefix_index(addresses="abcd"), make_prefix_index(addresses="abcde")
    moved = [few.hash_home(chain(k), 0) != more.hash_home(chain(k), 0) for k in range(1000)]
    assert 0.1 < sum(moved) / len(moved) < 0.35
    assert all(more.hash_home(chain(k), 0) == "e" for k in range(1000) if moved[k])


# What the fleet makes of it.


def gate(
    tier: TierSpec = SERVE, replicas: str = "abcdefgh", share: float = 1.0, prefills: str = ""
) -> AdmissionController:
    made = AdmissionController(CHAT, engine_cost_model(tier, CHAT), {})
    made.tick(0.0, CapacityAnnouncement())
    units = int(made.pool.cost_model.batch * share)
    made.set_replicas(dict.fromkeys(replicas, units), 0.0, frozenset(prefills))
    return made


def submit_request(
    controller: AdmissionController,
    id: str,
    now: float,
    blocks: tuple[int, ...],
    prompt: int = PROMPT,
    end: bool = True,
) -> AdmissionDecision:
    decision = controller.submit(AdmissionRequest(id, "chat", "t", now, prompt, block_hashes=blocks), now)
    if end and decision.outcome is AdmissionOutcome.ADMITTED:
        controller.complete(id, now + 0.01)
    return decision


def conversation(number: int, blocks: int = 50) -> tuple[int, ...]:
    return chain(*(number * 1000 + k for k in range(blocks)))


def test_admission_cached_prefix_lowers_ttft_and_work() -> None:
    controller = gate()
    first = {k: submit_request(controller, f"a{k}", float(k), conversation(k)) for k in range(12)}
    work_s = controller.offered_work_s
    for k in range(12):
        again = submit_request(controller, f"b{k}", 100.0 + k, conversation(k))
        assert again.address == first[k].address
        assert again.first_token_s < first[k].first_token_s - 0.1
    assert controller.offered_work_s - work_s < 0.5 * work_s


def test_prefix_tokens_repeats_are_ideal_and_routed() -> None:
    controller = gate()
    for now, id in ((0.0, "first"), (100.0, "again")):
        submit_request(controller, id, now, conversation(1))
    assert controller.pool.take_prefix_tokens() == PrefixTokens(2 * PROMPT, PROMPT, PROMPT)
    assert controller.pool.take_prefix_tokens() == PrefixTokens()


def test_prefix_tokens_on_another_replica_are_ideal_alone() -> None:
    controller, units = gate(replicas="a"), 10
    submit_request(controller, "first", 0.0, conversation(1))
    controller.set_replicas({"b": units}, 1.0, frozenset())
    submit_request(controller, "again", 100.0, conversation(1))
    submit_request(controller, "short", 200.0, (), prompt=90)
    assert controller.pool.take_prefix_tokens() == PrefixTokens(2 * PROMPT + 90, PROMPT, 0)


def test_admission_busy_cached_replica_loses_to_idle() -> None:
    controller = gate(replicas="ab")
    holder = submit_request(controller, "a", 0.0, conversation(1)).address
    assert holder is not None
    controller.pool.replicas[holder].prefill_free_s = 10.0 + 0.3
    assert (
        submit_request(controller, "b", 10.0, conversation(1)).address == holder
    )  # 0.3 s of waiting against 0.15 s of everybody's prefill
    controller.pool.replicas[holder].prefill_free_s = 20.0 + 1.0
    assert submit_request(controller, "c", 20.0, conversation(1)).address != holder


def test_admission_cached_prefix_admits_long_prompt() -> None:
    """A prompt that misses its target anywhere else is in time where it is cached."""
    controller = gate()
    blocks, tokens = conversation(1, 200), 200 * 128
    first = submit_request(controller, "first", 0.0, blocks, tokens)
    assert first.first_token_s > 0.5
    again = submit_request(controller, "again", 10.0, blocks, tokens)
    assert (again.address, again.outcome) == (first.address, AdmissionOutcome.ADMITTED)
    assert again.first_token_s < 0.1
    for k in range(3):  # a burst of what is cached, at once
        assert submit_request(controller, f"more{k}", 20.0, blocks, tokens, end=False).address == first.address


def test_admission_shared_prefix_spreads_over_replicas() -> None:
    controller = gate(replicas="ab")
    submit_request(controller, "first", 0.0, conversation(1))
    where = Counter(
        submit_request(controller, f"r{k}", 10.0 + 0.05 * k, conversation(1), end=False).address for k in range(300)
    )
    assert min(where["a"], where["b"]) > 100, "the holder fills, then the other one takes some"


def test_admission_without_blocks_uses_least_loaded() -> None:
    controller = gate(replicas="abc")
    assert [submit_request(controller, f"r{k}", 0.0, (), end=False).address for k in range(3)] == ["a", "b", "c"]


def test_admission_removed_replica_loses_its_cache() -> None:
    controller = gate(replicas="ab")
    first = submit_request(controller, "a", 0.0, conversation(1))
    for replicas in ({}, dict.fromkeys("ab", controller.pool.cost_model.batch)):
        controller.set_replicas(replicas, 1.0)
    assert submit_request(controller, "b", 2.0, conversation(1)).first_token_s == pytest.approx(
        first.first_token_s, rel=0.05
    )


def test_request_cost_cached_blocks_are_bounded_by_tokens() -> None:
    """50 blocks of a prompt of 640 tokens: not 6,400 cached tokens of it, but at most all."""
    controller = gate(replicas="a")
    submit_request(controller, "a", 0.0, conversation(1), 640)
    there = controller.pool.estimate_cost(
        AdmissionRequest("b", "chat", "t", 1.0, 640, block_hashes=conversation(1)[:25] + conversation(2)[:25])
    )
    half = controller.pool.cost_model.request_cost(AdmissionRequest("c", "chat", "t", 1.0, 640, cached_tokens=320))
    assert there == half


def test_two_gateways_route_conversation_to_same_replica() -> None:
    one, other = gate(share=0.5), gate(share=0.5)
    same = sum(
        submit_request(one, f"a{k}", 10.0 * k, conversation(k)).address
        == submit_request(other, f"b{k}", 10.0 * k, conversation(k)).address
        for k in range(50)
    )
    assert same == 50


def test_admission_idle_fleet_fills_all_caches() -> None:
    controller = gate()
    where = Counter(submit_request(controller, f"a{k}", 10.0 * k, conversation(k)).address for k in range(200))
    assert len(where) == 8
    assert max(where.values()) < 60


def test_remote_prefill_prefers_replica_with_cached_prefix() -> None:
    tier = replace(SERVE, role=Role.DECODE, transfer=KvTransfer(32, 128))
    controller = gate(tier, "de", prefills="pqr")
    first = [submit_request(controller, f"a{k}", float(k), conversation(k)) for k in range(3)]
    for k in range(3):
        again = submit_request(controller, f"b{k}", 10.0 + k, conversation(k))
        assert (again.prefill, again.address) == (first[k].prefill, first[k].address)
        assert again.first_token_s < first[k].first_token_s - 0.1
    prefill = first[0].prefill
    assert prefill is not None
    controller.pool.prefill_queues[prefill].submit(2.0, 0.0, 30.0)
    assert submit_request(controller, "busy", 30.0, conversation(0)).prefill != prefill
    controller.set_replicas(dict.fromkeys("de", controller.pool.cost_model.batch), 40.0, frozenset("pqr") - {prefill})
    assert submit_request(controller, "gone", 40.0, conversation(0)).prefill != prefill
