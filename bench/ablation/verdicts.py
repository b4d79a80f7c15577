"""What the page says beyond its runs: mechanisms that were deleted, and cases that no row has.

Problem: a mechanism that was deleted has no switch, and a row of half an hour shows no day. Idea: both are written
down here, with the figures that decided.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Deletion(NamedTuple):
    """A mechanism that is gone. lines: of `core`, with all that only it used. shown: without it, less with it."""

    name: str
    did: str
    lines: int
    shown: str


class NamedCase(NamedTuple):
    """A case that shows what a mechanism earns where the rows do not. shown: without it, less with it."""

    name: str
    case: str
    shown: str


DELETIONS: Final = ()
NAMED_CASES: Final = ()
