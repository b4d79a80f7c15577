"""A mix of sessions with shared prefixes: agents with tools, few-shot prompts, and chats.

The traces that are made of it differ in what a prompt is: numbers of segments, or words for a real engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Final, TypeVar

T = TypeVar("T")

TOOL_SETS, EXAMPLE_SETS = 6, 12
TOOL_TOKENS, EXAMPLE_TOKENS, SYSTEM_TOKENS = (1500, 4000), (1500, 3000), 300


@dataclass(frozen=True)
class SessionKind:
    """share: of the sessions. turns: least and most. medians: tokens of a turn's text and of its response."""

    share: float
    turns: tuple[int, int]
    medians: tuple[int, int]

    def draw_turns(self, random: Random) -> int:
        """The number of turns of one session."""
        least, most = self.turns
        return least if least == most else random.randint(least, most)

    def draw_lengths(self, random: Random) -> tuple[int, int]:
        """Tokens of one turn's text and of its response."""
        text, response = (max(8, round(median * math.exp(random.gauss(0.0, 0.6)))) for median in self.medians)
        return text, response


KINDS: Final = {
    "tools": SessionKind(0.25, (3, 12), (350, 120)),
    "few-shot": SessionKind(0.5, (1, 1), (120, 60)),
    "chat": SessionKind(0.25, (2, 8), (150, 250)),
}


def draw_kind(random: Random) -> str:
    """The kind of one session, of `KINDS`."""
    return random.choices(list(KINDS), [kind.share for kind in KINDS.values()])[0]


def draw_examples(random: Random, examples: list[T]) -> T:
    """One of the lists of examples, some much more frequent than others."""
    return random.choices(examples, [1 / (rank + 1) for rank in range(EXAMPLE_SETS)])[0]
