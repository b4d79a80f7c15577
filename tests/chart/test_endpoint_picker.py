"""The endpoint picker for other gateways: off by default, and reached by the peers that the values name."""

from __future__ import annotations

from typing import Any

import pytest

from plimsoll.gateway.settings import PickerSettings
from tests.chart.rendering import Object, RenderError, containers, find, of_kind, pod_specs, render

PEERS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}}]
ON: Object = {"gateway": {"endpointPicker": {"enabled": True, "from": PEERS}}}
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
