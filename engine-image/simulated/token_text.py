"""Text to tokens and back, without a tokenizer.

Problem: prompts must have lengths, share prefixes, and answers that come back in the next turn must hit the cache.
Idea: four bytes of UTF-8 are one token, and every word that the engine says has four bytes. A prompt is kept as bytes,
four for each token, padded with zeros; token ids become their four bytes.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from typing import Final

TOKEN_BYTES: Final = 4
_CONSONANTS: Final = "bdfghklmnprstvwz"
_VOWELS: Final = "aeio"
VOCABULARY: Final = tuple(f" {a}{b}{c}" for a in _CONSONANTS for b in _VOWELS for c in _CONSONANTS)
_WORD_STRIDE: Final = 389  # odd, so that a text goes round all words before it repeats one


def encode(text: str) -> bytes:
    """A text's tokens: a quarter of its bytes, rounded up, at least one."""
    raw = text.encode("utf-8", "replace")
    return raw + bytes(-len(raw) % TOKEN_BYTES if raw else TOKEN_BYTES)


def encode_ids(ids: Iterable[int]) -> bytes:
    """The tokens with these ids (their low 32 bits)."""
    return array("I", [one & 0xFFFFFFFF for one in ids]).tobytes()


def count_tokens(tokens: bytes) -> int:
    """How many tokens these are."""
    return len(tokens) // TOKEN_BYTES


def prompt_seed(prompt: bytes) -> int:
    """What decides the answer to a prompt; the same in every process."""
    return zlib.crc32(prompt)


def word(start: int, index: int) -> str:
    """The answer's word number `index` for a prompt of seed `start`."""
    return VOCABULARY[(start + index * _WORD_STRIDE) % len(VOCABULARY)]


def words_between(start: int, first: int, last: int) -> str:
    """The answer's words first..last-1."""
    return "".join([word(start, index) for index in range(first, last)])
