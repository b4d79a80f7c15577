"""The KV cache's blocks: who holds them, what they still know, in which order they are forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from simulated.block_pool import BlockPool


def test_allocate_is_exclusive_and_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(2) == [1, 2]
    assert pool.allocate(2) is None
    assert (pool.used, pool.free) == (2, 1)


def test_released_block_stays_cached_until_reused() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    pool.register(block, 77)
    pool.release([block])
    assert pool.cached_prefix([77]) == [block]
    pool.allocate(2)
    assert pool.cached_prefix([77]) == []


def test_cached_finds_longest_prefix_without_gaps() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3) or []
    for block, content in zip(blocks, (1, 2, 4), strict=True):
        pool.register(block, content)
    assert pool.cached_prefix([1, 2, 3, 4]) == blocks[:2]


def test_eviction_takes_end_of_prompt_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3) or []
    for block in blocks:
        pool.register(block, block * 10)
    pool.release(blocks)
    assert pool.allocate(2) == [3, 2]
    assert pool.cached_prefix([10]) == [1]


def test_eviction_is_least_recently_used() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2) or []
    pool.register(first, 1)
    pool.register(second, 2)
    pool.release([first])
    pool.release([second])
    pool.share([first])
    pool.release([first])
    assert pool.allocate(1) == [second]


def test_shared_block_is_freed_by_its_last_user() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1) or []
    pool.share(blocks)
    pool.release(blocks)
    assert pool.used == 1
    pool.release(blocks)
    assert pool.used == 0


def test_duplicate_content_keeps_the_first_block() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2) or []
    pool.register(first, 5)
    pool.register(second, 5)
    pool.release([second])
    pool.allocate(1)
    assert pool.cached_prefix([5]) == [first]


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=60))
def test_blocks_are_never_lost_or_allocated_twice(moves: list[tuple[int, bool]]) -> None:
    pool, held = BlockPool(8), []
    for number, (count, give) in enumerate(moves):
        if give and (blocks := pool.allocate(count)) is not None:
            for block in blocks:
                pool.register(block, number * 100 + block)
            held.append(blocks)
        elif held:
            pool.release(held.pop(count % len(held)))
        together = [block for blocks in held for block in blocks]
        assert len(together) == len(set(together)) == pool.used
        assert pool.used + pool.free == pool.total == 8
