"""Access to values in JSON documents of unknown origin.

Another version or a user may have written them. A value that is absent or of an unexpected type is None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def get_value(value: Any, *path: str) -> Any:
    """Return the value at a path of keys; None if the path does not exist."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def get_text(value: Any, *path: str) -> str | None:
    """Return a non-empty string, or None."""
    found_value = get_value(value, *path)
    return found_value if isinstance(found_value, str) and found_value else None


def get_number(value: Any, *path: str) -> float | None:
    """Return a finite number, or None."""
    found_value = get_value(value, *path)
    if isinstance(found_value, bool) or not isinstance(found_value, int | float) or not abs(found_value) < 1e300:
        return None
    return found_value if math.isfinite(found_value) else None


def get_int(value: Any, *path: str) -> int | None:
    """Return an integer, or None."""
    found_value = get_value(value, *path)
    return found_value if isinstance(found_value, int) and not isinstance(found_value, bool) else None


def get_list(value: Any, *path: str) -> list[Any]:
    """Return a list; empty if the value is not a list."""
    found_value = get_value(value, *path)
    return list(found_value) if isinstance(found_value, list | tuple) else []


def get_mapping(value: Any, *path: str) -> dict[str, Any]:
    """Return a mapping; empty if the value is not a mapping."""
    found_value = get_value(value, *path)
    return {str(key): entry for key, entry in found_value.items()} if isinstance(found_value, Mapping) else {}
