"""Objects that share their equal parts.

Problem: the pods of one tier repeat its whole template, and the objects of one service repeat much of those of the
next. A thousand services with ten pods each would take most of the operator's memory.

Idea: each part of an object that equals the same part of an earlier object, at the same place, is replaced by it. The
result equals the object, so no reader notices; but readers must not change what they read.
"""

from __future__ import annotations

import sys
from typing import Any, Final

_NONE: Final = object()


def with_shared_parts(value: Any, like: Any) -> Any:
    """Return `value` with each part that equals the part of `like` at the same place replaced by that."""
    if value is like:
        return like
    if type(value) is dict:
        return _shared_fields(value, like if type(like) is dict else {})
    if type(value) is list:
        return _shared_items(value, like if type(like) is list else [])
    return like if type(value) is type(like) and value == like else value


def _shared_fields(value: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    is_like = len(value) == len(like)
    for name, part in value.items():  # leaves are compared here: a call for each would be most of the work
        other, kind = like.get(name, _NONE), type(part)
        if part is not other:
            if kind is dict or kind is list:
                part = with_shared_parts(part, other)
            elif kind is type(other) and part == other:
                part = other
            is_like = is_like and part is other
        found[sys.intern(name) if type(name) is str else name] = part
    return like if is_like else found


def _shared_items(value: list[Any], like: list[Any]) -> list[Any]:
    found = [with_shared_parts(part, like[at] if at < len(like) else _NONE) for at, part in enumerate(value)]
    is_like = len(found) == len(like) and all(part is other for part, other in zip(found, like, strict=True))
    return like if is_like else found
