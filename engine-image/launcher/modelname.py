"""The model's name in requests and responses.

Problem: clients use names that change while engines run, and an engine's names are fixed at its start. Idea: the first
name of an engine never changes. The gateway sends it in a header, and it replaces the client's name in the request. In
the response the client's name replaces it: engines always write their first name there.
"""

from __future__ import annotations

import json
from collections.abc import Callable

Rename = Callable[[bytes], bytes]


def unchanged(chunk: bytes) -> bytes:
    """Return the part of a response unchanged."""
    return chunk


def renaming(own: str, public: str) -> Rename:
    """Return a function that replaces the `model` named `own` by `public` in a response body or in its events.

    Engines write compact JSON, and send each event in one piece. Generated text cannot contain the replaced bytes,
    because quotes are escaped inside JSON strings.
    """
    if not own or not public or own == public:
        return unchanged
    old, new = _field(own), _field(public)
    return lambda chunk: chunk.replace(old, new)


def _field(name: str) -> bytes:
    return f'"model":{json.dumps(name)}'.encode()
