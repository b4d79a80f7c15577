"""The endpoint picker for other gateways: off by default, and reached by the peers that the values name."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from plimsoll.gateway.settings import PickerSettings
from plimsoll.resources.platform_config import PlatformConfig
from tests.chart.rendering import Object, RenderError, containers, find, of_kind, pod_specs, render

PEERS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}}]
ON: Object = {"gateway": {"endpointPicker": {"enabled": True, "from": PEERS}}}
WITH_POOLS: Object = {"gateway": {"endpointPicker": {"enabled": True, "inferencePools": True, "from": PEERS}}}
WITH_TLS: Object = {"gateway": {"endpointPicker": {"enabled": True, "tls": {"secretName": "picker-tls"}}}}


def picker(values: Object) -> Object:
    [found] = [c for c in containers(pod_specs(render(values))["plimsoll-gateway"]) if c["name"] == "picker"]
    return found


def settings(values: Object) -> PickerSettings:
    known = {one["name"]: one["value"] for one in picker(values)["env"] if "value" in one}
    return PickerSettings.from_environment({**known, "POD_NAMESPACE": "plimsoll-system"})


def ingress_of_port(values: Object, port: int) -> list[Any]:
    rules = find(render(values), "NetworkPolicy", "plimsoll-gateway")["spec"]["ingress"]
    return [rule["from"] for rule in rules if port in [one["port"] for one in rule["ports"]]]


@pytest.mark.parametrize("values", [{}, {"gateway": {"endpointPicker": None}}, {"gateway": {"endpointPicker": {}}}])
def test_picker_is_off_by_default(values: Object) -> None:
    assert [o["metadata"]["name"] for o in of_kind(render(values), "Service")] == ["plimsoll-gateway"]
    assert settings(values).endpoint_picker_port is None
    assert ingress_of_port(values, 9002) == []


def test_service_reaches_the_port_that_the_peers_may_use() -> None:
    [port] = find(render(ON), "Service", "plimsoll-endpoint-picker")["spec"]["ports"]
    assert port["targetPort"] in [one["containerPort"] for one in picker(ON)["ports"]]
    assert settings(ON).endpoint_picker_port == port["targetPort"]
    assert settings(ON).endpoint_picker_tls is None
    assert ingress_of_port(ON, port["targetPort"]) == [PEERS]


def test_service_selects_gateway_pods() -> None:
    objects = render(ON)
    selector = find(objects, "Service", "plimsoll-endpoint-picker")["spec"]["selector"]
    labels = find(objects, "Deployment", "plimsoll-gateway")["spec"]["template"]["metadata"]["labels"]
    assert selector.items() <= labels.items()


def test_certificate_is_mounted_where_it_is_read() -> None:
    pod = pod_specs(render(WITH_TLS))["plimsoll-gateway"]
    directory = str(settings(WITH_TLS).endpoint_picker_tls)
    [mount] = [m for m in picker(WITH_TLS)["volumeMounts"] if m["mountPath"] == directory]
    [volume] = [v for v in pod["volumes"] if v["name"] == mount["name"]]
    assert volume["secret"]["secretName"] == "picker-tls"
    assert volume["secret"]["optional"]
    assert [k["mountPath"] for k in containers(pod)[1]["volumeMounts"]].count(directory) == 0


def test_without_peers_nobody_reaches_it() -> None:
    assert ingress_of_port(WITH_TLS, 9002) == []


def test_unknown_value_is_an_error() -> None:
    with pytest.raises(RenderError, match="ports"):
        render({"gateway": {"endpointPicker": {"ports": 9002}}})


def gateway_rights(values: Object) -> dict[str, list[str]]:
    rules = find(render(values), "Role", "plimsoll-gateway-own")["rules"]
    return {name: rule["verbs"] for rule in rules for name in rule["resources"]}


def test_objectives_are_read_with_their_setting_alone() -> None:
    on: Object = {"gateway": {"endpointPicker": {"enabled": True, "inferenceObjectives": True}}}
    assert not settings(ON).inference_objectives
    assert "inferenceobjectives" not in gateway_rights(ON)
    assert settings(on).inference_objectives
    assert gateway_rights(on)["inferenceobjectives"] == ["list", "watch"]


def own_rights(values: Object) -> dict[str, list[str]]:
    rules = find(render(values), "Role", "plimsoll-operator-own")["rules"]
    return {name: rule["verbs"] for rule in rules for name in rule["resources"]}


def platform(values: Object) -> PlatformConfig:
    [config] = [o for o in of_kind(render(values), "ConfigMap") if "operator.yaml" in o.get("data", {})]
    return PlatformConfig.model_validate(yaml.safe_load(config["data"]["operator.yaml"]))


def test_pools_are_off_by_default() -> None:
    assert platform(ON).inference_pools is None
    assert "inferencepools" not in own_rights(ON)


def test_pools_name_the_service_and_admit_its_peers() -> None:
    settings = platform(WITH_POOLS).inference_pools
    assert settings is not None
    service = find(render(WITH_POOLS), "Service", settings.picker_service)
    assert [port["port"] for port in service["spec"]["ports"]] == [settings.picker_port]
    assert list(settings.peers) == PEERS


def test_pools_need_rights_in_the_releases_namespace_alone() -> None:
    assert own_rights(WITH_POOLS)["inferencepools"] == ["get", "list", "watch", "create", "patch"]
    roles = [o for o in render(WITH_POOLS) if o["kind"].endswith("Role") and "inferencepools" in str(o["rules"])]
    assert [(o["kind"], o["metadata"]["name"]) for o in roles] == [("Role", "plimsoll-operator-own")]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gateway": {"endpointPicker": {"inferencePools": True}}}, "needs gateway.endpointPicker.enabled"),
        ({"gateway": {"endpointPicker": {"inferenceObjectives": True}}}, "needs gateway.endpointPicker.enabled"),
        (WITH_POOLS | {"watchNamespaces": ["team"]}, "plimsoll-system in watchNamespaces"),
    ],
)
def test_settings_that_cannot_work_are_an_error(values: Object, message: str) -> None:
    with pytest.raises(RenderError, match=message):
        render(values)
