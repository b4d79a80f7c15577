"""The KV cache's blocks: which are free, which a later prompt finds, in which order they are forgotten."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.sim.engine.kv_cache import KvCache
from plimsoll.sim.engine.sequence import EngineSequence

SIZE = 4


@dataclass
class Cache:
    """A cache whose names stand for single blocks, and sequences named by what they contain."""

    kv: KvCache
    serial: int = 0

    def hold(self, names: tuple[int, ...], rest: int = 1) -> EngineSequence:
        """A sequence whose prompt has these blocks and `rest` more tokens, computed at once."""
        self.serial += 1
        sequence = EngineSequence(self.serial, SIZE * len(names) + rest, 1, names)
        assert self.kv.allocate_next(sequence, sequence.prompt_tokens)
        sequence.computed_tokens = sequence.prompt_tokens
        self.kv.register_computed(sequence)
        return sequence

    def cached(self, *names: int) -> int:
        """Blocks that a prompt which begins so would find."""
        requested = EngineSequence(0, SIZE * len(names) + 1, 1, names)
        assert self.kv.allocate_next(requested, 1)
        self.kv.release(requested)
        return requested.cached_tokens // SIZE


def make_cache(total: int, **options: bool) -> Cache:
    return Cache(KvCache(total, SIZE, SIZE, **options))


def test_allocation_is_all_or_nothing() -> None:
    cache = make_cache(3)
    cache.hold((), rest=8)
    late = EngineSequence(9, 8, 1)
    assert not cache.kv.allocate_next(late, 8)
    assert (cache.kv.used, cache.kv.free, late.own_blocks) == (2, 1, 0)


def test_released_blocks_stay_cached_until_reused() -> None:
    cache = make_cache(4)
    cache.kv.release(cache.hold((7,)))
    assert cache.cached(7) == 1
    cache.kv.release(cache.hold((), rest=16))
    assert cache.cached(7) == 0


def test_cached_prefix_has_no_gaps() -> None:
    cache = make_cache(9)
    cache.hold((1, 2, 4))
    assert cache.cached(1, 2, 3, 4) == 2


def test_eviction_takes_end_of_prompt_first() -> None:
    cache = make_cache(5)
    cache.kv.release(cache.hold((10, 20, 30)))
    held = cache.hold((), rest=16)
    cache.kv.release(held)
    assert cache.cached(10, 20, 30) == 1


def test_eviction_is_least_recently_used() -> None:
    cache = make_cache(4)
    for name in (1, 2, 1):
        cache.kv.release(cache.hold((name,)))
    cache.kv.release(cache.hold((), rest=12))
    assert (cache.cached(1), cache.cached(2)) == (1, 0)


def test_shared_block_is_freed_by_its_last_user() -> None:
    cache = make_cache(4)
    first, second = cache.hold((5,)), cache.hold((5,))
    assert cache.kv.used == 3
    cache.kv.release(first)
    assert cache.kv.used == 2
    cache.kv.release(second)
    assert cache.kv.used == 0


@pytest.mark.parametrize("goes_on", [False, True])
def test_block_after_duplicate_is_named_as_requested(goes_on: bool) -> None:
    """Two sequences compute the same beginning at once; what only the second one has follows it."""
    cache = make_cache(12, names_after_duplicate=goes_on)
    twins = [EngineSequence(n, 9, 1, names) for n, names in enumerate(((5, 6), (5, 7)))]
    for sequence in twins:
        assert cache.kv.allocate_next(sequence, 9)
    for sequence in twins:
        sequence.computed_tokens = 9
        cache.kv.register_computed(sequence)
    assert (cache.cached(5, 6), cache.cached(5, 7)) == (2, 1 + goes_on)
    for sequence in twins:
        cache.kv.release(sequence)
    assert cache.kv.used == 0


@pytest.mark.parametrize("named", [False, True])
def test_generated_tokens_are_named_as_requested(named: bool) -> None:
    cache = make_cache(9, names_answers=named)
    sequence = EngineSequence(1, 5, 8, (1, 2, 3))
    assert cache.kv.allocate_next(sequence, 5)
    sequence.computed_tokens, sequence.scheduled_output = 5, 1
    cache.kv.register_computed(sequence)
    assert cache.kv.grow(sequence, 12)
    sequence.computed_tokens = 12
    cache.kv.release(sequence)
    assert cache.cached(1, 2, 3) == (3 if named else 1)
    assert cache.kv.used == 0


@given(st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=4), st.integers(1, 6), st.booleans()), max_size=60))
def test_blocks_are_never_lost(moves: list[tuple[list[int], int, bool]]) -> None:
    cache, held = make_cache(8, names_answers=True, names_after_duplicate=True), []
    for number, (content, rest, takes) in enumerate(moves):
        if takes or not held:
            names = tuple(hash(tuple(content[: end + 1])) for end in range(len(content)))
            sequence = EngineSequence(number, SIZE * len(names) + rest, 1, names)
            if cache.kv.allocate_next(sequence, sequence.prompt_tokens):
                sequence.computed_tokens = sequence.prompt_tokens
                cache.kv.register_computed(sequence)
                held.append(sequence)
        else:
            cache.kv.release(held.pop(rest % len(held)))
        own = sum(sequence.own_blocks for sequence in held)
        assert own + len({name for sequence in held for name in sequence.held_names}) == cache.kv.used
        assert 0 <= cache.kv.used <= 8
