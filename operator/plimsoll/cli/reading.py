"""Parts of objects as they come over the wire, whatever they may hold.

Another version wrote them, or a hand. What is absent or of another kind than expected is None, and shown as unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def part(value: Any, *path: str) -> Any:
    """What lies at the end of a path of keys; None where the path ends before."""
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def text(value: Any, *path: str) -> str | None:
    """A string that is not empty."""
    found = part(value, *path)
    return found if isinstance(found, str) and found else None


def number(value: Any, *path: str) -> float | None:
    """A finite number."""
    found = part(value, *path)
    if isinstance(found, bool) or not isinstance(found, int | float) or not abs(found) < 1e300:
        return None
    return found if math.isfinite(found) else None


def whole(value: Any, *path: str) -> int | None:
    """A whole number."""
    found = part(value, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def items(value: Any, *path: str) -> list[Any]:
    """A list; empty if it is none."""
    found = part(value, *path)
    return list(found) if isinstance(found, list | tuple) else []


def entries(value: Any, *path: str) -> dict[str, Any]:
    """A mapping; empty if it is none."""
    found = part(value, *path)
    return {str(key): entry for key, entry in found.items()} if isinstance(found, Mapping) else {}
