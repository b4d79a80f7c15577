"""Length of user-visible text: whole clauses while they fit, and excerpts that end at a word.

Problem: an Event has to fit a line of a terminal, and a scheduler, a kubelet or an engine can say a page.
Idea: a message is built from clauses, most important first, and a clause that does not fit is left out as a whole.
Quoted text is an excerpt. An ellipsis shows that something is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

ELLIPSIS: Final = "..."
MAX_NAMES: Final = 3  # of objects that a message lists
MAX_QUOTE_CHARS: Final = 160  # of text from elsewhere (scheduler, kubelet, engine, spec) in an Event


def shorten(text: str, limit: int) -> str:
    """The text in at most `limit` characters: if it is longer, cut after a word and ended with an ellipsis.

    A word longer than the limit is cut within. limit: at least 4.
    """
    if len(text) <= limit:
        return text
    room = limit - len(ELLIPSIS)
    head = text[: room + 1]
    at_word = head.rfind(" ")
    return (head[:at_word] if at_word > 0 else head[:room]).rstrip(" ,;:.(") + ELLIPSIS


def join_within(limit: int, first: str, *clauses: str, separator: str = "; ") -> str:
    """The first clause, and each further one that fits into `limit` characters. Empty clauses are left out."""
    text = first
    for clause in filter(None, clauses):
        if len(text) + len(separator) + len(clause) <= limit:
            text += separator + clause
    return text


def name_some(names: Sequence[str]) -> str:
    """The first names, and the number of the others: `a, b, c and 4 more`."""
    others = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {others} more" if others > 0 else "")
