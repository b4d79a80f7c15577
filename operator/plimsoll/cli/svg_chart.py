"""Charts with a shared time axis as inline SVG, without scripts and fonts."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from plimsoll.core.units import format_number

PlotPoints = Sequence[tuple[float, float]]

WIDTH: Final = 960
HEIGHT: Final = 150
LEFT: Final = 60
RIGHT: Final = 150
PANEL_GAP: Final = 34
_RED: Final = "#b00020"
_TICKS: Final = 12
_STEPS_S: Final = (60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400)
_COLOURS: Final = ("#1f5aa6", "#c2571a", "#2e7d4f", "#7a3e9d", "#666666")


@dataclass(frozen=True)
class Series:
    """A curve. is_step: constant until the next point; is_filled: filled down to zero; is_dashed: for a target."""

    name: str
    points: PlotPoints
    colour_index: int = 0
    is_step: bool = False
    is_filled: bool = False
    is_dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One chart. min_axis_max: lower bound of the axis maximum; marks: (seconds, label) drawn across it."""

    title: str
    series: Sequence[Series]
    unit: str = ""
    min_axis_max: float = 0.0
    marks: Sequence[tuple[float, str]] = field(default_factory=tuple)


def draw(panels: Sequence[Panel], end_s: float, bands: Sequence[tuple[float, float, str]] = ()) -> str:
    """Return all panels, stacked, as one SVG element. bands: shaded intervals with names."""
    total_height = len(panels) * (HEIGHT + PANEL_GAP) + PANEL_GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total_height}" width="{WIDTH}" '
        f'height="{total_height}" font-family="sans-serif" font-size="12" role="img">'
    ]
    for n, panel in enumerate(panels):
        parts.append(_PanelRenderer(panel, PANEL_GAP + n * (HEIGHT + PANEL_GAP), end_s).svg(bands))
    return "\n".join([*parts, "</svg>"])


def nice_ceiling(value: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is at least the value; 1 for 0."""
    if not value > 0 or math.isinf(value):
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= value * (1 - 1e-9))


def time_ticks(end_s: float) -> list[tuple[int, str]]:
    """Return positions and labels of the ticks of a time axis."""
    step_s = next((step for step in _STEPS_S if step * _TICKS >= end_s), None)
    if step_s is None:
        step_s = _STEPS_S[-1] * math.ceil(end_s / _STEPS_S[-1] / _TICKS)
    unit_s, unit = next((s, unit) for s, unit in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")) if step_s % s == 0)
    if step_s == _STEPS_S[0]:
        unit_s, unit = 1, "s"
    return [(moment, f"{moment // unit_s} {unit}") for moment in range(0, int(end_s) + 1, step_s)]


class _PanelRenderer:
    """Layout of one panel."""

    def __init__(self, panel: Panel, top: float, end_s: float) -> None:
        self.panel, self.top, self.end_s = panel, top, end_s
        values = [value for line in panel.series for _, value in line.points if math.isfinite(value)]
        self.high = nice_ceiling(max([panel.min_axis_max, *values]))

    def x(self, moment_s: float) -> float:
        share = min(1.0, max(0.0, moment_s / self.end_s))
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        share = min(1.0, max(0.0, value / self.high))
        return round(self.top + HEIGHT * (1 - share), 1)

    def svg(self, bands: Sequence[tuple[float, float, str]]) -> str:
        parts = [self._band(*band) for band in bands] + [self._axes()]
        parts += [self._marker(at, label) for at, label in self.panel.marks]
        for n, line in enumerate(self.panel.series):
            parts += [self._curve(line), self._legend(line, n)]
        return "\n".join(parts)

    def _band(self, begin_s: float, end_s: float, name: str) -> str:
        left, right = self.x(begin_s), self.x(end_s)
        return (
            f'<rect x="{left}" y="{self.top}" width="{right - left:.1f}" height="{HEIGHT}" fill="#000" opacity="0.05"/>'
            f'<text x="{left + 3}" y="{self.top + 11}" fill="#777" font-size="10">{html.escape(name)}</text>'
        )

    def _axes(self) -> str:
        low, right = self.top + HEIGHT, WIDTH - RIGHT
        parts = [f'<text x="{LEFT}" y="{self.top - 6}" font-weight="bold">{html.escape(self.panel.title)}</text>']
        for value in (0.0, self.high / 2, self.high):
            y = self.y(value)
            parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}" stroke="#ddd"/>')
            label = f"{format_number(value)}{self.panel.unit}"
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end" fill="#555">{label}</text>')
        for moment, tick_text in time_ticks(self.end_s):
            x = self.x(moment)
            parts.append(f'<line x1="{x}" x2="{x}" y1="{low}" y2="{low + 4}" stroke="#999"/>')
            parts.append(f'<text x="{x}" y="{low + 15}" text-anchor="middle" fill="#555">{tick_text}</text>')
        return "".join(parts)

    def _marker(self, at_s: float, label: str) -> str:
        x = self.x(at_s)
        return (
            f'<line x1="{x}" x2="{x}" y1="{self.top}" y2="{self.top + HEIGHT}" stroke="{_RED}" stroke-dasharray="2 2"/>'
            f'<text x="{x + 3}" y="{self.top + 24}" fill="{_RED}" font-size="10">{html.escape(label)}</text>'
        )

    def _curve(self, line: Series) -> str:
        points = [(self.x(at), self.y(value)) for at, value in line.points if math.isfinite(value)]
        if not points:
            return ""
        if line.is_step:
            points = _step_points(points, self.x(self.end_s))
        colour = _COLOURS[line.colour_index % len(_COLOURS)]
        path = " ".join(f"{x},{y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if line.is_dashed else ""
        svg = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>'
        if line.is_filled:
            low = self.top + HEIGHT
            area = f"{points[0][0]},{low} {path} {points[-1][0]},{low}"
            svg = f'<polygon points="{area}" fill="{colour}" opacity="0.18"/>{svg}'
        return svg

    def _legend(self, line: Series, row: int) -> str:
        x, y = WIDTH - RIGHT + 10, self.top + 12 + 16 * row
        colour = _COLOURS[line.colour_index % len(_COLOURS)]
        dash = ' stroke-dasharray="5 4"' if line.is_dashed else ""
        swatch = f'<line x1="{x}" x2="{x + 18}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="2"{dash}/>'
        return f'{swatch}<text x="{x + 23}" y="{y}">{html.escape(line.name)}</text>'


def _step_points(points: list[tuple[float, float]], end_x: float) -> list[tuple[float, float]]:
    result = [points[0]]
    for x, y in points[1:]:
        result += [(x, result[-1][1]), (x, y)]
    return [*result, (end_x, result[-1][1])]
