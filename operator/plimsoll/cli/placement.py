"""Whether the nodes of a cluster can run the pods of a tier: labels, extended resources, taints, runtime classes. Pure.

Problem: a pod that fits no node stays pending, and Kubernetes says why only after it exists, with a count per node.

Idea: the requirements of a pod template are applied one after the other: labels, then resources, then taints. The first
that leaves no node is the finding, with the field that removes it. Affinity is not evaluated.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from plimsoll.cli.findings import PROBLEM, Finding
from plimsoll.cli.json_access import get_list, get_mapping, get_text

KubeObject = dict[str, Any]

GPU_RESOURCE: Final = re.compile(r"/gpu$|^nvidia\.com/mig-|^gpu\.intel\.com/|^habana\.ai/|^google\.com/tpu$")
RDMA_RESOURCE: Final = re.compile(r"^rdma/|/rdma|/hostdev|/efa$|/roce|/ib(_|$)")
_REPELLING: Final = ("NoSchedule", "NoExecute")
_NODE_STATE: Final = "node.kubernetes.io/"  # taints of cordoned and failing nodes; no user tolerates them
_MAX_TAINTS: Final = 3


@dataclass(frozen=True)
class TierPods:
    """The pods of one tier. subject: for findings. field: of the tier in the spec, such as `spec.tiers.serve`."""

    subject: str
    field: str
    template: KubeObject

    @property
    def resources(self) -> dict[str, int]:
        """Extended resources of one pod, by name."""
        total: Counter[str] = Counter()
        for container in get_list(self.template, "spec", "containers"):
            for name, count in get_mapping(container, "resources", "limits").items():
                if "/" in name:
                    total[name] += quantity(count)
        return {name: count for name, count in total.items() if count}


def quantity(value: Any) -> int:
    """Return the number of an extended resource; 0 for anything else."""
    return int(value) if str(value).isdecimal() else 0


def allocatable(node: KubeObject) -> dict[str, int]:
    """Extended resources that pods can have of a node."""
    return {name: quantity(value) for name, value in get_mapping(node, "status", "allocatable").items() if "/" in name}


def gpu_totals(nodes: Iterable[KubeObject]) -> dict[str, int]:
    """GPUs of all nodes, by resource, without those that have none."""
    total: Counter[str] = Counter()
    for node in nodes:
        total.update({name: count for name, count in allocatable(node).items() if GPU_RESOURCE.search(name)})
    return {name: count for name, count in sorted(total.items()) if count}


def placement(pods: TierPods, nodes: Sequence[KubeObject]) -> Iterable[Finding]:
    """Return why no node can run a pod of the tier; nothing if one can, as far as labels, resources and taints say."""
    selector = get_mapping(pods.template, "spec", "nodeSelector")
    labelled = [node for node in nodes if selector.items() <= get_mapping(node, "metadata", "labels").items()]
    if not labelled:
        labels = ", ".join(f"{name}={value}" for name, value in sorted(selector.items()))
        if selector:
            remedy = f"label a node, or change {pods.field}.pod.nodeSelector"
            yield Finding(PROBLEM, pods.subject, f"no node has the labels {labels}", remedy)
        return
    needed = pods.resources
    fitting = [n for n in labelled if all(allocatable(n).get(name, 0) >= count for name, count in needed.items())]
    if not fitting:
        yield _lacking(pods, needed, labelled)
    elif (repelled := _repelled(pods, fitting)) is not None:
        yield repelled


def runtime_class(pods: TierPods, known: Iterable[str]) -> Iterable[Finding]:
    """Return a finding if the tier's runtime class does not exist."""
    name, known_names = get_text(pods.template, "spec", "runtimeClassName"), sorted(known)
    if name is not None and name not in known_names:
        remedy = f"create it, or set {pods.field}.pod.runtimeClassName or the chart value engine.runtimeClassName"
        found = f"the cluster has {', '.join(known_names)}" if known_names else "the cluster has none"
        yield Finding(PROBLEM, pods.subject, f"runtime class {name} does not exist; {found}", remedy)


def taint_text(taint: Any) -> str:
    """Return a taint as kubectl writes it."""
    value = get_text(taint, "value")
    return f"{get_text(taint, 'key')}{f'={value}' if value else ''}:{get_text(taint, 'effect')}"


def toleration_text(taint: Any) -> str:
    """Return the toleration of a taint as one item of a YAML list."""
    value = get_text(taint, "value")
    rule = f"value: {value!r}" if value else "operator: Exists"
    return f"{{key: {get_text(taint, 'key')}, {rule}, effect: {get_text(taint, 'effect')}}}"


def repelling_taints(node: KubeObject, tolerations: Sequence[Any]) -> list[Any]:
    """Taints of a node that keep pods with these tolerations away."""
    taints = [one for one in get_list(node, "spec", "taints") if get_text(one, "effect") in _REPELLING]
    return [taint for taint in taints if not any(_tolerates(one, taint) for one in tolerations)]


def _lacking(pods: TierPods, needed: Mapping[str, int], nodes: Sequence[KubeObject]) -> Finding:
    """The finding about the resource that the fewest nodes have enough of."""
    name, count = min(needed.items(), key=lambda one: sum(allocatable(n).get(one[0], 0) >= one[1] for n in nodes))
    most = max(allocatable(node).get(name, 0) for node in nodes)
    where = "node with its labels" if get_mapping(pods.template, "spec", "nodeSelector") else "node"
    if most:
        message = f"a pod needs {count} {name}, and the largest {where} has {most}"
        field = f"{pods.field}.gpus" if GPU_RESOURCE.search(name) else f"{pods.field}.pod.resources"
        return Finding(PROBLEM, pods.subject, message, f"lower {field}, or add larger nodes")
    others = [one for one in gpu_totals(nodes) if one != name] if GPU_RESOURCE.search(name) else []
    if others:
        remedy = f"set the chart value engine.gpuResource: {others[0]}, or {pods.field}.gpuResource"
    else:
        remedy = "install the device plugin that advertises it, or add nodes with it"
    return Finding(PROBLEM, pods.subject, f"no {where} has {name}", remedy)


def _repelled(pods: TierPods, nodes: Sequence[KubeObject]) -> Finding | None:
    """The finding about taints, if all nodes have one that the pods do not tolerate."""
    tolerations = get_list(pods.template, "spec", "tolerations")
    taints = [repelling_taints(node, tolerations) for node in nodes]
    if not all(taints):
        return None
    usable = [found for found in taints if not any((get_text(t, "key") or "").startswith(_NODE_STATE) for t in found)]
    if not usable:
        message = "all nodes that fit its pods are cordoned or not ready"
        return Finding(PROBLEM, pods.subject, message, "kubectl get nodes; then kubectl uncordon NODE")
    fewest = min(usable, key=len)
    listed = ", ".join(taint_text(one) for one in fewest[:_MAX_TAINTS])
    message = f"all nodes that fit its pods have taints that it does not tolerate, such as {listed}"
    remedy = f"set {pods.field}.pod.tolerations: [{', '.join(map(toleration_text, fewest))}]"
    return Finding(PROBLEM, pods.subject, message, remedy)


def _tolerates(toleration: Any, taint: Any) -> bool:
    key, effect = get_text(toleration, "key"), get_text(toleration, "effect")
    exists = get_text(toleration, "operator") == "Exists"
    if effect not in (None, get_text(taint, "effect")):
        return False
    if key is None:
        return exists
    if key != get_text(taint, "key"):
        return False
    return exists or (get_text(toleration, "value") or "") == (get_text(taint, "value") or "")
