"""The values are what they claim: all documented, all used, all checked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import pytest
import yaml

from charts import docs
from tests.chart.rendering import CHART, EVERYTHING, Object, RenderError, merged, render

VALUES: Object = yaml.safe_load(docs.VALUES.read_text())
SCHEMA: Object = yaml.safe_load((CHART / "values.schema.json").read_text())
KEYS = docs.read(docs.VALUES.read_text())
ROWS = docs.rows_of(KEYS)

ENABLED_VALUES = (
    "networkPolicy.egress.enabled",
    "metrics.podMonitor.enabled",
    "monitoring.prometheusRule.enabled",
    "monitoring.dashboard.enabled",
    "webhook.enabled",
    "operator.recommendations.enabled",
    "operator.kedaScaler.enabled",
    "gateway.endpointPicker.enabled",
    "gateway.ingress.enabled",
    "gateway.httpRoute.enabled",
)

# What a value excludes, or needs.
WITHOUT: dict[str, Object] = {
    "engine.tls.secretName": {"gateway": {"endpointPicker": {"enabled": False}}},
    "engine.nodeCache.size": {"engine": {"nodeCache": {"path": "/var/cache"}}},
}

# A legal value other than the default, where that does not follow from the default's type.
OTHER: dict[str, Any] = {
    "nameOverride": "other",
    "fullnameOverride": "other",
    "image.digest": "sha256:" + "0" * 64,
    "image.pullPolicy": "Never",
    "imagePullSecrets": [{"name": "other"}],
    "watchNamespaces": ["other"],
    "podSecurityContext": {"runAsUser": 1234},
    "securityContext": {"runAsUser": 1234},
    "networkPolicy.clients": [{"podSelector": {"matchLabels": {"other": "x"}}}],
    "networkPolicy.egress.dns": [{"podSelector": {}}],
    "networkPolicy.egress.apiServer": [{"podSelector": {}}],
    "networkPolicy.egress.apiServerPorts": [16443],
    **{f"networkPolicy.egress.{part}": [{"to": []}] for part in ("engines", "gateway", "operator")},
    "metrics.from": [{"podSelector": {}}],
    "metrics.podMonitor.interval": "7s",
    "monitoring.prometheusRule.docsUrl": "https://docs.example/",
    "monitoring.prometheus.url": "http://prometheus.example:9090",
    "telemetry.traces.endpoint": "http://other.example:4318",
    "telemetry.traces.samplingRate": 0.5,
    "engine.imagePullPolicy": "Never",
    "engine.imagePullSecrets": [{"name": "other"}],
    "engine.gpuResource": "amd.com/gpu",
    "engine.nodeCache.path": "/var/other",
    "engine.nodeCache.size": "7Gi",
    "engine.defaults.args": ["--other"],
    "engine.defaults.env": [{"name": "OTHER", "value": "x"}],
    "operator.replicas": 1,
    "operator.env": [{"name": "OTHER", "value": "x"}],
    **{f"operator.{part}.from": [{"podSelector": {}}] for part in ("recommendations", "kedaScaler")},
    "webhook.namespaceSelector": {"matchLabels": {"other": "x"}},
    "webhook.certificate.caBundle": "-----BEGIN CERTIFICATE-----\nother",
    "serviceLimits.namespaceSelector": {"matchLabels": {"other": "x"}},
    "serviceLimits.volumeTypes": ["hostPath"],
    **{f"serviceLimits.{key}": ["other"] for key in ("serviceAccounts", "priorityClasses", "runtimeClasses", "images")},
    "gateway.autoscaling.maxReplicas": 5,
    "gateway.autoscaling.pickerCpu": "1",
    "gateway.envoy.image.digest": "sha256:" + "0" * 64,
    "gateway.envoy.image.pullPolicy": "Never",
    "gateway.picker.env": [{"name": "OTHER", "value": "x"}],
    "gateway.service.type": "ClusterIP",
    "gateway.service.port": 8443,
    "gateway.authentication.jwt.issuers": [{"issuer": "a", "audiences": ["b"], "jwksUri": "https://a.example/keys"}],
    "gateway.service.nodePort": 30123,
    "gateway.tls.minVersion": "TLSv1.3",
    "gateway.tls.plaintext": "Allow",
    "gateway.service.externalTrafficPolicy": "Local",
    "gateway.authentication.apiKeys": "Required",
    "gateway.corsAllowedOrigins": ["https://app.example"],
    "targets.resources": [{"apiGroup": "other.example", "resources": ["others"]}],
    "gateway.shortModelNames.namespaces": ["other"],
    "gateway.endpointPicker.from": [{"podSelector": {}}],
    "gateway.service.loadBalancerSourceRanges": ["10.0.0.0/8"],
    "gateway.ingress.hosts": ["llm.example"],
    "gateway.ingress.tls": [{"hosts": ["llm.example"], "secretName": "other"}],
    "gateway.httpRoute.parentRefs": [{"name": "other"}],
    "gateway.httpRoute.hostnames": ["llm.example"],
    "gateway.httpRoute.timeouts": {"request": "9s"},
    **{f"{part}.antiAffinity": "required" for part in ("operator", "gateway")},
    **{f"{part}.tolerations": [{"operator": "Exists"}] for part in ("operator", "gateway")},
    **{f"{part}.topologySpreadConstraints": [{"maxSkew": 1}] for part in ("operator", "gateway")},
}


def other_value(row: docs.ChartValue) -> Any:
    if row.name in OTHER:
        return OTHER[row.name]
    if isinstance(row.default, bool):
        return not (row.default or row.name in ENABLED_VALUES)
    if isinstance(row.default, int):
        return row.default + 1
    if row.name.endswith("resources"):
        return {"requests": {"cpu": "17m"}}
    if isinstance(row.default, dict):
        return {"other": "x"}
    return "other"


def nested(path: tuple[str, ...], value: Any) -> Object:
    for key in reversed(path):
        value = {key: value}
    return value  # type: ignore[no-any-return]


def closed_objects(schema: Object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every object of the values that has keys of its own."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    if schema.get("type") == "object" and "properties" in schema:
        yield path
        for key, child in schema["properties"].items():
            yield from closed_objects(child, (*path, key))


def test_every_value_is_documented() -> None:
    rows = {row.path for row in ROWS}
    bare = [v.name for v in KEYS if not isinstance(v.default, dict) and not any(v.path[: len(r)] == r for r in rows)]
    assert bare == []


@cache
def with_everything() -> list[Object]:
    return render(EVERYTHING)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_value_changes_rendering(row: docs.ChartValue) -> None:
    values = merged(EVERYTHING, WITHOUT.get(row.name, {}))
    changed = render(merged(values, nested(row.path, other_value(row))))
    assert changed != (render(values) if row.name in WITHOUT else with_everything())


def test_templates_use_only_existing_values() -> None:
    names = {value.name for value in KEYS}
    used = set()
    for template in (CHART / "templates").rglob("*.*"):
        used |= set(re.findall(r"\.Values\.([A-Za-z.]+[A-Za-z])", template.read_text()))
    assert used
    assert used - names == set()


def test_defaults_satisfy_schema_and_schema_has_no_other_key() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)
    for path in closed_objects(SCHEMA):
        schema, values = SCHEMA, VALUES
        for key in path:
            schema, values = schema["properties"][key], values[key]
            schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        optional = {"global", "requests", "limits", "backendRequest", "matchLabels", "matchExpressions"}
        assert set(schema["properties"]) - optional == set(values) - optional, path


@pytest.mark.parametrize("path", list(closed_objects(SCHEMA)), ids=".".join)
def test_schema_rejects_unknown_keys_everywhere(path: tuple[str, ...]) -> None:
    values = nested(path, {"tpyo": 1})
    validator = jsonschema.Draft7Validator(SCHEMA)
    errors = [e.message for e in validator.iter_errors(merged(VALUES, values))]
    assert any("'tpyo' was unexpected" in message for message in errors)


def issuer(**changes: Any) -> Object:
    """Values with one issuer; a change to None removes a field."""
    found = {"issuer": "a", "audiences": ["b"], "jwksUri": "https://a.example/keys", **changes}
    fields = {name: value for name, value in found.items() if value is not None}
    return {"gateway": {"authentication": {"jwt": {"issuers": [fields]}}}}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gatway": {}}, "gatway"),
        ({"gateway": {"service": {"type": "Loadbalancer"}}}, "gateway/service/type"),
        ({"gateway": {"authentication": {"apiKeys": "required"}}}, "gateway/authentication/apiKeys"),
        ({"gateway": {"tls": {"secretName": "not a name"}}}, "gateway/tls/secretName"),
        ({"gateway": {"tls": {"minVersion": "TLSv1.1"}}}, "gateway/tls/minVersion"),
        ({"gateway": {"tls": {"minVersion": 1.3}}}, "gateway/tls/minVersion"),
        ({"gateway": {"tls": {"plaintext": "Redirect"}}}, "gateway/tls/plaintext"),
        (issuer(audiences=[]), "issuers/0/audiences"),
        (issuer(jwksUri="http://a.example/keys"), "issuers/0/jwksUri"),
        (issuer(jwks='{"keys": []}'), "issuers/0"),
        (issuer(jwksUri=None), "issuers/0"),
        (issuer(claims={"team": "x"}), "issuers/0/claims"),
        (issuer(caBundle="LS0t"), "issuers/0/caBundle"),
        ({"operator": {"replicas": 3}}, "operator/replicas"),
        ({"operator": {"kedaScaler": {"from": [{"matchLabels": {}}]}}}, "operator/kedaScaler/from/0"),
        ({"gateway": {"replicas": "2"}}, "gateway/replicas"),
        ({"image": {"digest": "latest"}}, "image/digest"),
        ({"engine": {"defaults": {"args": [4096]}}}, "engine/defaults/args/0"),
        ({"engine": {"rollout": {"generation": "v2"}}}, "engine/rollout/generation"),
        ({"engine": {"rollout": {"generation": -1}}}, "engine/rollout/generation"),
        ({"engine": {"rollout": {"maxUnavailableServices": 0}}}, "engine/rollout/maxUnavailableServices"),
        ({"engine": {"rollout": {"minReadySeconds": "2m"}}}, "engine/rollout/minReadySeconds"),
        ({"metrics": {"from": [{"matchLabels": {}}]}}, "metrics/from/0"),
        ({"watchNamespaces": "team-a"}, "watchNamespaces"),
        ({"telemetry": {"traces": {"endpoint": "https://c:4318"}}}, "telemetry/traces/endpoint"),
        ({"telemetry": {"traces": {"samplingRate": 5}}}, "telemetry/traces/samplingRate"),
        ({"gateway": {"httpRoute": {"enabled": True}}}, "parentRefs"),
        ({"webhook": {"timeoutSeconds": 6}}, "webhook/timeoutSeconds"),
        ({"webhook": {"certificate": {"caBundle": "LS0t"}}}, "webhook/certificate/caBundle"),
    ],
)
def test_helm_rejects_invalid_value_and_names_it(values: Object, words: str) -> None:
    with pytest.raises(RenderError, match=words):
        render(values)


def test_global_values_are_accepted() -> None:
    assert render({"global": {"anything": 1}}) == render()
