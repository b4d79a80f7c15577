"""The model's name in requests and in answers.

Problem: clients call a model by names that change while its engines run, and an engine takes its names at its start.
Idea: the first name of an engine never changes. The gateway sends it in a header, and it replaces the client's name in
the request. The answer gets the client's name back: engines write the first name there, whatever name the request had.
"""

from __future__ import annotations

import json
from collections.abc import Callable

Rename = Callable[[bytes], bytes]


def unchanged(chunk: bytes) -> bytes:
    """Returns the part of an answer as it is."""
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
