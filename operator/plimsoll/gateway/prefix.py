"""Hashes of a prompt's beginning, by which requests are known that share one.

Problem: engines cache by tokens, which the gateway does not have, and the JSON of a conversation that goes on is not
the JSON it was with something behind it: the brackets that closed it have moved.

Idea: the raw bytes of `messages` or `prompt` stand for the tokens, 4 bytes for one, without the brackets and quotes at
their end. They are hashed in blocks, each with the hash before it as its seed, so that a hash stands for all bytes up
to its block's end. Clients write what they have sent before as they did then; one that writes it otherwise (spaces,
order of keys) is only taken for a new one.
"""

from __future__ import annotations

from typing import Final

from xxhash import xxh3_64_intdigest

BLOCK_BYTES: Final = 512  # 128 tokens
MOST_BLOCKS: Final = 512  # what follows is nobody else's beginning
_MOST_BYTES: Final = BLOCK_BYTES * MOST_BLOCKS
_FRAME: Final = b']}" \t\r\n'


def blocks(prompt: bytes) -> tuple[int, ...]:
    """Chained 64-bit hashes of the whole blocks of a request's `messages` or `prompt`, as raw JSON. Never raises.

    A last block that is not full has none, since engines cache whole blocks. about half a microsecond a block.
    """
    if len(prompt) <= _MOST_BYTES:
        prompt = prompt.rstrip(_FRAME)
    running, whole = 0, min(len(prompt), _MOST_BYTES) // BLOCK_BYTES * BLOCK_BYTES
    return tuple(
        [running := xxh3_64_intdigest(prompt[at : at + BLOCK_BYTES], running) for at in range(0, whole, BLOCK_BYTES)]
    )
