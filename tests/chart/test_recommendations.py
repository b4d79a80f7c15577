"""What the operator offers to other autoscalers: off by default, and open to those that the values name."""

from __future__ import annotations

import pytest

from plimsoll.resources.platform_config import KedaScalerSettings
from tests.chart.rendering import Object, RenderError, containers, find, of_kind, pod_specs, render
from tests.chart.test_objects import settings

KEDA: Object = {"operator": {"kedaScaler": {"enabled": True}}}
READERS = [{"namespaceSelector": {"matchLabels": {"team": "capacity"}}}]
API: Object = {"operator": {"recommendations": {"enabled": True, "from": READERS}}}
KEDA_PEERS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}]


def services(values: Object) -> set[str]:
    return {o["metadata"]["name"] for o in of_kind(render(values), "Service")}


def ingress(values: Object) -> list[Object]:
    rules: list[Object] = find(render(values), "NetworkPolicy", "plimsoll-operator")["spec"]["ingress"]
    return rules


def test_scaler_and_api_are_off_by_default() -> None:
    assert services({}) == {"plimsoll-gateway"}
    assert ingress({}) == []
    assert settings().keda_scaler is None


@pytest.mark.parametrize(("values", "name", "peers"), [(KEDA, "keda", KEDA_PEERS), (API, "recommendations", READERS)])
def test_service_reaches_port_that_the_peers_may_use(values: Object, name: str, peers: list[Object]) -> None:
    objects = render(values)
    assert services(values) == {"plimsoll-gateway", f"plimsoll-{name}"}
    service, operator = find(objects, "Service", f"plimsoll-{name}"), find(objects, "Deployment", "plimsoll-operator")
    [port] = service["spec"]["ports"]
    assert service["spec"]["selector"].items() <= operator["spec"]["template"]["metadata"]["labels"].items()
    [container] = containers(pod_specs(objects)["plimsoll-operator"])
    assert port["targetPort"] in [one["containerPort"] for one in container["ports"]]
    assert ingress(values) == [{"ports": [{"port": port["targetPort"], "protocol": "TCP"}], "from": peers}]


def test_operator_serves_keda_on_the_port_of_the_service() -> None:
    [port] = find(render(KEDA), "Service", "plimsoll-keda")["spec"]["ports"]
    assert settings(KEDA).keda_scaler == KedaScalerSettings(port=port["targetPort"])


def test_scaler_certificate_is_mounted_where_it_is_read() -> None:
    tls = {"secretName": "scaler-tls", "requireClientCertificate": True}
    values = {"operator": {"kedaScaler": {"enabled": True, "tls": tls}}}
    pod = pod_specs(render(values))["plimsoll-operator"]
    found = settings(values).keda_scaler
    assert found is not None
    assert found.require_client_certificate
    [mount] = [m for m in containers(pod)[0]["volumeMounts"] if m["mountPath"] == found.certificate_directory]
    [volume] = [v for v in pod["volumes"] if v["name"] == mount["name"]]
    assert volume["secret"]["secretName"] == "scaler-tls"


def test_client_certificates_need_a_server_certificate() -> None:
    with pytest.raises(RenderError, match=r"requireClientCertificate needs operator\.kedaScaler\.tls\.secretName"):
        render({"operator": {"kedaScaler": {"enabled": True, "tls": {"requireClientCertificate": True}}}})


def test_api_without_peers_is_closed() -> None:
    assert ingress({"operator": {"recommendations": {"enabled": True}}}) == []


def test_peers_of_a_disabled_endpoint_get_nothing() -> None:
    assert ingress({"operator": {"recommendations": {"from": READERS}, "kedaScaler": {"from": READERS}}}) == []


def test_scaler_values_of_an_earlier_chart_are_enough() -> None:
    """As `helm upgrade --reuse-values` renders it, which has the old chart's values alone."""
    objects = render({"operator": {"recommendations": None, "kedaScaler": None}})
    assert [o["metadata"]["name"] for o in of_kind(objects, "Service")] == ["plimsoll-gateway"]
