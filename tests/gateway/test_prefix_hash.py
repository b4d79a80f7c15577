"""Hashes of prompts' beginnings: equal exactly as far as prompts agree, whatever closes their JSON."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from plimsoll.gateway.prefix_hash import BLOCK_BYTES, MAX_BLOCKS, block_hashes


def chat(*said: str, **how: object) -> bytes:
    roles = ("user", "assistant")
    return json.dumps([{"role": roles[k % 2], "content": text} for k, text in enumerate(said)], **how).encode()  # type: ignore[arg-type]


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return [a == b for a, b in zip(one, other, strict=False)].count(True)


def test_hash_covers_all_earlier_blocks() -> None:
    block = b"x" * BLOCK_BYTES
    first, other = block_hashes(block * 3), block_hashes(b"y" + block[1:] + block * 2)
    assert len(set(first)) == 3
    assert not set(first) & set(other)
    assert block_hashes(block * 2 + b"short") == first[:2]
    assert block_hashes(b"") == block_hashes(b"[]") == ()
    assert all(0 <= each < 2**64 for each in first)


def test_hash_count_is_limited() -> None:
    long = block_hashes(b"x" * BLOCK_BYTES * (MAX_BLOCKS + 10))
    assert len(long) == MAX_BLOCKS
    assert long == block_hashes(b"x" * BLOCK_BYTES * MAX_BLOCKS)


@given(st.integers(0, 3 * BLOCK_BYTES), st.text(max_size=40), st.sampled_from([None, 2]))
def test_hashes_are_stable_when_conversation_continues(size: int, answer: str, indent: int | None) -> None:
    """Wherever block ends fall in the frame: the brackets that closed it have moved."""
    begun = block_hashes(chat("q" * size, indent=indent))
    later = block_hashes(chat("q" * size, answer, "and then? " * 100, indent=indent))
    assert later[: len(begun)] == begun
    assert len(later) > len(begun)


@given(st.integers(0, 3 * BLOCK_BYTES))
def test_hashes_are_stable_when_text_continues(size: int) -> None:
    text = "t" * size
    begun = block_hashes(json.dumps(text).encode())
    assert block_hashes(json.dumps(text + "more" * 400).encode())[: len(begun)] == begun


@given(st.binary(max_size=4 * BLOCK_BYTES), st.binary(max_size=4 * BLOCK_BYTES))
def test_hashes_are_shared_exactly_up_to_common_prefix(one: bytes, other: bytes) -> None:
    one, other = one + b"a", other + b"a"  # no frame at the end
    agree = sum(one[:end] == other[:end] for end in range(BLOCK_BYTES, min(len(one), len(other)) + 1, BLOCK_BYTES))
    assert common(block_hashes(one), block_hashes(other)) == agree


def test_hashes_of_common_system_prompt_are_shared() -> None:
    system = "You are a helpful assistant. " * 200
    one, other = block_hashes(chat(system, "a" * 2000)), block_hashes(chat(system, "b" * 2000))
    assert common(one, other) == len(system) // BLOCK_BYTES
