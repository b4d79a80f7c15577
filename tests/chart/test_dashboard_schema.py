"""The dashboard, read with the types that Grafana publishes.

It shows that Grafana's data model knows every field, value and unit. It does not show how Grafana draws a panel.
"""

from __future__ import annotations

import enum
import json
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.models import dashboard

from tests.chart.test_monitoring import DASHBOARD

Object = dict[str, Any]

# Grafana writes the query of a variable twice, and its schema has it once.
KNOWN_ELSEWHERE = {"templating.list.definition"}


@pytest.fixture(scope="module")
def board() -> Any:
    plugins.register_default_plugins()
    return dashboard.Dashboard.from_json(DASHBOARD)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each value of a document, with its path without the indices of lists. Empty objects and lists have none."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for one in value:
            yield from leaves(one, path)
    else:
        yield path, value


def wrong_values(one: Any, seen: set[int]) -> Iterator[str]:
    """Values of enumerated fields that their enumeration does not have."""
    if isinstance(one, list | dict):
        for inner in one.values() if isinstance(one, dict) else one:
            yield from wrong_values(inner, seen)
    elif hasattr(one, "__dict__") and not isinstance(one, enum.Enum) and id(one) not in seen:
        seen.add(id(one))
        hints = typing.get_type_hints(type(one).__init__)
        for name, value in vars(one).items():
            kinds = [hints.get(name), *typing.get_args(hints.get(name))]
            for kind in kinds:
                is_enum = isinstance(kind, type) and issubclass(kind, enum.Enum)
                if is_enum and value is not None and value not in {member.value for member in kind}:
                    yield f"{type(one).__name__}.{name}: {value}"
            yield from wrong_values(value, seen)


def test_dashboard_schema_knows_every_field(board: Any) -> None:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    written = json.loads(json.dumps(board, cls=JSONEncoder))
    known = list(leaves(written))
    lost = [(path, value) for path, value in leaves(DASHBOARD) if (path, value) not in known]
    assert {path for path, _ in lost} <= KNOWN_ELSEWHERE


def test_dashboard_schema_has_every_enumerated_value(board: Any) -> None:
    assert list(wrong_values(board, set())) == []
    board.graph_tooltip, former = 7, board.graph_tooltip
    assert list(wrong_values(board, set())) == ["Dashboard.graph_tooltip: 7"]
    board.graph_tooltip = former


def test_dashboard_schema_knows_every_panel_and_unit(board: Any) -> None:
    from grafana_foundation_sdk.models import units

    known = {value for value in vars(units).values() if isinstance(value, str)}
    assert {type(panel).__name__ for panel in board.panels} == {"RowPanel", "Panel"}
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    for panel in panels:
        found = [panel["fieldConfig"]["defaults"].get("unit")]
        overrides = panel["fieldConfig"].get("overrides", [])
        found += [p["value"] for one in overrides for p in one["properties"] if p["id"] == "unit"]
        plain = [unit for unit in found if unit and not re.match(r"(?:suffix|prefix|currency):", unit)]
        assert set(plain) <= known, panel["title"]
    assert {
        type(panel.options).__module__.rpartition(".")[2] for panel in board.panels if hasattr(panel, "options")
    } == {panel["type"] for panel in panels}
