"""Text output of the CLI: tables and paragraphs for terminals and pipes.

Problem: users read the same output in a narrow terminal and through grep. Some of its text comes from clusters, models
and engines that are not trusted.

Idea: the layout is a pure function of the text and a `Screen`. Only a terminal has a width and emphasis; other output
is not wrapped. Control characters are replaced, so that a model's name cannot control the terminal.
"""

from __future__ import annotations

import math
import os
import shutil
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TextIO

from plimsoll.core.units import format_figure, format_seconds, format_wait

MISSING: Final = "-"  # an unknown value
_COLUMN_GAP: Final = "  "
_MIN_WRAP_WIDTH: Final = 24  # narrower columns are left to the terminal


@dataclass(frozen=True)
class Screen:
    """Output device. width: in characters, None for no limit. supports_colour: whether it supports ANSI colours."""

    width: int | None = None
    supports_colour: bool = False

    @classmethod
    def for_stream(cls, stream: TextIO, environment: Mapping[str, str] = os.environ) -> Screen:
        """Return the terminal of a stream, or a plain screen."""
        if not stream.isatty():
            return cls()
        coloured = "NO_COLOR" not in environment and environment.get("TERM", "dumb") != "dumb"
        return cls(shutil.get_terminal_size().columns, coloured)

    def bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self.supports_colour and text else text

    def red(self, text: str) -> str:
        return f"\x1b[31m{text}\x1b[0m" if self.supports_colour and text else text


def printable_line(text: str) -> str:
    """Return the text as one line, with control characters replaced by `?`."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))


def format_table(
    rows: Sequence[Sequence[str]],
    screen: Screen,
    indent: str = "",
    *,
    head: bool = True,
    alarm_rows: Collection[int] = (),
) -> list[str]:
    """Return rows as aligned columns, the last one wrapped. head: row 0 is a header. alarm_rows: rows in red."""
    if not rows:
        return []
    cells = [[printable_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in list(zip(*cells, strict=True))[:-1]]
    lines = []
    for row_index, row in enumerate(cells):
        prefix = indent + "".join(cell.ljust(width) + _COLUMN_GAP for cell, width in zip(row, widths, strict=False))
        emphasis = screen.bold if head and row_index == 0 else screen.red if row_index in alarm_rows else str
        lines += [emphasis(line) for line in hanging_indent(prefix, row[-1], screen)]
    return lines


def hanging_indent(prefix: str, text: str, screen: Screen) -> list[str]:
    """Return prefix and text, with the text wrapped and further lines indented to its start."""
    text = printable_line(text)
    room = math.inf if screen.width is None else screen.width - len(prefix)
    if len(text) <= room or room < _MIN_WRAP_WIDTH:
        return [(prefix + text).rstrip()]
    parts = textwrap.wrap(text, int(room), break_on_hyphens=False)
    return [prefix + parts[0], *(" " * len(prefix) + part for part in parts[1:])]


def truncate(prefix: str, text: str, screen: Screen) -> str:
    """Return prefix and text on one line, cut to the width of the screen."""
    text = printable_line(text)
    if screen.width is None or len(prefix) + len(text) <= screen.width:
        return prefix + text
    return prefix + text[: max(0, screen.width - len(prefix) - 3)] + "..."


def join_nonempty(parts: Iterable[str]) -> str:
    """Join the non-empty parts with commas."""
    return ", ".join(part for part in parts if part)


def format_duration(seconds: float | None) -> str:
    """Return the duration with a unit (95 s, 1.2 s, 340 ms, 4.1 us, 31 ps), or MISSING for None."""
    return MISSING if seconds is None else format_seconds(seconds)


def format_wait_or_missing(seconds: float | None) -> str:
    """Return the age or the remaining time (95 s, 300 ms, 0 s), or MISSING for None."""
    return MISSING if seconds is None else format_wait(seconds)


def format_duration_cell(seconds: float | None) -> str:
    """Return the duration as a table cell, without a space (95s, 340ms), so that programs can split columns."""
    return format_duration(seconds).replace(" ", "")


def format_optional(value: float | None) -> str:
    """Return the figure with three significant digits, or MISSING for None."""
    return MISSING if value is None else format_figure(value)


def format_age(seconds: float) -> str:
    """Format an age as kubectl does: 41s, 5m, 3h, 12d."""
    for length, unit, limit in ((1, "s", 120), (60, "m", 120), (3600, "h", 48)):
        if seconds < length * limit:
            return f"{max(0, math.floor(seconds / length))}{unit}"
    return f"{math.floor(seconds / 86400)}d"
