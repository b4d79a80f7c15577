"""The chart of `plan`."""

from __future__ import annotations

from xml.etree import ElementTree

from plimsoll.cli import goodput_chart
from plimsoll.cli.svg_chart import nice_ceiling
from plimsoll.core.planning.fleet_plan import GoodputPoint


def test_goodput_chart_axes_end_at_nice_numbers() -> None:
    drawn = goodput_chart.draw_goodput("x", [GoodputPoint(0.0, 0.0, 0.0), GoodputPoint(2.7, 2.0, 2.0)], [])
    texts = [one.text for one in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert f"{nice_ceiling(2.7):g}" in texts


def test_goodput_chart_escapes_names_and_omits_marks_off_axis() -> None:
    points = [GoodputPoint(0.0, 0.0, 0.0), GoodputPoint(9.0, 5.0, 8.0)]
    drawn = goodput_chart.draw_goodput("<b>", points, [(4.0, "knee"), (40.0, "far")])
    texts = [one.text for one in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert "<b>" in texts
    assert "knee 4" in texts
    assert not any("far" in (text or "") for text in texts)
