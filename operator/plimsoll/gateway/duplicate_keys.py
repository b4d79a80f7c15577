"""Detect top-level keys that occur twice or that another parser may read differently.

Problem: for `{"model": "a", "model": "b"}` the engine uses the last key. A proxy that uses another key, or that does
not decode escaped keys, routes one model and serves another. A full second parse of every body is too expensive.

Idea: only suspicious bodies get a strict parse: those where a tracked key occurs twice in quotes, or where an ASCII
letter is escaped. The prompt, which is most of a body, is skipped, because a value has no top-level keys.
"""

from __future__ import annotations

import json
import re
from functools import cache

from plimsoll.gateway.api_routes import BodyForm

TRACKED_KEYS = ("model", "n", "prompt", "prompt_embeds", "messages", "max_tokens", "max_completion_tokens", "stream")
_MORE_KEYS = {
    BodyForm.RESPONSES: ("input", "max_output_tokens", "background", "previous_response_id", "conversation"),
    BodyForm.EMBEDDING: ("input",),
    BodyForm.SCORING: ("query", "queries", "documents", "items", "text_1", "text_2", "data_1", "data_2"),
}
# The usual spelling. If a client writes another one, the whole body is searched.
PROMPT_KEY, MESSAGES_KEY, INPUT_KEY = b'"prompt":', b'"messages":', b'"input":'
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7][0-9a-fA-F]")


@cache
def tracked_keys(form: BodyForm) -> frozenset[str]:
    """Returns the keys that the gateway reads in a body of this form."""
    return frozenset((*TRACKED_KEYS, *_MORE_KEYS.get(form, ())))


@cache
def _quoted_keys(form: BodyForm) -> re.Pattern[bytes]:
    return re.compile(b'"(?:' + "|".join(sorted(tracked_keys(form))).encode() + b')"')


def strip_value(body: bytes, key: bytes, value: bytes) -> bytes:
    """Returns a valid JSON body without the raw JSON `value` of `key`, or unchanged if that is not found.

    A quoted name with a colon is always a key, and its value follows. So it is safe to remove the equal value of
    another object.
    """
    start = body.find(key) + len(key)
    if start < len(key):
        return body
    if body[start : start + 1] == b" ":
        start += 1
    return body[:start] + body[start + len(value) :] if body.startswith(value, start) else body


def needs_strict_parse(body: bytes, form: BodyForm = BodyForm.COMPLETION) -> bool:
    """Whether this body, possibly after `strip_value`, needs `find_duplicate`."""
    quoted_keys = _quoted_keys(form).findall(body)
    if len(quoted_keys) != len(set(quoted_keys)):
        return True
    return b"\\u00" in body and _ESCAPED_LETTER.search(body) is not None


def find_duplicate(body: bytes, form: BodyForm = BodyForm.COMPLETION) -> str | None:
    """Returns the first tracked key that occurs twice at the top level, or None.

    Raises ValueError for invalid JSON and RecursionError for JSON that is nested too deeply.
    """
    pairs = json.loads(body, object_pairs_hook=list, parse_int=_ignore, parse_float=_ignore)
    tracked, found_keys = tracked_keys(form), set[str]()
    for key, _ in pairs if isinstance(pairs, list) else ():
        if key in tracked and key in found_keys:
            return str(key)
        found_keys.add(key)
    return None


def _ignore(_: str) -> None:
    """Skip the conversion of numbers, because one with a million digits would be slow."""
