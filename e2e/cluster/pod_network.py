"""Pod networks of several nodes, joined by routes.

Each node has a point-to-point network for its own pods. Here each gets the range that Kubernetes gave its node, and a
route to the pods of every other node: all that a cloud's route controller does. Routes go with a node's container, so a
node that was stopped is joined again.
"""

from __future__ import annotations

import json
from typing import Any

from e2e.cluster.settings import BIN, KUBECONFIG
from e2e.cluster.shell import output, run, wait_for

POD_NETWORK = "10.244.0.0/16"
_CONFIG = "/etc/cni/net.d/10-ptp.conflist"
_LEAVES_PODS = f"POSTROUTING -s {POD_NETWORK} ! -d {POD_NETWORK} -j MASQUERADE"
_RANGE_SECONDS = 60


def join() -> None:
    """Give each node its range and its routes; what is there already stays."""
    wait_for(lambda: all(_range(node) for node in _nodes()), "a pod range for each node", _RANGE_SECONDS)
    nodes = _nodes()
    for node in nodes:
        others = [other for other in nodes if other is not node]
        lines = [
            f'sed -i \'s#"subnet":"[^"]*"#"subnet":"{_range(node)}"#; s#"ipMasq":true#"ipMasq":false#\' {_CONFIG}',
            f"iptables -t nat -C {_LEAVES_PODS} 2>/dev/null || iptables -t nat -A {_LEAVES_PODS}",
            *(f"ip route replace {_range(other)} via {_address(other)}" for other in others),
        ]
        run("docker", "exec", node["metadata"]["name"], "sh", "-ec", "\n".join(lines))


def _nodes() -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = json.loads(
        output(BIN / "kubectl", "--kubeconfig", KUBECONFIG, "get", "nodes", "-o", "json")
    )["items"]
    return items


def _range(node: dict[str, Any]) -> str:
    return str(node["spec"].get("podCIDR", ""))


def _address(node: dict[str, Any]) -> str:
    return next(str(one["address"]) for one in node["status"]["addresses"] if one["type"] == "InternalIP")
