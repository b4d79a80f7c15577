"""Fleets of engines that Plimsoll did not make, as platform teams run them: engine simulators behind vLLM's own API.

Two kinds have no controller in the local cluster: a LeaderWorkerSet, and a kind of another project with a `scale`
subresource. Their objects are real, and `make_pods` stands for their controllers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from e2e.cluster.images import reference
from e2e.lib.definitions import wait_until_established
from e2e.lib.kube import Cluster

Object = dict[str, Any]

PORT: Final = 8000
FLAGS: Final = {"port": PORT, "profile": "h200-8b-cool", "profile-scale": 4, "spread": 0, "max-num-seqs": 8}
SET_CRD: Final = Path(__file__).parent / "leaderworkersets-crd.yaml"
GROUP: Final = "fleets.example.dev"
_SET: Final = "leaderworkerset.sigs.k8s.io"

# A kind of another project: only its `scale` is known to Plimsoll.
CRD: Final[Object] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"modelfleets.{GROUP}"},
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {"kind": "ModelFleet", "plural": "modelfleets", "singular": "modelfleet"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {
                    "status": {},
                    "scale": {
                        "specReplicasPath": ".spec.replicas",
                        "statusReplicasPath": ".status.replicas",
                        "labelSelectorPath": ".status.selector",
                    },
                },
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}
# The chart value `targets` that lets Plimsoll read the kinds of all fleets.
TARGETS: Final[Object] = {
    "resources": [
        {"apiGroup": "apps", "resources": ["statefulsets"]},
        {"apiGroup": "leaderworkerset.x-k8s.io", "resources": ["leaderworkersets"]},
        {"apiGroup": GROUP, "resources": ["modelfleets"]},
    ]
}


@dataclass(frozen=True)
class Fleet:
    """One fleet. plural: its resource. pod_labels: of its pods. autoscaler: whether an HPA scales it.

    kv_role: of vLLM's KV connector, for one that does prefill or decode alone.
    """

    name: str
    api_version: str
    kind: str
    plural: str
    pod_labels: tuple[tuple[str, str], ...]
    autoscaler: bool = False
    kv_role: str = ""

    @property
    def has_controller(self) -> bool:
        """Whether Kubernetes itself makes its pods."""
        return self.api_version == "apps/v1"

    @property
    def resource(self) -> str:
        """The resource with its group, as kubectl takes it."""
        return f"{self.plural}.{self.api_version.partition('/')[0]}"

    @property
    def selector(self) -> str:
        """The pods, as a selector."""
        return ",".join(f"{key}={value}" for key, value in self.pod_labels)

    @property
    def reference(self) -> Object:
        """The object, as a `scaleTargetRef`."""
        return {"apiVersion": self.api_version, "kind": self.kind, "name": self.name}

    def manifests(self) -> list[Object]:
        """What its owner applies."""
        spec = {
            "Deployment": self._controlled,
            "StatefulSet": lambda: {**self._controlled(), "serviceName": self.name},
            "LeaderWorkerSet": lambda: {"replicas": 1, "leaderWorkerTemplate": {"workerTemplate": self._template()}},
            "ModelFleet": lambda: {"replicas": 1, "engine": self._template()},
        }[self.kind]()
        meta = {"name": self.name, "labels": {"team": "own"}}
        workload = {"apiVersion": self.api_version, "kind": self.kind, "metadata": meta, "spec": spec}
        return [workload, self._autoscaler()] if self.autoscaler else [workload]

    def _controlled(self) -> Object:
        return {"replicas": 1, "selector": {"matchLabels": dict(self.pod_labels)}, "template": self._template()}

    def _template(self) -> Object:
        return {
            "metadata": {"labels": {**dict(self.pod_labels), "llm-d.ai/model": "sim-8b"}},
            "spec": _pod_spec(self.kv_role),
        }

    def _autoscaler(self) -> Object:
        return {
            "apiVersion": "autoscaling/v2",
            "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": f"{self.name}-theirs"},
            "spec": {"scaleTargetRef": self.reference, "minReplicas": 1, "maxReplicas": 4},
        }

    def pod(self, uid: str) -> Object:
        """The pod that a controller would make. uid: of the live object."""
        template = self._template()
        owner = {**self.reference, "uid": uid, "controller": True}
        meta = {**template["metadata"], "name": f"{self.name}-0", "ownerReferences": [owner]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": template["spec"]}


FLEETS: Final = (
    Fleet("plain", "apps/v1", "Deployment", "deployments", (("app", "plain"),)),
    Fleet("stateful", "apps/v1", "StatefulSet", "statefulsets", (("app", "stateful"),)),
    Fleet(
        "grouped", "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", "leaderworkersets",
        ((f"{_SET}/name", "grouped"), (f"{_SET}/worker-index", "0")),
    ),
    Fleet("foreign", f"{GROUP}/v1", "ModelFleet", "modelfleets", (("fleet", "foreign"),)),
    Fleet("scaled", "apps/v1", "Deployment", "deployments", (("app", "scaled"),), autoscaler=True),
)  # fmt: skip


def install_kinds(cluster: Cluster) -> None:
    """Install the two kinds, and wait until they are served."""
    cluster.apply(CRD)
    cluster.kubectl("apply", "-f", str(SET_CRD))
    names = (f"crd/{CRD['metadata']['name']}", "crd/leaderworkersets.leaderworkerset.x-k8s.io")
    wait_until_established(cluster.kubectl, *names)


def remove_kinds(cluster: Cluster) -> None:
    """Remove the two kinds with their objects."""
    cluster.delete("crd", CRD["metadata"]["name"], "leaderworkersets.leaderworkerset.x-k8s.io")


def create(cluster: Cluster, fleet: Fleet, namespace: str) -> None:
    """Apply a fleet, and do the part of its controller if it has none."""
    cluster.apply(*fleet.manifests(), namespace=namespace)
    if fleet.has_controller:
        return
    live = cluster.get_object(fleet.resource, fleet.name, namespace)
    field = "hpaPodSelector" if fleet.kind == "LeaderWorkerSet" else "selector"
    status = {"replicas": 1, field: fleet.selector}
    argv = ("patch", fleet.resource, fleet.name, "-n", namespace, "--type=merge")
    cluster.kubectl(*argv, "--subresource=status", "-p", json.dumps({"status": status}))
    cluster.apply(fleet.pod(live["metadata"]["uid"]), namespace=namespace)


def snapshot(cluster: Cluster, fleet: Fleet, namespace: str) -> str:
    """All that users and controllers have written of a fleet and its pods, as text: only status is left out."""
    found = [cluster.get_object(fleet.resource, fleet.name, namespace)]
    if fleet.autoscaler:
        found.append(cluster.get_object("horizontalpodautoscalers.autoscaling", f"{fleet.name}-theirs", namespace))
    found += cluster.list("pods", namespace, fleet.selector)
    return json.dumps([_written(one) for one in found], sort_keys=True, indent=1)


def _written(obj: Object) -> Object:
    """An object without its status, and without what the API server counts on each write of a status."""
    meta = {name: value for name, value in obj["metadata"].items() if name != "resourceVersion"}
    managers = [one for one in meta.get("managedFields", ()) if one.get("subresource") != "status"]
    rest = {name: value for name, value in obj.items() if name not in ("status", "metadata")}
    return {**rest, "metadata": {**meta, "managedFields": managers}}


def _pod_spec(kv_role: str) -> Object:
    image = reference("engine-simulated")
    flags = [f"--{name}={value}" for name, value in FLAGS.items()]
    if kv_role:
        flags.append(f"--kv-transfer-config={json.dumps({'kv_connector': 'NixlConnector', 'kv_role': kv_role})}")
    container = {
        "name": "vllm",
        "image": image,
        "command": ["python3", "-m", "simulated", "serve", "example/sim-8b", *flags],
        "env": [
            {"name": "PYTHONPATH", "value": "/opt/plimsoll"},
            {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        "ports": [{"containerPort": PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": PORT}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    security = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    return {"containers": [container], "securityContext": security}
