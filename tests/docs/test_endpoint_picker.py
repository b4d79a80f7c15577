"""The example of an InferencePool: it selects the pods that the operator makes, and names what the chart renders."""

from __future__ import annotations

from typing import Any

import yaml

from plimsoll.api import labels
from plimsoll.api.contract import engine_contract
from plimsoll.core.types import Role
from plimsoll.resources import object_meta
from tests.chart.rendering import ROOT, find, render

Object = dict[str, Any]
POOL, ROUTE, POLICY = yaml.safe_load_all((ROOT / "examples" / "endpoint-picker" / "chat.yaml").read_text())


def test_pool_selects_engines_of_the_service() -> None:
    selected = POOL["spec"]["selector"]["matchLabels"]
    assert selected.items() <= object_meta.tier_labels("chat", Role.SERVE).items()
    assert selected[labels.SERVICE] == "chat"
    assert [port["number"] for port in POOL["spec"]["targetPorts"]] == [engine_contract().ports["api"]]


def test_pool_names_the_service_of_the_chart() -> None:
    reference = POOL["spec"]["endpointPickerRef"]
    service = find(render({"gateway": {"endpointPicker": {"enabled": True}}}), "Service", reference["name"])
    assert [port["port"] for port in service["spec"]["ports"]] == [reference["port"]["number"]]


def test_route_and_policy_belong_to_the_pool() -> None:
    [backend] = ROUTE["spec"]["rules"][0]["backendRefs"]
    assert (backend["group"], backend["kind"], backend["name"]) == (
        POOL["apiVersion"].partition("/")[0],
        POOL["kind"],
        POOL["metadata"]["name"],
    )
    assert {one["metadata"]["namespace"] for one in (POOL, ROUTE, POLICY)} == {"team"}
    assert POLICY["spec"]["podSelector"]["matchLabels"] == {labels.SERVICE: "chat"}
    assert [p["port"] for p in POLICY["spec"]["ingress"][0]["ports"]] == [engine_contract().ports["api"]]
