"""Is a key that the gateway reads there twice, or written in a way that another parser may read differently?

Problem: of `{"model": "a", "model": "b"}` the engine takes the last; a proxy that takes another one, or that only finds
plainly written keys, charges or routes one model and serves another. A full second parse of every body costs too much.

Idea: only suspicious bodies are parsed slowly: those where the quoted name of such a key occurs twice, or where an
ASCII letter is written as an escape. A conversation is not looked at, which is most of a body: inside a value there are
no keys of the top level.
"""

from __future__ import annotations

import json
import re

READ = ("model", "n", "prompt", "messages", "max_tokens", "max_completion_tokens", "stream")

_QUOTED = re.compile(b'"(?:' + "|".join(READ).encode() + b')"')
# As most clients write them; where one does otherwise, the whole body is looked at.
PROMPT, MESSAGES = b'"prompt":', b'"messages":'
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7][0-9a-fA-F]")


def without(body: bytes, key: bytes, value: bytes) -> bytes:
    """The body, valid JSON, without a value of this key, the raw JSON of which is given; whole if it is not found.

    The name of a key in quotes with a colon behind it is one wherever it stands, and what follows is its value. So it
    does no harm to take the value out where another object has the same.
    """
    start = body.find(key) + len(key)
    if start < len(key):
        return body
    if body[start : start + 1] == b" ":
        start += 1
    return body[:start] + body[start + len(value) :] if body.startswith(value, start) else body


def suspicious(body: bytes) -> bool:
    """Does this body, perhaps `without` a value, need `repeated`?"""
    quoted = _QUOTED.findall(body)
    if len(quoted) != len(set(quoted)):
        return True
    return b"\\u00" in body and _ESCAPED_LETTER.search(body) is not None


def repeated(body: bytes) -> str | None:
    """The first key of `READ` that the top level has twice, or None.

    Raises ValueError for what is not JSON and RecursionError for what is nested too deep.
    """
    pairs = json.loads(body, object_pairs_hook=list, parse_int=_ignore, parse_float=_ignore)
    seen: set[str] = set()
    for key, _ in pairs if isinstance(pairs, list) else ():
        if key in READ and key in seen:
            return str(key)
        seen.add(key)
    return None


def _ignore(_: str) -> None:
    """Numbers are not looked at: one of a million digits must not cost anything."""
