"""Validation errors in plain words.

pydantic speaks to programmers; a platform engineer reads these sentences in a condition. Each begins with the full path
of the field, written as the API server writes it: `spec.engine.env[0].name`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from plimsoll.api.v1alpha1.base import BROKEN

_LONGEST = 100  # characters of a value in a sentence
_FIELD = re.compile(r"[A-Za-z0-9_-]+")
_KINDS = {
    str: "text",
    bool: "true/false",
    int: "a whole number",
    float: "a fraction",
    list: "a list",
    dict: "a mapping",
}

_WORDS: dict[str, Callable[[Any, dict[str, Any]], str]] = {
    "missing": lambda value, ctx: "is required",
    "extra_forbidden": lambda value, ctx: "is not a known field",
    "string_type": lambda value, ctx: f"must be text, not {_kind(value)}; put it in quotes",
    "int_type": lambda value, ctx: f"must be a whole number, not {_kind(value)}",
    "bool_type": lambda value, ctx: f"must be true or false, not {_kind(value)}",
    "dict_type": lambda value, ctx: f"must be a mapping, not {_kind(value)}",
    "model_type": lambda value, ctx: f"must be a mapping, not {_kind(value)}",
    "tuple_type": lambda value, ctx: f"must be a list, not {_kind(value)}",
    "greater_than_equal": lambda value, ctx: f"must be at least {ctx['ge']}, not {value}",
    "less_than_equal": lambda value, ctx: f"must be at most {ctx['le']}, not {value}",
    "string_too_short": lambda value, ctx: "must not be empty",
    "string_too_long": lambda value, ctx: f"must have at most {ctx['max_length']} characters, not {len(value)}",
    "too_long": lambda value, ctx: f"must have at most {ctx['max_length']} entries, not {len(value)}",
    "literal_error": lambda value, ctx: f"must be {ctx['expected']}, not {value!r}",
}


def sentences(error: ValidationError) -> tuple[str, ...]:
    """One sentence for each problem, in the order of the fields."""
    return tuple(line for details in error.errors(include_url=False) for line in _lines(details))


def _lines(details: ErrorDetails) -> list[str]:
    at = _path(details["loc"])
    if details["type"] == BROKEN:
        problems: list[tuple[str, str]] = details["ctx"]["problems"]
        return [
            f"{(at + field).removeprefix('.')}: {_shown(details['input']) if not field else ''}{message}"
            for field, message in problems
        ]
    words = _WORDS.get(details["type"])
    message = words(details["input"], details.get("ctx", {})) if words else details["msg"]
    return [f"{at}: {message}"]


def _path(location: tuple[int | str, ...]) -> str:
    """`spec.engine.env[0].name`; keys of mappings that are no plain words stand in brackets."""
    parts = [f".{key}" if isinstance(key, str) and _FIELD.fullmatch(key) else f"[{key}]" for key in location]
    return "".join(parts).removeprefix(".")


def _shown(value: Any) -> str:
    """A plain value as a manifest shows it, with a space behind it; nothing for objects and lists.

    Of a flag only its name: sentences reach conditions and logs, and `--api-key=...` has a secret behind it.
    """
    if not isinstance(value, str | int | float):
        return ""
    if isinstance(value, str) and value.startswith("--"):
        value = re.split("[= ]", value, maxsplit=1)[0]
    text = json.dumps(value, ensure_ascii=False)
    return f"{text if len(text) <= _LONGEST else text[:_LONGEST] + '...'} "


def _kind(value: Any) -> str:
    return "empty" if value is None else _KINDS.get(type(value), type(value).__name__)
