"""Requests, engines and TTFT of a scenario on one time axis, from its kept result. Plain SVG, without dependencies."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

from e2e.gpu.scenarios import SCENARIOS, Scenario
from e2e.gpu.settings import CHECKOUT

OUT: Final = CHECKOUT / "docs/evaluation/gpu-cluster"
RESULTS: Final = CHECKOUT / "e2e/gpu/data"
PICTURES: Final = {  # by the folder of the result
    "long-trace": "h200-8b-long",
    "step": "h200-8b-third",
    "failures": "h200-8b-third",
    "kills": "h200-8b-third",
}
_WIDTH, _LEFT, _RIGHT, _TOP, _PANEL, _GAP = 900, 70, 20, 40, 130, 34
_BINS: Final = 120  # of the time axis, each a second at least
_TICKS: Final = 6
_FILLED: Final = "requests/s"  # the panel whose lines are areas: red is what was offered and not served in time
_OFFERED, _WITHIN, _READY, _ORDERED, _LIMIT = "#b3261e", "#9db8d2", "#1f4e79", "#b3261e", "#b3261e"
_Points = Sequence[tuple[float, float]]


def render(name: str, result: Mapping[str, Any], scenario: Scenario) -> str:
    """The picture: time in seconds of the load, three panels below each other."""
    seconds = float(scenario.seconds)
    width_s = max(1.0, seconds / _BINS)
    offered, within, ttft = _binned(result["seconds"], width_s)
    ordered, ready = engines(result["changes"], seconds)
    target_s = float(scenario.ttft_s)
    panels = (
        (_FILLED, max(y for _, y in offered), ((offered, _OFFERED, "offered"), (within, _WITHIN, "within the SLO"))),
        ("engines", max(2.0, *(y for _, y in ordered)), ((ordered, _ORDERED, "ordered"), (ready, _READY, "ready"))),
        (
            "mean TTFT, s",
            max(2.0 * target_s, *(y for _, y in ttft)),
            ((ttft, _READY, "measured"), ([(0.0, target_s), (seconds, target_s)], _LIMIT, "target")),
        ),
    )
    height = _TOP + len(panels) * (_PANEL + _GAP) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif"'
        ' font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(name)} on two H200: seconds of the load</text>',
    ]
    for number, (label, highest, lines) in enumerate(panels):
        parts += _panel(label, highest, lines, seconds, _TOP + number * (_PANEL + _GAP))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _binned(rows: Iterable[Sequence[Any]], width_s: float) -> tuple[_Points, _Points, _Points]:
    """Offered and within the SLO per second, and mean TTFT in s, as steps; of a second without answers no TTFT."""
    sums: dict[int, list[float]] = {}
    for second, offered, complete, within, mean_s, _ in rows:
        one = sums.setdefault(int(second / width_s), [0.0] * 4)
        for column, value in enumerate((offered, within, complete, complete * (mean_s or 0.0))):
            one[column] += value
    last = max(sums)
    bins = [(number * width_s, sums.get(number, [0.0] * 4)) for number in range(last + 1)]
    return (
        [(at, one[0] / width_s) for at, one in bins],
        [(at, one[1] / width_s) for at, one in bins],
        [(at, one[3] / one[2]) for at, one in bins if one[2]],
    )


def engines(changes: Iterable[Mapping[str, Any]], seconds: float) -> tuple[_Points, _Points]:
    """Pods that are not being deleted, and those of them that are ready, over the time of the load."""
    counts: dict[float, tuple[float, float]] = {}  # of changes before the load, the last counts
    for change in changes:
        pods = [pod for pod in change["pods"] if not pod["deleting"]]
        at = min(max(change["at"], 0.0), seconds)
        counts[at] = float(len(pods)), float(sum(pod["ready"] for pod in pods))
    counts.setdefault(seconds, counts[max(counts)])
    return [(at, one[0]) for at, one in counts.items()], [(at, one[1]) for at, one in counts.items()]


def _panel(
    label: str, highest: float, lines: Iterable[tuple[_Points, str, str]], seconds: float, top: float
) -> list[str]:
    floor, right = top + _PANEL, _WIDTH - _RIGHT
    x: Callable[[float], float] = lambda at: _LEFT + at / seconds * (right - _LEFT)  # noqa: E731
    y: Callable[[float], float] = lambda value: floor - min(1.0, value / highest) * (_PANEL - 16)  # noqa: E731
    parts = [
        f'<path d="M{_LEFT} {top}V{floor}H{right}" fill="none" stroke="black"/>',
        f'<text x="{_LEFT - 8}" y="{y(highest) + 4:.1f}" text-anchor="end">{highest:.3g}</text>',
        f'<text x="{_LEFT - 8}" y="{floor + 4}" text-anchor="end">0</text>',
        f'<text x="{_LEFT + 6}" y="{top + 4}">{escape(label)}</text>',
    ]
    for tick in range(_TICKS + 1):
        at = seconds * tick / _TICKS
        parts.append(f'<text x="{x(at):.1f}" y="{floor + 16}" text-anchor="middle">{at:.0f}</text>')
    for number, (points, colour, name) in enumerate(lines):
        (begin, value), *others = points
        steps = "".join(f"H{x(at):.1f}V{y(value):.1f}" for at, value in others)
        path = f"M{x(begin):.1f} {y(value):.1f}{steps}H{right}"
        if label == _FILLED:
            parts.append(f'<path d="{path}V{floor}H{_LEFT}Z" fill="{colour}" stroke="none"/>')
        else:
            parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(
            f'<text x="{right - 130 * number}" y="{top + 4}" text-anchor="end" fill="{colour}">{escape(name)}</text>'
        )
    return parts


def rendered(name: str) -> str:
    """The picture of a scenario's kept result."""
    results = json.loads((RESULTS / PICTURES[name] / "results.json").read_text())
    return render(name, results[name], SCENARIOS[name])


def main() -> None:
    """Draw all pictures of the page again."""
    argparse.ArgumentParser(prog="python -m e2e.gpu.pictures", description=__doc__).parse_args()
    OUT.mkdir(exist_ok=True)
    for name in PICTURES:
        (OUT / f"{name}.svg").write_text(rendered(name))


if __name__ == "__main__":
    main()
