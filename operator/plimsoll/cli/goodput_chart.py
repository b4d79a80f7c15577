"""Chart of goodput against load as a self-contained SVG file."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Final

from plimsoll.cli.svg_chart import nice_ceiling
from plimsoll.core import units
from plimsoll.core.planning.fleet_plan import GoodputPoint
from plimsoll.core.units import format_number

_WIDTH: Final = 860
_HEIGHT: Final = 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 56, 52
_SERIES: Final = (("without admission control", "#c2571a"), ("with admission control", "#1f5aa6"))
_MARK_COLOUR: Final = "#555555"
_GRID_LINES: Final = 5


def draw_goodput(title: str, curve: Sequence[GoodputPoint], marks: Sequence[tuple[float, str]]) -> str:
    """Return an SVG document. marks: loads with names, drawn as vertical lines; loads beyond the axis are omitted."""
    axis_max = nice_ceiling(max(point.rate_per_s for point in curve))

    def x(rate: float) -> float:
        return _LEFT + rate / axis_max * (_WIDTH - _LEFT - _RIGHT)

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate / axis_max * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="12" role="img">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 20, title, size=15),
        _line(x(0), y(0), x(axis_max), y(axis_max), "#bbbbbb", "4 4"),
    ]
    for number in range(_GRID_LINES + 1):
        value = axis_max * number / _GRID_LINES
        parts += [
            _line(x(0), y(value), x(axis_max), y(value), "#eeeeee"),
            _text(_LEFT - 8, y(value) + 4, format_number(value), "end"),
            _text(x(value), y(0) + 18, format_number(value), "middle"),
        ]
    parts += [
        _line(x(0), y(0), x(axis_max), y(0), "black"),
        _text((x(0) + x(axis_max)) / 2, _HEIGHT - 12, "arrival rate, requests/s", "middle"),
        _text(_LEFT, _TOP - 14, "goodput, requests within SLO/s"),
    ]
    rows = ([point.without_admission_per_s for point in curve], [point.with_admission_per_s for point in curve])
    for index, ((name, colour), values) in enumerate(zip(_SERIES, rows, strict=True)):
        points = " ".join(f"{x(p.rate_per_s):.1f},{y(v):.1f}" for p, v in zip(curve, values, strict=True))
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>',
            _text(_WIDTH - _RIGHT, _TOP - 14 + 16 * index, name, "end", colour),
        ]
    for index, (rate, name) in enumerate(one for one in marks if 0 < one[0] <= axis_max):
        parts += [
            _line(x(rate), y(0), x(rate), y(axis_max), _MARK_COLOUR, "2 3"),
            _text(x(rate) - 4, y(0) - 10 - 16 * index, f"{name} {units.format_figure(rate)}", "end", _MARK_COLOUR),
        ]
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "black", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}"'
    return f"<text {place}>{html.escape(text)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dashes: str = "none") -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-dasharray="{dashes}"/>'
