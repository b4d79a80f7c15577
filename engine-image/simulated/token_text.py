"""Converts text to tokens and back, without a tokenizer.

Problem: prompts need lengths and shared prefixes, and an output that comes back in the next turn must hit the cache.
Idea: four bytes of UTF-8 are one token, and every generated word has four bytes. A prompt is stored as bytes, four per
token, padded with zeros; token ids become their four bytes.
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
_WORD_STRIDE: Final = 389  # odd, so that a text uses all words before it repeats one


def encode(text: str) -> bytes:
    """Return a text's tokens: a quarter of its bytes, rounded up, at least one."""
    raw = text.encode("utf-8", "replace")
    return raw + bytes(-len(raw) % TOKEN_BYTES if raw else TOKEN_BYTES)


def encode_ids(ids: Iterable[int]) -> bytes:
    """Return the tokens with these ids (their low 32 bits)."""
    return array("I", [one & 0xFFFFFFFF for one in ids]).tobytes()


def count_tokens(tokens: bytes) -> int:
    """Return the number of tokens."""
    return len(tokens) // TOKEN_BYTES


def prompt_seed(prompt: bytes) -> int:
    """Return the seed of the output of a prompt; the same in every process."""
    return zlib.crc32(prompt)


def word(start: int, index: int) -> str:
    """Return word number `index` of the output for a prompt of seed `start`."""
    return VOCABULARY[(start + index * _WORD_STRIDE) % len(VOCABULARY)]


def words_between(start: int, first: int, last: int) -> str:
    """Return words first..last-1 of the output."""
    return "".join([word(start, index) for index in range(first, last)])
