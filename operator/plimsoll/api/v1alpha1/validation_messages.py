"""Conversion of pydantic errors to messages for conditions and the CLI.

Each message begins with the full path of the field in the API server's notation: `spec.engine.env[0].name`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from plimsoll.api.v1alpha1.api_model import RULE_ERROR_TYPE, ApiModel

_MAX_VALUE_CHARS = 100  # characters of a value in a message
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_-]+")
_TYPE_NAMES = {
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a decimal number",
    list: "a list",
    dict: "a mapping",
}

_MESSAGE_FORMATS: dict[str, Callable[[Any, dict[str, Any]], str]] = {
    "missing": lambda value, ctx: "is required",
    "extra_forbidden": lambda value, ctx: "is not a known field",
    "string_type": lambda value, ctx: f"must be a string, not {_type_name(value)}; put it in quotes",
    "int_type": lambda value, ctx: f"must be an integer, not {_type_name(value)}",
    "bool_type": lambda value, ctx: f"must be true or false, not {_type_name(value)}",
    "dict_type": lambda value, ctx: f"must be a mapping, not {_type_name(value)}",
    "model_type": lambda value, ctx: f"must be a mapping, not {_type_name(value)}",
    "tuple_type": lambda value, ctx: f"must be a list, not {_type_name(value)}",
    "greater_than_equal": lambda value, ctx: f"must be at least {ctx['ge']}, not {value}",
    "less_than_equal": lambda value, ctx: f"must be at most {ctx['le']}, not {value}",
    "string_too_short": lambda value, ctx: "must not be empty",
    "string_too_long": lambda value, ctx: f"must have at most {ctx['max_length']} characters, not {len(value)}",
    "too_long": lambda value, ctx: f"must have at most {ctx['max_length']} entries, not {len(value)}",
    "literal_error": lambda value, ctx: f"must be {ctx['expected']}, not {value!r}",
}


def format_errors(error: ValidationError) -> tuple[str, ...]:
    """Return one message for each problem, in the order of the fields."""
    root = next((model for model in _models(ApiModel) if model.__name__ == error.title), None)
    return tuple(line for details in error.errors(include_url=False) for line in _format_details(details, root))


def _format_details(details: ErrorDetails, root: type[ApiModel] | None) -> list[str]:
    path = _path(details["loc"])
    if details["type"] == RULE_ERROR_TYPE:
        problems: list[tuple[str, str]] = details["ctx"]["problems"]
        return [
            f"{(path + field).removeprefix('.')}: {_format_value(details['input']) if not field else ''}{message}"
            for field, message in problems
        ]
    format_message = _MESSAGE_FORMATS.get(details["type"])
    message = format_message(details["input"], details.get("ctx", {})) if format_message else details["msg"]
    if details["type"] == "extra_forbidden":
        message += _similar_fields(root, details["loc"])
    return [f"{path}: {message}"]


def _models(model: type[ApiModel]) -> Iterator[type[ApiModel]]:
    yield model
    for subclass in model.__subclasses__():
        yield from _models(subclass)


def _similar_fields(root: type[ApiModel] | None, location: tuple[int | str, ...]) -> str:
    """Return a part of a message that names the fields of the same object that an unknown field resembles."""
    *parents, unknown = location
    model = root
    for key in parents:
        if isinstance(key, int) or model is None:
            continue
        fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
        if key in fields:  # else the key of a mapping
            model = next(_models_in(fields[key]), None)
    if model is None:
        return ""
    known = {(field.alias or name).lower(): field.alias or name for name, field in model.model_fields.items()}
    similar = difflib.get_close_matches(str(unknown).lower()[:_MAX_VALUE_CHARS], known, n=3)
    return f"; did you mean {' or '.join(known[name] for name in similar)}?" if similar else ""


def _models_in(annotation: Any) -> Iterator[type[ApiModel]]:
    """Yield the models in a type such as `tuple[EnvVar, ...]` or `SloSpec | None`."""
    if isinstance(annotation, type) and issubclass(annotation, ApiModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)


def _path(location: tuple[int | str, ...]) -> str:
    """Return the path, such as `spec.engine.env[0].name`; keys with special characters are in brackets."""
    parts = [f".{key}" if isinstance(key, str) and _PLAIN_KEY.fullmatch(key) else f"[{key}]" for key in location]
    return "".join(parts).removeprefix(".")


def _format_value(value: Any) -> str:
    """Return a scalar as JSON with a trailing space, or an empty string for objects and lists.

    A flag is cut to its name, because messages reach conditions and logs, and `--api-key=...` holds a secret.
    """
    if not isinstance(value, str | int | float):
        return ""
    if isinstance(value, str) and value.startswith("--"):
        value = re.split("[= ]", value, maxsplit=1)[0]
    text = json.dumps(value, ensure_ascii=False)
    return f"{text if len(text) <= _MAX_VALUE_CHARS else text[:_MAX_VALUE_CHARS] + '...'} "


def _type_name(value: Any) -> str:
    return "empty" if value is None else _TYPE_NAMES.get(type(value), type(value).__name__)
