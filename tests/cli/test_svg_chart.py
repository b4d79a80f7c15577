"""The pictures are one SVG that any parser reads, and show what they are given."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from plimsoll.cli.svg_chart import HEIGHT, LEFT, PANEL_GAP, RIGHT, WIDTH, Panel, Series, draw, nice_ceiling, time_ticks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("value", "top"), [(0.0, 1.0), (0.9, 1.0), (1.0, 1.0), (1.1, 2.0), (3.0, 5.0), (70.0, 100.0), (math.inf, 1.0)]
)
def test_nice_rounds_axis_end_up(value: float, top: float) -> None:
    assert nice_ceiling(value) == top


def test_draw_panels_share_one_time_axis() -> None:
    flat = Series("a <b>", [(0.0, 0.0), (50.0, 1.0), (100.0, 0.0)])
    steps = Series("c", [(0.0, 1.0), (50.0, 2.0)], 1, is_step=True)
    root = ElementTree.fromstring(draw([Panel("one", [flat]), Panel("two", [steps])], 100.0, [(0, 50, "band")]))
    first, second = (line.attrib["points"].split() for line in root.iter(f"{SVG}polyline"))
    right = WIDTH - RIGHT
    assert [p.split(",")[0] for p in first] == [str(float(LEFT)), str((LEFT + right) / 2), str(float(right))]
    assert [float(p.split(",")[1]) for p in first] == [PANEL_GAP + HEIGHT, PANEL_GAP, PANEL_GAP + HEIGHT]
    assert len(second) == 4  # on, up, and level to the end
    assert float(second[-1].split(",")[0]) == right


def test_draw_non_finite_points_are_omitted() -> None:
    gaps = Series("a", [(0.0, math.nan), (10.0, 1.0), (20.0, math.inf)])
    root = ElementTree.fromstring(draw([Panel("one", [gaps, Series("empty", [])], marks=[(5, "kill")])], 20.0))
    [line] = root.iter(f"{SVG}polyline")
    assert len(line.attrib["points"].split()) == 1
    assert "kill" in [text.text for text in root.iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("end_s", "step_s", "last"),
    [
        (600.0, 60, "600 s"), (2700.0, 300, "45 min"), (3600.0, 300, "60 min"), (86_400.0, 7200, "24 h"),
        (604_800.0, 86_400, "7 d"), (30 * 86_400.0, 3 * 86_400, "30 d"),
    ],
)  # fmt: skip
def test_ticks_use_round_time_steps(end_s: float, step_s: int, last: str) -> None:
    found = time_ticks(end_s)
    assert found[1][0] - found[0][0] == step_s
    assert found[-1][1] == last
    assert len(found) <= 13
