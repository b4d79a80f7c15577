"""The KV cache's blocks: who holds them, what they still know, in which order they are forgotten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from simulated.blocks import BlockPool


def test_blocks_are_given_once_and_all_or_none() -> None:
    pool = BlockPool(3)
    assert pool.allocate(2) == [1, 2]
    assert pool.allocate(2) is None
    assert (pool.used, pool.free) == (2, 1)


def test_a_released_block_keeps_its_content_until_it_is_used_anew() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    pool.name(block, 77)
    pool.release([block])
    assert pool.cached([77]) == [block]
    pool.allocate(2)
    assert pool.cached([77]) == []


def test_the_longest_known_beginning_is_found_and_nothing_behind_a_gap() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3) or []
    for block, content in zip(blocks, (1, 2, 4), strict=True):
        pool.name(block, content)
    assert pool.cached([1, 2, 3, 4]) == blocks[:2]


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3) or []
    for block in blocks:
        pool.name(block, block * 10)
    pool.release(blocks)
    assert pool.allocate(2) == [3, 2]
    assert pool.cached([10]) == [1]


def test_what_was_used_last_is_forgotten_last() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2) or []
    pool.name(first, 1)
    pool.name(second, 2)
    pool.release([first])
    pool.release([second])
    pool.share([first])
    pool.release([first])
    assert pool.allocate(1) == [second]


def test_a_shared_block_is_free_when_its_last_user_leaves() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1) or []
    pool.share(blocks)
    pool.release(blocks)
    assert pool.used == 1
    pool.release(blocks)
    assert pool.used == 0


def test_of_two_blocks_with_the_same_content_the_first_stays_known() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2) or []
    pool.name(first, 5)
    pool.name(second, 5)
    pool.release([second])
    pool.allocate(1)
    assert pool.cached([5]) == [first]


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=60))
def test_blocks_are_never_lost_nor_given_twice(moves: list[tuple[int, bool]]) -> None:
    pool, held = BlockPool(8), []
    for number, (count, give) in enumerate(moves):
        if give and (blocks := pool.allocate(count)) is not None:
            for block in blocks:
                pool.name(block, number * 100 + block)
            held.append(blocks)
        elif held:
            pool.release(held.pop(count % len(held)))
        together = [block for blocks in held for block in blocks]
        assert len(together) == len(set(together)) == pool.used
        assert pool.used + pool.free == pool.total == 8
