"""Rules of `check` about a cluster's nodes, storage, network and Prometheus. Pure.

Each rule takes objects as the API server has them, and returns findings with the chart value or the field that helps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from plimsoll.cli.findings import NOTE, PROBLEM, UNCHECKED, Finding
from plimsoll.cli.json_access import get_int, get_list, get_mapping, get_text, get_value
from plimsoll.cli.placement import GPU_RESOURCE, RDMA_RESOURCE, TierPods, allocatable, gpu_totals, quantity

KubeObject = dict[str, Any]

_GPU_LABELS: Final = (
    "nvidia.com/gpu.present",
    "feature.node.kubernetes.io/pci-10de.present",
    "feature.node.kubernetes.io/pci-0302_10de.present",
    "cloud.google.com/gke-accelerator",
    "k8s.amazonaws.com/accelerator",
)
_DEVICE_PLUGIN: Final = re.compile(r"device-plugin|nvidia-gpu")
_INSTALL_PLUGIN: Final = "install the device plugin of your GPUs, such as NVIDIA's GPU operator"
# Provisioners of storage that several nodes can mount at the same time.
_SHARED_STORAGE: Final = re.compile(r"nfs|cephfs|efs\.csi|filestore|file\.csi\.azure|lustre|fsx|weka|juicefs|longhorn")
_DEFAULT_CLASS: Final = "storageclass.kubernetes.io/is-default-class"
_MANY_NODES: Final = frozenset({"ReadWriteMany", "ReadOnlyMany"})
# DaemonSets of network plugins by name, and whether they enforce NetworkPolicies.
_ENFORCING: Final = re.compile(
    r"^(calico-node|canal|cilium|anetd|antrea-agent|kube-router|weave-net|ovnkube-node|ovs-node|kube-ovn-cni|azure-npm"
    r"|kindnet|netd-policy)$"
)
_NOT_ENFORCING: Final = re.compile(r"^(kube-flannel(-ds.*)?|flannel)$")
_AWS_NODE, _AWS_POLICY_FLAG = "aws-node", "--enable-network-policy=true"
_NODE_DISTRIBUTIONS: Final = re.compile(r"\+(k3s|k0s)")  # their NetworkPolicy controller has no DaemonSet
_NO_POLICIES: Final = (
    "limit who reaches gateway and engines by other means, or install a network plugin with NetworkPolicies"
)


def gpus(
    nodes: Sequence[KubeObject], daemon_sets: Iterable[KubeObject] | None, tiers: Sequence[TierPods]
) -> Iterable[Finding]:
    """GPUs that nodes advertise, and nodes that seem to have GPUs and advertise none."""
    needs_gpus = not tiers or any(GPU_RESOURCE.search(name) for one in tiers for name in one.resources)
    totals = gpu_totals(nodes)
    plugins = [one for one in daemon_sets or () if _DEVICE_PLUGIN.search(_name(one))]
    failing = [
        one
        for one in plugins
        if get_int(one, "status", "desiredNumberScheduled") and not get_int(one, "status", "numberReady")
    ]
    silent = [one for one in nodes if _is_labelled_gpu(one) and not gpu_totals([one])]
    if not totals:
        message = "no node advertises a GPU"
        if silent:
            message += f", and labels of {_names(silent)} say that there are some"
        remedy = f"see DaemonSet {_name(plugins[0])}" if plugins else _INSTALL_PLUGIN
        level = PROBLEM if needs_gpus else NOTE
        yield Finding(level, "gpus", message, f"{remedy}, unless a node pool adds nodes with GPUs on demand")
        return
    yield Finding(NOTE, "gpus", f"nodes have {', '.join(f'{count} {name}' for name, count in totals.items())}")
    if silent:
        yield Finding(NOTE, "gpus", f"labels of {_names(silent)} name GPUs, and none is advertised", _INSTALL_PLUGIN)
    for one in failing:
        yield Finding(NOTE, f"daemonset {_name(one)}", "no pod of this device plugin is ready", "see its pods")
    for node in nodes:
        for name, count in get_mapping(node, "status", "capacity").items():
            lost = quantity(count) - allocatable(node).get(name, 0)
            if GPU_RESOURCE.search(name) and lost > 0:
                message = f"{lost} of {count} {name} are unhealthy"
                yield Finding(NOTE, f"node {_name(node)}", message, "see the log of its device plugin")


def unused_runtime_class(classes: Iterable[KubeObject], tiers: Sequence[TierPods]) -> Iterable[Finding]:
    """A runtime class for GPUs that no engine uses. Where it is not the node's default, engines see no GPU."""
    names = [_name(one) for one in classes if "nvidia" in (get_text(one, "handler") or "")]
    used = {get_text(one.template, "spec", "runtimeClassName") for one in tiers}
    if names and used.isdisjoint(names):
        message = f"runtime class {names[0]} exists, and no engine uses it"
        remedy = f"if it is not the default of the GPU nodes, set the chart value engine.runtimeClassName: {names[0]}"
        yield Finding(NOTE, "runtimeclasses", message, remedy)


def rdma(nodes: Sequence[KubeObject], tiers: Sequence[TierPods]) -> Iterable[Finding]:
    """RDMA devices, which two tiers need for their KV cache transfer."""
    offered = sorted(
        {name for node in nodes for name, count in allocatable(node).items() if count and RDMA_RESOURCE.search(name)}
    )
    without: dict[str, list[str]] = {}
    for one in tiers:
        role = one.field.rpartition(".")[2]
        if role in ("prefill", "decode") and not any(RDMA_RESOURCE.search(name) for name in one.resources):
            without.setdefault(one.subject.removesuffix(f" {role}"), []).append(role)
    for subject, roles in without.items():
        message = (
            f"pods of {' and '.join(sorted(roles, reverse=True))} ask for no RDMA device, so KV blocks move over TCP"
        )
        remedy = "use one tier (spec.tiers.serve), or install an RDMA device plugin"
        if offered:
            fields = " and ".join(f"spec.tiers.{role}.pod.resources.limits" for role in roles)
            remedy = f"set {fields}: {{{offered[0]}: 1}}"
        yield Finding(NOTE, subject, message, remedy)
    if not tiers:
        message = f"nodes advertise {', '.join(offered)}" if offered else "no node advertises an RDMA device"
        remedy = "" if offered else "serve with one tier (spec.tiers.serve): prefill and decode tiers need RDMA"
        yield Finding(NOTE, "rdma", message, remedy)


def claims(
    tier: TierPods, most_pods: int, found: Mapping[str, KubeObject], classes: Sequence[KubeObject] | None
) -> Iterable[Finding]:
    """Claims of a tier's pods: existence, binding, and access modes for the pods that there may be.

    found: claims of the namespace by name. classes: None if they could not be read.
    """
    for volume in get_list(tier.template, "spec", "volumes"):
        name = get_text(volume, "persistentVolumeClaim", "claimName")
        if name is None:
            continue
        claim = found.get(name)
        if claim is None:
            yield Finding(PROBLEM, tier.subject, f"claim {name} does not exist", "create it in the service's namespace")
            continue
        if get_text(claim, "status", "phase") == "Lost" or (classes is not None and _is_stuck(claim, classes)):
            remedy = f"kubectl describe pvc {name}; name a StorageClass that exists in spec.storageClassName"
            yield Finding(PROBLEM, tier.subject, f"claim {name} is not bound to a volume", remedy)
        modes = {str(one) for one in get_list(claim, "spec", "accessModes")}
        is_read_only = get_value(volume, "persistentVolumeClaim", "readOnly") is True
        if most_pods > 1 and modes.isdisjoint(_MANY_NODES):
            shared = [_name(one) for one in classes or () if _is_shared(one)]
            offer = f" of StorageClass {', '.join(shared)}" if shared else ""
            message = f"claim {name} is {', '.join(sorted(modes))}, and up to {most_pods} pods mount it"
            remedy = f"make a ReadWriteMany claim{offer}, or set {tier.field}.maxReplicas: 1"
            yield Finding(PROBLEM, tier.subject, message, remedy)
        elif modes == {"ReadOnlyMany"} and not is_read_only:
            message = f"claim {name} is ReadOnlyMany, and engines write into it"
            yield Finding(PROBLEM, tier.subject, message, "make a ReadWriteMany claim for spec.model.cache")


def storage_classes(classes: Sequence[KubeObject]) -> Iterable[Finding]:
    """What claims of models and caches can be made of."""
    if not any(get_mapping(one, "metadata", "annotations").get(_DEFAULT_CLASS) == "true" for one in classes):
        yield Finding(NOTE, "storageclasses", "no StorageClass is the default", "name one in each claim")
    shared = [_name(one) for one in classes if _is_shared(one)]
    if not shared:
        message = "no StorageClass is known to offer ReadWriteMany"
        remedy = "several engines cannot share spec.model.cache.claimName; without it each pod downloads the model"
        yield Finding(NOTE, "storageclasses", message, remedy)


def network_policies(nodes: Sequence[KubeObject], daemon_sets: Sequence[KubeObject]) -> Iterable[Finding]:
    """Whether NetworkPolicies have an effect, by the network plugins that are known."""
    names = [_name(one) for one in daemon_sets]
    versions = [get_text(node, "status", "nodeInfo", "kubeletVersion") or "" for node in nodes]
    if any(map(_ENFORCING.search, names)) or any(map(_NODE_DISTRIBUTIONS.search, versions)):
        return
    aws = [one for one in daemon_sets if _name(one) == _AWS_NODE]
    if aws:
        arguments = [
            word
            for container in get_list(aws[0], "spec", "template", "spec", "containers")
            for word in get_list(container, "args")
        ]
        if _AWS_POLICY_FLAG not in arguments:
            remedy = "set enableNetworkPolicy: true in the add-on vpc-cni"
            yield Finding(NOTE, "networkpolicies", "DaemonSet aws-node does not enforce NetworkPolicies", remedy)
    elif flannel := next(filter(_NOT_ENFORCING.search, names), None):
        yield Finding(NOTE, "networkpolicies", f"DaemonSet {flannel} does not enforce NetworkPolicies", _NO_POLICIES)
    else:
        message = (
            "no network plugin that Plimsoll knows was found, so it is not known whether NetworkPolicies are enforced"
        )
        yield Finding(UNCHECKED, "networkpolicies", message, "ask the provider of the cluster")


def prometheus(
    servers: Sequence[KubeObject], monitors: Sequence[KubeObject], namespaces: Mapping[str, Mapping[str, Any]]
) -> Iterable[Finding]:
    """Whether a Prometheus selects the chart's PodMonitors. namespaces: their labels by name."""
    if not servers:
        return
    if not monitors:
        yield Finding(NOTE, "prometheus", "no PodMonitor of Plimsoll exists", _monitor_values(servers[0]))
    for monitor in monitors:
        place = get_text(monitor, "metadata", "namespace") or ""
        if not any(_selects(server, monitor, namespaces.get(place, {})) for server in servers):
            message = f"no Prometheus selects it: {_label_text(servers[0])}"
            yield Finding(PROBLEM, f"podmonitor {place}/{_name(monitor)}", message, _monitor_values(servers[0]))


def matches(selector: Any, labels: Mapping[str, Any]) -> bool:
    """Whether a LabelSelector selects the labels. None selects nothing, an empty one everything."""
    if not isinstance(selector, Mapping):
        return False
    if not get_mapping(selector, "matchLabels").items() <= dict(labels).items():
        return False
    return all(_expression(one, labels) for one in get_list(selector, "matchExpressions"))


def _expression(rule: Any, labels: Mapping[str, Any]) -> bool:
    key, values = get_text(rule, "key") or "", get_list(rule, "values")
    outcomes = {
        "In": key in labels and labels[key] in values,
        "NotIn": labels.get(key) not in values,
        "Exists": key in labels,
        "DoesNotExist": key not in labels,
    }
    return outcomes.get(get_text(rule, "operator") or "", False)


def _selects(server: KubeObject, monitor: KubeObject, namespace_labels: Mapping[str, Any]) -> bool:
    places = get_value(server, "spec", "podMonitorNamespaceSelector")
    same = get_text(server, "metadata", "namespace") == get_text(monitor, "metadata", "namespace")
    is_in_scope = same if places is None else matches(places, namespace_labels)
    return is_in_scope and matches(
        get_value(server, "spec", "podMonitorSelector"), get_mapping(monitor, "metadata", "labels")
    )


def _label_text(server: KubeObject) -> str:
    required = get_mapping(server, "spec", "podMonitorSelector", "matchLabels")
    name = f"{get_text(server, 'metadata', 'namespace')}/{_name(server)}"
    if required:
        return f"{name} selects {', '.join(f'{key}={value}' for key, value in sorted(required.items()))}"
    return f"see podMonitorSelector and podMonitorNamespaceSelector of {name}"


def _monitor_values(server: KubeObject) -> str:
    """The chart values with which a Prometheus reads the metrics."""
    required = get_mapping(server, "spec", "podMonitorSelector", "matchLabels")
    labels = ", ".join(f"{key}: {value}" for key, value in sorted(required.items()))
    place = get_text(server, "metadata", "namespace")
    peer = f"{{namespaceSelector: {{matchLabels: {{kubernetes.io/metadata.name: {place}}}}}}}"
    return (
        f"set the chart values metrics.podMonitor: {{enabled: true{f', labels: {{{labels}}}' if labels else ''}}}"
        f" and metrics.from: [{peer}]"
    )


def _is_stuck(claim: KubeObject, classes: Sequence[KubeObject]) -> bool:
    """Whether a claim stays pending: no StorageClass, or one that binds at once. Others wait for their first pod."""
    if get_text(claim, "status", "phase") != "Pending":
        return False
    required = get_text(claim, "spec", "storageClassName")
    by_name = {_name(one): one for one in classes}
    return get_text(by_name.get(required or ""), "volumeBindingMode") != "WaitForFirstConsumer"


def _is_shared(storage_class: KubeObject) -> bool:
    return _SHARED_STORAGE.search(get_text(storage_class, "provisioner") or "") is not None


def _is_labelled_gpu(node: KubeObject) -> bool:
    found = get_mapping(node, "metadata", "labels")
    return any(found.get(name) not in (None, "false", "") for name in _GPU_LABELS)


def _names(objects: Sequence[KubeObject]) -> str:
    first = f"node {_name(objects[0])}"
    return first if len(objects) == 1 else f"{first} and {len(objects) - 1} more"


def _name(obj: Any) -> str:
    return get_text(obj, "metadata", "name") or ""
