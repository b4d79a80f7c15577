"""The Prometheus adapter in the local cluster, from its Go module, with external metrics alone.

Its own manifests are applied, but for image, requests, rules and the API: they serve resource metrics, and leave out
that the HPA controller may read external ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import yaml

from e2e.cluster.go_modules import downloaded
from e2e.cluster.images import reference
from e2e.cluster.prometheus_adapter import MODULE
from e2e.lib import external_metrics
from e2e.lib.kube import Cluster, Object

NAMESPACE: Final = "monitoring"
READY_S: Final = 240
_NAME: Final = "prometheus-adapter"
_LEFT_OUT: Final = ("api-service", "cluster-role-binding-hpa-custom-metrics", "network-policy", "pod-disruption-budget")
_READER: Final = "external-metrics-reader"
_RBAC: Final = "rbac.authorization.k8s.io"


@contextmanager
def installed(cluster: Cluster, rules: Object, prometheus_url: str) -> Iterator[None]:
    """The adapter with these rules, ready; gone afterwards. rules: its configuration file."""
    manifests = sorted((downloaded(MODULE) / "deploy" / "manifests").glob("*.yaml"))
    objects: list[Object] = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}]
    objects += [yaml.safe_load(path.read_text()) for path in manifests if path.stem not in _LEFT_OUT]
    for one in objects:
        if one["kind"] == "ConfigMap":
            one["data"] = {"config.yaml": yaml.safe_dump(rules)}
        if one["kind"] == "Deployment":
            _adapt(one, prometheus_url)
    text = "---\n".join(json.dumps(one) + "\n" for one in [*objects, *_external_metrics()])
    cluster.kubectl("apply", "-f", "-", stdin=text)
    try:
        wait = ("wait", "--for=condition=Available", f"--timeout={READY_S}s", "deployment", _NAME, "-n", NAMESPACE)
        cluster.kubectl(*wait, timeout_s=READY_S + 15)
        external_metrics.wait_served(cluster)
        yield
    finally:
        cluster.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=text)


def _adapt(deployment: Object, prometheus_url: str) -> None:
    deployment["spec"]["replicas"] = 1
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    args = [word for word in container["args"] if not word.startswith(("--prometheus-url", "--metrics-relist"))]
    args += [f"--prometheus-url={prometheus_url}", "--metrics-relist-interval=30s"]
    container |= {"image": reference(_NAME), "imagePullPolicy": "Always", "command": [f"/{_NAME}"], "args": args}
    container["resources"]["requests"] = {"cpu": "10m", "memory": "64Mi"}


def _external_metrics() -> list[Object]:
    """The API of external metrics, and the right of the HPA controller to read it."""
    group, version = external_metrics.GROUP, external_metrics.VERSION
    service = {"name": _NAME, "namespace": NAMESPACE}
    controller = {"kind": "ServiceAccount", "name": "horizontal-pod-autoscaler", "namespace": "kube-system"}
    api = {"group": group, "version": version, "groupPriorityMinimum": 100, "versionPriority": 100}
    return [
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "ClusterRole",
            "metadata": {"name": _READER},
            "rules": [{"apiGroups": [group], "resources": ["*"], "verbs": ["get", "list"]}],
        },
        {
            "apiVersion": f"{_RBAC}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": _READER},
            "roleRef": {"apiGroup": _RBAC, "kind": "ClusterRole", "name": _READER},
            "subjects": [controller],
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"{version}.{group}"},
            "spec": {**api, "service": service, "insecureSkipTLSVerify": True},
        },
    ]
