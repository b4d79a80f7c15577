"""The example of a route to an InferencePool names the pool that the operator makes with the page's chart values."""

from __future__ import annotations

import re
from typing import Any

import yaml

from plimsoll.api.v1alpha1 import parse
from plimsoll.resources.inference_pool import inference_pool
from plimsoll.resources.platform_config import PlatformConfig
from tests import builders
from tests.chart.rendering import ROOT, find, of_kind, render

Object = dict[str, Any]
[ROUTE] = yaml.safe_load_all((ROOT / "examples" / "endpoint-picker" / "chat.yaml").read_text())
PAGE = (ROOT / "docs" / "tasks" / "endpoint-picker.md").read_text()


def rendered_objects() -> tuple[list[Object], Object]:
    """What the page's values render, and the pool of the route's service."""
    [text] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    values = yaml.safe_load(text)
    namespace = ROUTE["metadata"]["namespace"]
    objects = render(values, "--namespace", namespace)
    [config] = [o for o in of_kind(objects, "ConfigMap") if "operator.yaml" in o.get("data", {})]
    settings = PlatformConfig.model_validate(yaml.safe_load(config["data"]["operator.yaml"]))
    assert settings.gateway.namespace == namespace
    assert settings.inference_pools is not None
    parent = builders.service("chat", namespace)
    return objects, inference_pool(parse(parent), parent, settings.inference_pools)


def test_route_names_the_pool_that_the_operator_makes() -> None:
    _, pool = rendered_objects()
    [backend] = ROUTE["spec"]["rules"][0]["backendRefs"]
    assert (backend["group"], backend["kind"], backend["name"], ROUTE["metadata"]["namespace"]) == (
        pool["apiVersion"].partition("/")[0],
        pool["kind"],
        pool["metadata"]["name"],
        pool["metadata"]["namespace"],
    )


def test_pool_names_the_service_of_the_chart() -> None:
    objects, pool = rendered_objects()
    reference = pool["spec"]["endpointPickerRef"]
    service = find(objects, "Service", reference["name"])
    assert service["metadata"]["namespace"] == pool["metadata"]["namespace"]
    assert [port["port"] for port in service["spec"]["ports"]] == [reference["port"]["number"]]
