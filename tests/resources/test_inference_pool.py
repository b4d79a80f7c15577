"""The InferencePool of a service: the engines that clients reach, and the picker that chooses among them."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.api import labels
from plimsoll.api.v1alpha1 import parse
from plimsoll.cli.render import render_manifest
from plimsoll.resources.inference_pool import differences, inference_pool
from plimsoll.resources.platform_config import InferencePoolSettings
from tests import builders

Object = dict[str, Any]

PEER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}}
SETTINGS = InferencePoolSettings(picker_service="plimsoll-endpoint-picker", peers=(PEER,))
OPEN = {"name": "plimsoll-endpoint-picker", "port": {"number": 9002}, "failureMode": "FailOpen"}
HOME = builders.PLATFORM.gateway.namespace


def pool(**spec: Any) -> Object:
    parent = builders.service(**spec)
    return inference_pool(parse(parent), parent, SETTINGS)


def changed(part: str, value: Any) -> Object:
    live = pool()
    return {**live, "spec": {**live["spec"], part: value}}


@pytest.mark.parametrize(
    ("tiers", "role"), [({"serve": {}}, "serve"), ({"prefill": {}, "decode": {}}, "decode")], ids=["solo", "pair"]
)
def test_pool_selects_the_pods_that_clients_reach(tiers: Object, role: str) -> None:
    parent = builders.service(tiers=tiers)
    selector = inference_pool(parse(parent), parent, SETTINGS)["spec"]["selector"]["matchLabels"]
    pods = {
        one["metadata"]["labels"][labels.ROLE]: one["spec"]["template"]["metadata"]["labels"]
        for one in render_manifest(parent, builders.PLATFORM)
        if one["kind"] == "Deployment"
    }
    assert [one for one, found in pods.items() if selector.items() <= found.items()] == [role]


def test_pool_has_the_port_of_an_engine_without_launcher() -> None:
    engine = {"runtime": "openai", "image": "example.com/server:1", "port": 3000}
    found = pool(tiers={"serve": {}}, engine=engine)["spec"]["targetPorts"]
    assert found == [{"number": 3000}]


def test_pool_of_the_operator_does_not_differ() -> None:
    assert differences(pool(), pool()) == ()


def test_pool_with_defaults_does_not_differ() -> None:
    reference = {"name": "plimsoll-endpoint-picker", "port": {"number": 9002}}
    assert differences(changed("endpointPickerRef", reference), pool()) == ()


@pytest.mark.parametrize(
    ("part", "value", "named"),
    [
        ("selector", {"matchLabels": {"app": "vllm"}}, "selector"),
        ("targetPorts", [{"number": 8080}], "targetPorts"),
        ("targetPorts", [{"number": 8000}, {"number": 8001}], "targetPorts"),
        ("endpointPickerRef", {"name": "other", "port": {"number": 9002}}, "endpointPickerRef"),
        ("endpointPickerRef", {"name": "plimsoll-endpoint-picker"}, "endpointPickerRef"),
        ("endpointPickerRef", None, "endpointPickerRef"),
        ("appProtocol", "kubernetes.io/h2c", "appProtocol must be http"),
        ("endpointPickerRef", OPEN, "endpointPickerRef.failureMode must be FailClose"),
    ],
)
def test_pool_that_differs_names_the_field(part: str, value: Any, named: str) -> None:
    [found] = differences(changed(part, value), pool())
    assert found.startswith(named)


@pytest.mark.parametrize(("namespace", "is_admitted"), [(HOME, True), ("team", False)])
def test_policy_admits_other_gateways_where_pools_are(namespace: str, is_admitted: bool) -> None:
    platform = builders.PLATFORM.model_copy(update={"inference_pools": SETTINGS})
    [policy] = [
        one
        for one in render_manifest(builders.service(namespace=namespace), platform)
        if one["kind"] == "NetworkPolicy"
    ]
    [ports] = [rule["ports"] for rule in policy["spec"]["ingress"] if PEER in rule["from"]] or [[]]
    assert [one["port"] for one in ports] == ([8000] if is_admitted else [])


def test_pools_leave_pod_templates_alone() -> None:
    platform = builders.PLATFORM.model_copy(update={"inference_pools": SETTINGS})
    parent = builders.service(namespace=HOME)
    templates = [
        [one["spec"]["template"] for one in render_manifest(parent, found) if one["kind"] == "Deployment"]
        for found in (builders.PLATFORM, platform)
    ]
    assert templates[0] == templates[1]
