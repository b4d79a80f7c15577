"""Prefix affinity: chained hashes, what is believed to be held, and a replay of shared beginnings."""

from __future__ import annotations

import csv
import gzip
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core.picking.affinity import MOST_BLOCKS, SHARED, Held, block_hashes, choose

TRACE = Path(__file__).parent / "data" / "mooncake" / "synthetic.csv.gz"
BLOCK_TOKENS = 512
IDLE = {"a": 0.0, "b": 0.0, "c": 0.0}


def test_hashes_stand_for_all_that_came_before() -> None:
    first, second = block_hashes(b"aaaabbbbcccc", 4), block_hashes(b"aaaaXXXXcccc", 4)
    assert first[0] == second[0]
    assert not set(first[1:]) & set(second[1:])
    assert block_hashes(b"aaaabbbbccc", 4) == first[:2], "a block that is not full is not cached as one"
    assert len(block_hashes(b"x" * 10_000, 1)) == MOST_BLOCKS
    with pytest.raises(ValueError, match="block_bytes"):
        block_hashes(b"x", 0)


@given(st.binary(max_size=60), st.binary(max_size=60), st.integers(1, 8))
def test_prompts_share_hashes_exactly_as_far_as_they_agree(one: bytes, other: bytes, size: int) -> None:
    agree = sum(1 for k in range(1, min(len(one), len(other)) // size + 1) if one[: k * size] == other[: k * size])
    pairs = zip(block_hashes(one, size), block_hashes(other, size), strict=False)
    assert [a == b for a, b in pairs].count(True) == agree


def test_ends_are_forgotten_before_beginnings() -> None:
    held = Held(4)
    held.sent("a", [1, 2, 3])
    held.sent("a", [1, 9, 8])
    assert held.depth("a", [1, 2, 3]) == 2
    assert held.depth("a", [1, 9, 8]) == 3
    assert held.depth("b", [1, 2, 3]) == 0


def test_an_endpoint_that_was_gone_holds_nothing() -> None:
    held = Held(4)
    held.sent("a", [1, 2])
    held.keep({"b"})
    assert held.depth("a", [1, 2]) == 0


@given(st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=30), st.integers(1, 8))
def test_no_more_is_remembered_than_fits(prompts: list[list[int]], capacity: int) -> None:
    held, chains = Held(capacity), [[hash(tuple(p[: k + 1])) for k in range(len(p))] for p in prompts]
    for chain in chains:
        held.sent("a", chain)
        assert held.depth("a", chain) == min(len(chain), capacity)
    nodes = {block for chain in chains for block in chain}
    assert sum(held.depth("a", [block]) for block in nodes) <= capacity


def test_a_cache_is_worth_the_prefill_that_it_saves_and_no_more() -> None:
    held = Held(100)
    held.sent("b", [1, 2, 3, 4])
    prefill_s = lambda depth: 1.0 - 0.2 * depth  # noqa: E731
    assert choose(held, [1, 2, 3, 4], IDLE, prefill_s) == "b"
    assert choose(held, [1, 2, 3, 4], {"a": 0.0, "b": 0.79}, prefill_s) == "b"
    assert choose(held, [1, 2, 3, 4], {"a": 0.0, "b": 0.81}, prefill_s) == "a"
    with pytest.raises(ValueError, match="at least one"):
        choose(held, [1], {}, prefill_s)


def test_gateways_agree_on_a_conversation_that_only_one_of_them_saw() -> None:
    system = [1, 2]
    mine, other = Held(1000), Held(1000)
    for held in (mine, other):
        for number in range(SHARED + 1):
            held.sent("abc"[number % 3], [*system, 100 + number])
    prefill_s = lambda depth: 2.0 - 0.1 * depth  # noqa: E731
    chosen = Counter()
    for number in range(300):
        begun = [*system, 1000 + number]
        first = choose(mine, begun, IDLE, prefill_s, elsewhere=0.5)
        mine.sent(first, begun)
        later = [*begun, 5000 + number, 6000 + number]
        assert choose(other, later, IDLE, prefill_s, elsewhere=0.5) == first
        chosen[first] += 1
    assert min(chosen.values()) > 60, "the shared beginning does not pile them up"


@dataclass(frozen=True)
class Replay:
    """hits: share of the ideal, one endless cache for all. p95_s: of TTFT."""

    hits: float
    p95_s: float


class Cache:
    """What an engine really holds: least recently used blocks go, ends first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def use(self, blocks: list[int]) -> int:
        hits = next((k for k, block in enumerate(blocks) if block not in self._blocks), len(blocks))
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return hits


def requests() -> Iterator[tuple[float, int, list[int]]]:
    with gzip.open(TRACE, "rt") as lines:
        for row in csv.DictReader(lines):
            runs = (run.partition("-") for run in row["blocks"].split())
            blocks = [block for low, _, high in runs for block in range(int(low), int(high or low) + 1)]
            yield float(row["arrival_s"]), int(row["prompt_tokens"]), blocks


def prefill_s(tokens: int, cached: int) -> float:
    """An 8B model on one H200."""
    fresh = max(tokens - cached, 1)
    return 0.005 + 4.6e-5 * fresh + 2.2e-9 * fresh * (cached + fresh / 2)


Chooser = Callable[[int, list[int], dict[str, float], Callable[[int], float]], str]


def replay(choice: Chooser, engines: int = 6, capacity: int = 5600) -> Replay:
    """Engines that prefill first come, first served, and what a router makes of them."""
    caches = {f"10.0.0.{k}:8000": Cache(capacity) for k in range(engines)}
    free = dict.fromkeys(caches, 0.0)
    endless, hits, ideal, ttft = Cache(10**9), 0, 0, []
    for number, (at_s, tokens, blocks) in enumerate(requests()):
        ahead = {address: max(0.0, until - at_s) for address, until in free.items()}
        after = lambda depth, tokens=tokens: prefill_s(tokens, min(depth * BLOCK_TOKENS, tokens - 1))  # noqa: E731
        address = choice(number, blocks, ahead, after)
        found = caches[address].use(blocks)
        hits, ideal = hits + found, ideal + endless.use(blocks)
        ttft.append(ahead[address] + after(found))
        free[address] = at_s + ttft[-1]
    return Replay(hits / ideal, float(np.quantile(ttft, 0.95)))


def by_affinity(gateways: int, elsewhere: float) -> Chooser:
    helds = [Held(5600) for _ in range(gateways)]

    def choice(number: int, blocks: list[int], ahead: dict[str, float], after: Callable[[int], float]) -> str:
        held = helds[number % gateways]
        address = choose(held, blocks, ahead, after, elsewhere)
        held.sent(address, blocks)
        return address

    return choice


def test_a_replay_of_shared_beginnings() -> None:
    least = replay(lambda number, blocks, ahead, after: min(ahead, key=lambda address: ahead[address]))
    alone = replay(by_affinity(1, 0.0))
    silent = replay(by_affinity(3, 0.0))
    agreed = replay(by_affinity(3, 2 / 3))
    print(f"{least=} {alone=} {silent=} {agreed=}")
    assert alone.hits >= 0.9
    assert alone.p95_s <= least.p95_s
    assert silent.hits < agreed.hits
    assert agreed.p95_s <= least.p95_s
