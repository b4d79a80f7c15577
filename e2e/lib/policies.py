"""kube-router's controller of NetworkPolicies in the local cluster, whose own network enforces none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from e2e.cluster.images import reference
from e2e.lib.kube import Cluster, Object
from e2e.lib.node import on_node

NAMESPACE: Final = "kube-system"
_NAME: Final = "policy-controller"
_READY_S: Final = 120


@contextmanager
def enforced(cluster: Cluster) -> Iterator[None]:
    """NetworkPolicies have an effect; afterwards they have none, and the node's rules are as before."""
    text = "---\n".join(json.dumps(one) + "\n" for one in _objects())
    try:
        cluster.kubectl("apply", "-f", "-", stdin=text)
        cluster.kubectl("rollout", "status", f"daemonset/{_NAME}", "-n", NAMESPACE, f"--timeout={_READY_S}s")
        yield
    finally:
        cluster.kubectl("delete", "--ignore-not-found", "--wait", "-f", "-", stdin=text)
        _remove_rules()


def _remove_rules() -> None:
    """What the controller has left in the node, if it was killed."""
    saved = on_node("iptables-save", "-t", "filter").splitlines()
    kept = [
        line for line in saved if "KUBE-ROUTER" not in line and "KUBE-POD-FW" not in line and "KUBE-NWPLCY" not in line
    ]
    if kept != saved:
        on_node("sh", "-c", f"iptables-restore <<'END'\n{chr(10).join(kept)}\nEND")


def _objects() -> list[Object]:
    account: Object = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": _NAME, "namespace": NAMESPACE},
    }
    group = "rbac.authorization.k8s.io"
    read = ["get", "list", "watch"]
    role: Object = {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRole",
        "metadata": {"name": _NAME},
        "rules": [
            {"apiGroups": [""], "resources": ["pods", "namespaces", "nodes"], "verbs": read},
            {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": read},
        ],
    }
    binding: Object = {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": _NAME},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": _NAME},
        "subjects": [{"kind": "ServiceAccount", "name": _NAME, "namespace": NAMESPACE}],
    }
    selector = {"app.kubernetes.io/name": _NAME}
    container: Object = {
        "name": "controller",
        "image": reference("policies"),
        "imagePullPolicy": "Always",
        "command": ["/policy-controller"],
        "env": [{"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
        "securityContext": {"privileged": True},
    }
    spec: Object = {
        "serviceAccountName": _NAME,
        "hostNetwork": True,
        "tolerations": [{"operator": "Exists"}],
        "containers": [container],
    }
    daemon_set: Object = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": _NAME, "namespace": NAMESPACE},
        "spec": {
            "selector": {"matchLabels": selector},
            "template": {"metadata": {"labels": selector}, "spec": spec},
        },
    }
    return [account, role, binding, daemon_set]
