"""Text for people: tables and paragraphs that fit where they are shown.

Problem: the same answer is read in a narrow terminal, piped into grep and kept in a ticket; and some of its words come
from clusters, models and engines that nobody vouches for.

Idea: layout is a pure function of the text and a `Screen`. Only a terminal has a width and emphasis; elsewhere a line
is a line, however long. Control characters never pass: a model's name must not steer a terminal.
"""

from __future__ import annotations

import math
import os
import shutil
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TextIO

NONE: Final = "-"  # what is not known
_GAP: Final = "  "
_NARROW: Final = 24  # a column that would be narrower is not wrapped: the terminal does it better
_UNITS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"), (1e-12, "ps"))


@dataclass(frozen=True)
class Screen:
    """Where text is shown. width: in characters, None for no limit. colour: whether emphasis is understood."""

    width: int | None = None
    colour: bool = False

    @classmethod
    def of(cls, stream: TextIO, environment: Mapping[str, str] = os.environ) -> Screen:
        """The terminal behind a stream, or a plain one."""
        if not stream.isatty():
            return cls()
        coloured = "NO_COLOR" not in environment and environment.get("TERM", "dumb") != "dumb"
        return cls(shutil.get_terminal_size().columns, coloured)

    def bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self.colour and text else text

    def alarm(self, text: str) -> str:
        return f"\x1b[31m{text}\x1b[0m" if self.colour and text else text


def plain(text: str) -> str:
    """One line without anything that a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def table(
    rows: Sequence[Sequence[str]],
    screen: Screen,
    indent: str = "",
    *,
    head: bool = True,
    alarming: Collection[int] = (),
) -> list[str]:
    """Rows as aligned columns, the last one wrapped. head: the first row is a heading. alarming: rows to point at."""
    if not rows:
        return []
    cells = [[plain(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in list(zip(*cells, strict=True))[:-1]]
    lines = []
    for place, row in enumerate(cells):
        start = indent + "".join(cell.ljust(width) + _GAP for cell, width in zip(row, widths, strict=False))
        emphasis = screen.bold if head and place == 0 else screen.alarm if place in alarming else str
        lines += [emphasis(line) for line in hanging(start, row[-1], screen)]
    return lines


def hanging(start: str, text: str, screen: Screen) -> list[str]:
    """A text behind a start, its further lines below its own beginning."""
    text = plain(text)
    room = math.inf if screen.width is None else screen.width - len(start)
    if len(text) <= room or room < _NARROW:
        return [(start + text).rstrip()]
    parts = textwrap.wrap(text, int(room), break_on_hyphens=False)
    return [start + parts[0], *(" " * len(start) + part for part in parts[1:])]


def cut(start: str, text: str, screen: Screen) -> str:
    """A text behind a start, on one line: cut where a terminal would break it."""
    text = plain(text)
    if screen.width is None or len(start) + len(text) <= screen.width:
        return start + text
    return start + text[: max(0, screen.width - len(start) - 3)] + "..."


def listed(parts: Iterable[str]) -> str:
    """Words in a row, without those that are empty."""
    return ", ".join(part for part in parts if part)


def duration(seconds: float | None) -> str:
    """Two significant digits and a unit: 95s, 1.2s, 340ms, 4.1us, 31ps."""
    if seconds is None:
        return NONE
    size = abs(float(f"{seconds:.2g}"))
    scale, unit = next((one for one in _UNITS if size >= one[0]), _UNITS[-1])
    value = f"{seconds / scale:.2g}" if abs(seconds / scale) < 99.5 else f"{seconds / scale:.0f}"
    return value + unit if size else "0s"


def age(seconds: float) -> str:
    """A span as kubectl shows it: 41s, 5m, 3h, 12d."""
    for length, unit, until in ((1, "s", 120), (60, "m", 120), (3600, "h", 48)):
        if seconds < length * until:
            return f"{max(0, math.floor(seconds / length))}{unit}"
    return f"{math.floor(seconds / 86400)}d"
