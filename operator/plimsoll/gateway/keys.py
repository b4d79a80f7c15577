"""Is a key that the gateway reads there twice, or written in a way that another parser may read differently?

Problem: of `{"model": "a", "model": "b"}` the engine takes the last; a proxy that takes another one, or that only finds
plainly written keys, charges or routes one model and serves another. A full second parse of every body costs too much.

Idea: only suspicious bodies are parsed slowly: those where the quoted name of such a key occurs twice anywhere, or
where an ASCII letter is written as an escape.
"""

from __future__ import annotations

import json
import re

READ = ("model", "n", "prompt", "messages", "max_tokens", "max_completion_tokens", "stream")

_QUOTED = re.compile(b'"(?:' + "|".join(READ).encode() + b')"')
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7][0-9a-fA-F]")


def suspicious(body: bytes) -> bool:
    """Does this body need `repeated`?"""
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
