"""What is generated from the chart's sources is up to date, and the generator reads comments as people do."""

from __future__ import annotations

import yaml

from charts import docs
from tests.chart.rendering import ROOT, of_kind, render

SAMPLE = """\
# -- First
# Alone.
a: 1
# A group,
# on two lines.
b:
  # Inside.
  c: {x: 1, y: 2}
  d: []

# -- Second
# With | a bar.
e: null
"""


def test_generated_files_are_up_to_date() -> None:
    stale = [str(path.relative_to(ROOT)) for path, text in docs.outputs().items() if path.read_text() != text]
    assert stale == [], "run `make verify`"


def test_rendered_crds_equal_generated_crds() -> None:
    rendered = {one["metadata"]["name"]: one["spec"] for one in of_kind(render(), "CustomResourceDefinition")}
    sources = [yaml.safe_load(path.read_text()) for path in docs.CRDS]
    assert rendered == {one["metadata"]["name"]: one["spec"] for one in sources}
    assert set(rendered) == {
        f"{plural}.plimsoll.dev"
        for plural in ("inferenceservices", "inferenceserviceadmissions", "inferenceservicecheckpoints")
    }


def test_values_comment_belongs_to_key_below() -> None:
    values = {value.name: value for value in docs.read(SAMPLE)}
    assert values["b"].comment == "A group, on two lines."
    assert values["b.c"].comment == "Inside."
    assert values["b.c.x"].comment == values["b.d"].comment == ""
    assert [value.section for value in values.values()] == ["First"] * 6 + ["Second"]


def test_documented_row_is_commented_leaf_key() -> None:
    assert [row.name for row in docs.rows_of(docs.read(SAMPLE))] == ["a", "b.c", "e"]


def test_values_page_lists_rows_and_groups() -> None:
    page = docs.render_page(docs.read(SAMPLE))
    assert '| `b.c: {"x": 1, "y": 2}` | Inside. |' in page
    assert "- `b`: A group, on two lines." in page
    assert "| `e: null` | With \\| a bar. |" in page


def test_values_page_refers_to_earlier_value_for_long_comment() -> None:
    comment = "Whether it is created. Without it nothing is reachable."
    page = docs.render_page(docs.read(f"# -- First\na:\n  # {comment}\n  create: 1\nb:\n  # {comment}\n  create: 2\n"))
    assert f"| `a.create: 1` | {comment} |\n| `b.create: 2` | As `a.create`. |" in page
