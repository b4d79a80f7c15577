"""Attainment over GPU-hours, one dot per policy: up and to the left is better. Plain SVG, without dependencies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final

from bench.scoreboard.scoring import Score

_WIDTH, _HEIGHT = 900, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 200, 50, 50
_PLIMSOLL_COLOUR, _OTHER_COLOUR, _REFERENCE_COLOUR = "#b3261e", "#1f4e79", "#7a7a7a"
_TICKS: Final = 5
_LINE_HEIGHT: Final = 13  # pixels between two labels


def write(path: Path, title: str, scores: Sequence[Score]) -> None:
    path.write_text(render(title, scores))


def render(title: str, scores: Sequence[Score]) -> str:
    """The picture. Followers are joined to the frontier that they span."""
    x_scale = _scale([score.gpu_hours.value for score in scores], _LEFT, _WIDTH - _RIGHT)
    y_scale = _scale([score.offered.value for score in scores], _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"'
        ' font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="14">{escape(title)}</text>',
        *_axes(x_scale, y_scale),
        _frontier([score for score in scores if score.family == "follower"], x_scale, y_scale),
    ]
    last_y = -math.inf
    for score in sorted(scores, key=lambda score: -score.offered.value):
        x, y = x_scale.place(score.gpu_hours.value), y_scale.place(score.offered.value)
        last_y = max(y + 4, last_y + _LINE_HEIGHT)
        colour = (
            _PLIMSOLL_COLOUR
            if score.family == "plimsoll"
            else _REFERENCE_COLOUR
            if score.family == "follower"
            else _OTHER_COLOUR
        )
        half_width = score.offered.half_width
        if half_width is not None:
            low, high = y_scale.place(score.offered.value - half_width), y_scale.place(score.offered.value + half_width)
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}" stroke="{colour}"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        label_x = _WIDTH - _RIGHT + 12
        parts.append(
            f'<line x1="{x + 5:.1f}" y1="{y:.1f}" x2="{label_x - 3}" y2="{last_y - 4:.1f}" stroke="#ddd"/>'
            f'<text x="{label_x}" y="{last_y:.1f}" fill="{colour}">{escape(score.policy)}</text>'
        )
    return "\n".join([*(part for part in parts if part), "</svg>"]) + "\n"


class _Scale:
    """From values to pixels."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self.low, self.high, self._begin, self._end = low, high, begin, end

    def place(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self._begin + min(1.02, max(-0.02, share)) * (self._end - self._begin)

    def ticks(self) -> list[float]:
        return [self.low + (self.high - self.low) * tick / _TICKS for tick in range(_TICKS + 1)]


def _scale(values: Sequence[float], begin: float, end: float) -> _Scale:
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or 0.05 * high or 1.0
    return _Scale(low - margin, high + margin, begin, end)


def _axes(x_scale: _Scale, y_scale: _Scale) -> list[str]:
    floor, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = [f'<path d="M{_LEFT} {_TOP}V{floor}H{right}" fill="none" stroke="black"/>']
    for value in x_scale.ticks():
        parts.append(f'<text x="{x_scale.place(value):.1f}" y="{floor + 18}" text-anchor="middle">{value:.2f}</text>')
    for value in y_scale.ticks():
        parts.append(f'<text x="{_LEFT - 6}" y="{y_scale.place(value) + 4:.1f}" text-anchor="end">{value:.1%}</text>')
    parts.append(f'<text x="{right}" y="{_HEIGHT - 12}" text-anchor="end">GPU-hours</text>')
    parts.append(f'<text x="{_LEFT}" y="{_TOP - 8}">attainment of offered</text>')
    return parts


def _frontier(followers: Sequence[Score], x_scale: _Scale, y_scale: _Scale) -> str:
    """Steps through the followers that none attains more than at the same cost or less."""
    best = -math.inf
    steps: list[str] = []
    for score in sorted(followers, key=lambda score: (score.gpu_hours.value, -score.offered.value)):
        if score.offered.value > best:
            best = score.offered.value
            x, y = x_scale.place(score.gpu_hours.value), y_scale.place(best)
            steps.append(f"M{x:.1f} {y:.1f}" if not steps else f"H{x:.1f}V{y:.1f}")
    path = " ".join(steps)
    return (
        f'<path d="{path}" fill="none" stroke="{_REFERENCE_COLOUR}" stroke-dasharray="4 3"/>' if len(steps) > 1 else ""
    )
