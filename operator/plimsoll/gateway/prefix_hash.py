"""Prefix hashes of a prompt, which identify requests that share a prefix.

Problem: engines cache by tokens, which the gateway does not have. The JSON of a continued conversation is not an
extension of the earlier JSON, because the closing brackets move.

Idea: the raw bytes of `tools` and `messages`, or of `prompt`, without trailing brackets and quotes, stand for the
tokens (4 bytes per token). Each block is hashed with the previous hash as its seed, so a hash identifies all bytes up
to the end of its block. Clients usually repeat earlier messages byte for byte. If one changes spaces or key order, the
prompt counts as new.
"""

from __future__ import annotations

from typing import Final

from xxhash import xxh3_64_intdigest

BLOCK_BYTES: Final = 512  # 128 tokens
MAX_BLOCKS: Final = 512  # later blocks are rarely shared
_MAX_BYTES: Final = BLOCK_BYTES * MAX_BLOCKS
_TRAILING_SYNTAX: Final = b']}" \t\r\n'


def block_hashes(prompt: bytes, scope: str = "") -> tuple[int, ...]:
    """Returns the chained 64-bit hashes of the full blocks of `messages` or `prompt` as raw JSON. Never raises.

    Prompts of different scopes share no hash, because engines share no KV blocks between them.

    A partial last block has no hash, because engines cache only full blocks. The cost is about 0.5 us per block.
    """
    if len(prompt) <= _MAX_BYTES:
        prompt = prompt.rstrip(_TRAILING_SYNTAX)
    last_hash = xxh3_64_intdigest(scope.encode()) if scope else 0
    block_end = min(len(prompt), _MAX_BYTES) // BLOCK_BYTES * BLOCK_BYTES
    return tuple(
        [
            last_hash := xxh3_64_intdigest(prompt[offset : offset + BLOCK_BYTES], last_hash)
            for offset in range(0, block_end, BLOCK_BYTES)
        ]
    )
