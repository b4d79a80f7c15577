"""The text of `status.tiers.*.startingPods`: one line of `kubectl describe`, such as `2, 1 overdue, next at TIME`."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_TEXT: Final = re.compile(r"(?P<count>\d{1,9})(, (?P<overdue>\d{1,9}) overdue)?(, next at (?P<next_ready>\S{1,40}))?")


class StartingPods(NamedTuple):
    """Pods of a tier that are not ready yet.

    overdue: those of them that exceed the usual start-up time. next_ready: RFC 3339 time at which the first is
    expected to be ready, "" if none is expected.
    """

    total: int
    overdue: int = 0
    next_ready: str = ""

    def __str__(self) -> str:
        overdue = f", {self.overdue} overdue" if self.overdue else ""
        return f"{self.total}{overdue}{f', next at {self.next_ready}' if self.next_ready else ''}"


def parse_starting(text: object) -> StartingPods | None:
    """The inverse of `str`; None for anything else."""
    found = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    return StartingPods(int(found["count"]), int(found["overdue"] or 0), found["next_ready"] or "")
