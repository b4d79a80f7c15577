"""The curve of goodput against load, as one SVG file that opens anywhere without a script or a font."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Final

from plimsoll.cli.picture import nice
from plimsoll.core.planning.plan import Point

_WIDTH: Final = 860
_HEIGHT: Final = 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 24, 56, 52
_LINES: Final = (("in promise, all let in", "#c2571a"), ("in promise, behind the gate", "#1f5aa6"))
_MARKS: Final = "#555555"
_STEPS: Final = 5


def draw(title: str, curve: Sequence[Point], marks: Sequence[tuple[float, str]]) -> str:
    """An SVG document. marks: loads with their names, drawn as upright lines; those off the axis are left out."""
    end = nice(max(point.rate_per_s for point in curve))

    def x(rate: float) -> float:
        return _LEFT + rate / end * (_WIDTH - _LEFT - _RIGHT)

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate / end * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="12" role="img">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 20, title, size=15),
        _line(x(0), y(0), x(end), y(end), "#bbbbbb", "4 4"),
    ]
    for number in range(_STEPS + 1):
        value = end * number / _STEPS
        parts += [
            _line(x(0), y(value), x(end), y(value), "#eeeeee"),
            _text(_LEFT - 8, y(value) + 4, f"{value:g}", "end"),
            _text(x(value), y(0) + 18, f"{value:g}", "middle"),
        ]
    parts += [
        _line(x(0), y(0), x(end), y(0), "black"),
        _text((x(0) + x(end)) / 2, _HEIGHT - 12, "load, requests a second", "middle"),
        _text(_LEFT, _TOP - 14, "goodput, requests in promise a second"),
    ]
    rows = ([point.open_per_s for point in curve], [point.gated_per_s for point in curve])
    for place, ((name, colour), values) in enumerate(zip(_LINES, rows, strict=True)):
        points = " ".join(f"{x(p.rate_per_s):.1f},{y(v):.1f}" for p, v in zip(curve, values, strict=True))
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>',
            _text(_WIDTH - _RIGHT, _TOP - 14 + 16 * place, name, "end", colour),
        ]
    for place, (rate, name) in enumerate(one for one in marks if 0 < one[0] <= end):
        parts += [
            _line(x(rate), y(0), x(rate), y(end), _MARKS, "2 3"),
            _text(x(rate) - 4, y(0) - 10 - 16 * place, f"{name} {rate:.3g}", "end", _MARKS),
        ]
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, words: str, anchor: str = "start", colour: str = "black", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}"'
    return f"<text {place}>{html.escape(words)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dashes: str = "none") -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{colour}" stroke-dasharray="{dashes}"/>'
