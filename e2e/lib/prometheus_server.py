"""A Prometheus in the cluster that scrapes by the configuration of the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import yaml

from e2e.cluster.images import reference
from e2e.lib import stack
from e2e.lib.kube import Cluster, Object, is_true
from e2e.lib.prometheus import PrometheusClient, discovered
from e2e.lib.task_pages import documented
from e2e.lib.wait import wait_until
from plimsoll.api import labels

NAME: Final = "prometheus"  # of pod, container and Service
PORT: Final = 9090
FOLDER: Final = "/etc/prometheus"  # of its files
RULES: Final = stack.CHART / "files" / "rules"
_CONTEXT: Final = {
    "runAsNonRoot": True, "runAsUser": 1000, "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]}, "seccompProfile": {"type": "RuntimeDefault"},
}  # fmt: skip


def start(
    cluster: Cluster, namespace: str, pods: Iterable[Object], extra: Mapping[str, str] | None = None
) -> PrometheusClient:
    """One in this namespace, ready, under the restricted pod security standard. It scrapes `pods`.

    extra: further files than its configuration, by name.
    """
    rules = "plimsoll.yaml"
    files = {"prometheus.yml": _configuration(pods), rules: (RULES / rules).read_text(), **(extra or {})}
    pod_meta = {"name": NAME, "labels": {labels.NAME: NAME}}
    service_spec = {"selector": pod_meta["labels"], "ports": [{"port": PORT}]}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME}, "spec": service_spec},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}, "data": files},
        {"apiVersion": "v1", "kind": "Pod", "metadata": pod_meta, "spec": _pod()},
        namespace=namespace,
    )
    wait_until("Prometheus runs", lambda: is_true(cluster.get("pods", NAME, namespace), "Ready"), 120)
    path = f"/api/v1/namespaces/{namespace}/pods/{NAME}:{PORT}/proxy"
    return PrometheusClient(lambda requested: cluster.raw(path + requested))


def plimsoll_pods(cluster: Cluster) -> list[Object]:
    """The pods of operator and gateway."""
    found: list[Object] = []
    for component in ("operator", "gateway"):
        found += cluster.list("pods", stack.SYSTEM, f"{labels.COMPONENT}={component}")
    return [pod for pod in found if is_true(pod, "Ready") and "deletionTimestamp" not in pod["metadata"]]


def _configuration(pods: Iterable[Object]) -> str:
    """The documented one, relabelling and all, with faster scrapes and these pods."""
    configuration = documented("monitor.md", "scrape_configs")
    configuration["global"] |= {"scrape_interval": "5s", "scrape_timeout": "4s"}
    targets = discovered(pods)
    for job in configuration["scrape_configs"]:
        assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
        job["static_configs"] = targets
    return yaml.safe_dump(configuration)


def _pod() -> Object:
    files, data, scratch = ({"name": name, "mountPath": path} for name, path in (
        ("files", FOLDER), ("data", "/prometheus"), ("tmp", "/tmp"),
    ))  # fmt: skip
    container: Object = {
        "name": NAME,
        "image": reference(NAME),
        "imagePullPolicy": "Always",
        "args": [f"--config.file={FOLDER}/prometheus.yml", "--storage.tsdb.path=/prometheus"],
        "ports": [{"containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/-/ready", "port": PORT}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": _CONTEXT,
        "volumeMounts": [files, data, scratch],
    }
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
        "volumes": [
            {"name": "files", "configMap": {"name": NAME}},
            {"name": "data", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
