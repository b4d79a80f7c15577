"""The manifests by which an HPA or KEDA follows the advice (docs/tasks) are right, and do follow it.

What an API server can judge it judges, field by field: the HPA itself, and the one that KEDA would make of its
ScaledObject. Queries are held against the operator's metrics, and that the count follows against the HPA's algorithm.
"""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache
from typing import Any

import pytest
import yaml

from plimsoll.controllers.autoscale.recommendations import build_recommendation
from plimsoll.controllers.keda_scaler.answers import METRIC_NAME, TARGET, replicas
from plimsoll.core.autoscaling.scaling_policy import ScalingMode
from plimsoll.core.types import Role
from plimsoll.sim.policies import hpa
from plimsoll.telemetry import operator_metrics
from tests.apiserver import ApiServer
from tests.chart.rendering import NAMESPACE, ROOT, find, render
from tests.chart.test_monitoring import KNOWN
from tests.core.test_autoscaler import Fleet, scaling_spec, service_metrics
from tests.docs.test_snippets import blocks

PAGES = [ROOT / "docs" / "tasks" / page for page in ("recommend-mode.md", "keda.md")]
RECOMMENDATION_METRIC = "plimsoll_autoscaler_desired_replicas"
KINDS = ("HorizontalPodAutoscaler", "ScaledObject")
# What of KEDA's ScaledObject the page uses, as its reference has it; metadata of a trigger are strings.
SPEC_FIELDS = {
    "scaleTargetRef",
    "minReplicaCount",
    "maxReplicaCount",
    "cooldownPeriod",
    "fallback",
    "triggers",
    "advanced",
}


@cache
def documents() -> dict[str, Any]:
    found = [yaml.safe_load(block.text) for page in PAGES for block in blocks(page) if block.language == "yaml"]
    return {one.get("kind", next(iter(one))): one for one in found}


def autoscaler(kind: str) -> dict[str, Any]:
    """The HPA as written, or the one that KEDA makes."""
    document: dict[str, Any] = documents()[kind]
    if kind == "HorizontalPodAutoscaler":
        return document
    spec = document["spec"]
    labels = {"scaledobject.keda.sh/name": document["metadata"]["name"]}
    metric = {"name": f"s0-{METRIC_NAME}", "selector": {"matchLabels": labels}}
    target = {"type": "AverageValue", "averageValue": str(TARGET)}  # a trigger's default metricType
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {**document["metadata"], "name": f"keda-hpa-{document['metadata']['name']}"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", **spec["scaleTargetRef"]},
            "minReplicas": max(1, spec["minReplicaCount"]),  # KEDA itself scales from and to zero
            "maxReplicas": spec["maxReplicaCount"],
            "metrics": [{"type": "External", "external": {"metric": metric, "target": target}}],
            **spec["advanced"]["horizontalPodAutoscalerConfig"],
        },
    }


def applied(server: ApiServer, *arguments: str, document: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    command = [
        str(server.kubectl),
        "--kubeconfig",
        str(server.kubeconfig),
        "apply",
        *arguments,
        "-o",
        "json",
        "-f",
        "-",
    ]
    return subprocess.run(command, input=json.dumps(document), capture_output=True, text=True, check=False)


@pytest.mark.api
@pytest.mark.parametrize("kind", KINDS)
def test_autoscaler_manifest_is_accepted_by_api_server(apiserver: ApiServer, kind: str) -> None:
    name = documents()[kind]["metadata"]["namespace"]
    applied(apiserver, document={"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    answer = applied(apiserver, "--dry-run=server", document=autoscaler(kind))
    assert answer.returncode == 0, answer.stderr
    kept = json.loads(answer.stdout)["spec"]
    for direction in ("scaleUp", "scaleDown"):
        assert kept["behavior"][direction]["stabilizationWindowSeconds"] == 0
        assert kept["behavior"][direction]["tolerance"] == "0", "dropped by a server that does not know it"


def test_scaled_object_uses_fields_known_to_keda() -> None:
    document = documents()["ScaledObject"]
    (trigger,) = document["spec"]["triggers"]
    assert document["apiVersion"] == "keda.sh/v1alpha1"
    assert set(document["spec"]) == SPEC_FIELDS
    assert (set(trigger), trigger["type"]) == ({"type", "metadata"}, "external-push")
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    assert document["spec"]["fallback"]["replicas"] > 0, "else an error of the scaler scales to zero"


def test_scaled_object_gets_the_recommendation_of_its_tier() -> None:
    """Its metadata, at the address that the chart's values of the page make."""
    document = documents()["ScaledObject"]
    metadata = document["spec"]["triggers"][0]["metadata"]
    namespace, target = document["metadata"]["namespace"], document["spec"]["scaleTargetRef"]["name"]
    fleet = Fleet(scaling_spec(mode=ScalingMode.RECOMMEND), arrives=False)
    fleet.run(service_metrics(60.0, Role.SERVE), 60)
    known = {(namespace, "chat"): build_recommendation((namespace, "chat"), fleet.service, fleet.now_s)}
    assert replicas(known.get, namespace, metadata) > 1
    assert target == f"{metadata['service']}-{metadata['tier']}"
    objects = render(documents()["operator"])
    [port] = find(objects, "Service", "plimsoll-keda")["spec"]["ports"]
    assert metadata["scalerAddress"] == f"plimsoll-keda.{NAMESPACE}.svc:{port['port']}"


def hpa_query() -> str:
    """The query that Prometheus gets from the adapter."""
    document = documents()["HorizontalPodAutoscaler"]
    (rule,), (metric,) = documents()["externalRules"]["externalRules"], document["spec"]["metrics"]
    assert rule["name"]["as"] == metric["external"]["metric"]["name"]
    (label,) = rule["resources"]["overrides"]
    labels = metric["external"]["metric"]["selector"]["matchLabels"]
    values = {**labels, label: document["metadata"]["namespace"]}  # what the adapter adds of itself
    query = re.sub(r'<<index \.LabelValuesByName "(\w+)">>', lambda match: values[match[1]], rule["metricsQuery"])
    return query.replace("<<.Series>>", rule["seriesQuery"])


@pytest.mark.api
def test_hpa_query_is_that_of_a_go_template(apiserver: ApiServer) -> None:
    """The adapter's template language, in kubectl: its delimiters differ."""
    (rule,) = documents()["externalRules"]["externalRules"]
    values = {"namespace": "team", "service": "chat", "tier": "serve"}
    fields = {"Series": rule["seriesQuery"], "LabelValuesByName": values}
    document = {"apiVersion": "example.com/v1", "kind": "Arguments", "metadata": {"name": "a"}, **fields}
    template = rule["metricsQuery"].replace("<<", "{{").replace(">>", "}}")
    command = [str(apiserver.kubectl), "label", "--local", "-f", "-", "a=b", "-o", f"go-template={template}"]
    done = subprocess.run(command, input=json.dumps(document), capture_output=True, text=True, check=True)
    assert done.stdout == hpa_query()


def test_hpa_queries_the_recommendation_metric() -> None:
    assert re.sub(r"\s", "", hpa_query()) == f'max({RECOMMENDATION_METRIC}{{service="team/chat",tier="serve"}})'


def test_recommendation_metric_has_the_queried_labels() -> None:
    names = re.findall(r"\b(plimsoll_\w+)\{([^}]*)\}", hpa_query())
    assert [name for name, _ in names] == [RECOMMENDATION_METRIC]
    assert set(re.findall(r"(\w+)=", names[0][1])) <= KNOWN[RECOMMENDATION_METRIC]
    assert list(operator_metrics.AUTOSCALER_DESIRED._labelnames) == ["service", "tier"]


def test_hpa_selector_values_are_valid_labels() -> None:
    """An API server takes others, and the autoscaler then refuses them at every look."""
    (metric,) = documents()["HorizontalPodAutoscaler"]["spec"]["metrics"]
    for value in metric["external"]["metric"]["selector"]["matchLabels"].values():
        assert re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", value)


@pytest.mark.parametrize("kind", KINDS)
def test_autoscaler_replicas_equal_recommendation_at_next_sync(kind: str) -> None:
    spec = autoscaler(kind)["spec"]
    limits = {}
    for direction in ("scaleUp", "scaleDown"):
        (policy,) = spec["behavior"][direction]["policies"]
        limits[direction] = (hpa.HpaRateLimit(policy["value"], policy["periodSeconds"], policy["type"] == "Percent"),)
    up, down = (spec["behavior"][direction] for direction in ("scaleUp", "scaleDown"))
    assert up["tolerance"] == down["tolerance"]
    windows = up["stabilizationWindowSeconds"], down["stabilizationWindowSeconds"]
    rules = hpa.HpaBehavior(*windows, limits["scaleUp"], limits["scaleDown"], up["tolerance"])
    target = float(spec["metrics"][0]["external"]["target"]["averageValue"])
    assert _simulate_autoscaler(rules, target) == RECOMMENDED_REPLICAS
    assert _simulate_autoscaler(hpa.HpaBehavior(), target) != RECOMMENDED_REPLICAS


RECOMMENDED_REPLICAS = [1, 12, 13, 14, 4, 30, 29, 28, 1]


def _simulate_autoscaler(rules: hpa.HpaBehavior, target: float) -> list[int]:
    """Counts of an autoscaler that looks every 15 s, at advice that has just changed."""
    scaler, counts, count = hpa.Hpa(rules, (1, 100)), [], 1
    for look, advice in enumerate(RECOMMENDED_REPLICAS):
        count = scaler.sync(15.0 * look, count, hpa.propose_from_total(advice, target, count, rules.tolerance))
        counts.append(count)
    return counts
