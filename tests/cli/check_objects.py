"""Objects of a cluster for `check`."""

from __future__ import annotations

from typing import Any

from plimsoll.cli.findings import Finding
from plimsoll.cli.placement import TierPods

Object = dict[str, Any]

GPU, RDMA = "nvidia.com/gpu", "rdma/hca"
GPU_TAINT = {"key": GPU, "effect": "NoSchedule"}
TEAM_TAINT = {"key": "team", "value": "chat", "effect": "NoSchedule"}


def node(name: str = "n", taints: list[Object] | None = None, gpus: int = 8, **resources: int) -> Object:
    found = {GPU: str(gpus), "cpu": "64", **{key.replace("__", "/"): str(count) for key, count in resources.items()}}
    return {
        "metadata": {"name": name, "labels": {"pool": "gpu"}},
        "spec": {"taints": taints or []},
        "status": {"allocatable": found, "capacity": found},
    }


def tier(role: str = "serve", limits: Object | None = None, **spec: Any) -> TierPods:
    resources = {"limits": {GPU: "2"} if limits is None else limits}
    tolerations = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    template = {"spec": {"containers": [{"resources": resources}], "tolerations": tolerations, **spec}}
    return TierPods(f"team/chat {role}", f"spec.tiers.{role}", template)


def storage_class(name: str, provisioner: str, binding: str = "Immediate", *, default: bool = False) -> Object:
    notes = {"storageclass.kubernetes.io/is-default-class": "true"} if default else {}
    meta = {"name": name, "annotations": notes}
    return {"metadata": meta, "provisioner": provisioner, "volumeBindingMode": binding}


def daemon_set(name: str, *arguments: str) -> Object:
    pod = {"containers": [{"name": "agent", "args": [*arguments]}]}
    return {"metadata": {"name": name, "namespace": "kube-system"}, "spec": {"template": {"spec": pod}}}


def only(findings: Any) -> Finding:
    [found] = findings
    return found
