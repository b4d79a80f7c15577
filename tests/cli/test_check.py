"""What `check` finds in a cluster, and that each finding has the value that helps."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from plimsoll.api import crd, labels
from plimsoll.cli import check_cluster, check_release
from plimsoll.cli.findings import NOTE, PROBLEM, UNCHECKED, Finding
from plimsoll.cli.placement import TierPods, placement, runtime_class
from tests.cli.check_objects import (
    GPU,
    GPU_TAINT,
    RDMA,
    TEAM_TAINT,
    Object,
    daemon_set,
    node,
    only,
    storage_class,
    tier,
)


def claim(*modes: str, phase: str = "Bound", storage_class: str | None = None) -> Object:
    meta = {"name": "models", "namespace": "team"}
    return {
        "metadata": meta,
        "spec": {"accessModes": [*modes], "storageClassName": storage_class},
        "status": {"phase": phase},
    }


@pytest.mark.parametrize(
    ("nodes", "pods", "message", "remedy"),
    [
        ([node()], tier(), None, ""),
        ([node(taints=[GPU_TAINT])], tier(), None, ""),
        ([node(taints=[{"key": "x", "effect": "PreferNoSchedule"}])], tier(), None, ""),
        ([node(gpus=1), node(gpus=2)], tier(), None, ""),
        (
            [node()],
            tier(nodeSelector={"pool": "h200"}),
            "no node has the labels pool=h200",
            "label a node, or change spec.tiers.serve.pod.nodeSelector",
        ),
        (
            [node(gpus=1)],
            tier(),
            "a pod needs 2 nvidia.com/gpu, and the largest node has 1",
            "lower spec.tiers.serve.gpus, or add larger nodes",
        ),
        (
            [node(gpus=0, amd__gpu=8) | {"status": {"allocatable": {"amd.com/gpu": "8"}}}],
            tier(),
            "no node has nvidia.com/gpu",
            "set the chart value engine.gpuResource: amd.com/gpu, or spec.tiers.serve.gpuResource",
        ),
        (
            [node()],
            tier(limits={GPU: 1, RDMA: 1}),
            "no node has rdma/hca",
            "install the device plugin that advertises it, or add nodes with it",
        ),
        (
            [node(taints=[GPU_TAINT, TEAM_TAINT])],
            tier(),
            "all nodes that fit its pods have taints that it does not tolerate, such as team=chat:NoSchedule",
            "set spec.tiers.serve.pod.tolerations: [{key: team, value: 'chat', effect: NoSchedule}]",
        ),
        (
            [node(taints=[{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}])],
            tier(),
            "all nodes that fit its pods are cordoned or not ready",
            "kubectl get nodes; then kubectl uncordon NODE",
        ),
    ],
)
def test_placement_names_first_unmet_requirement(
    nodes: list[Object], pods: TierPods, message: str | None, remedy: str
) -> None:
    expected = [] if message is None else [Finding(PROBLEM, "team/chat serve", message, remedy)]
    assert list(placement(pods, nodes)) == expected


@pytest.mark.parametrize(
    ("toleration", "is_tolerated"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "team", "operator": "Exists"}, True),
        ({"key": "team", "operator": "Equal", "value": "chat", "effect": "NoSchedule"}, True),
        ({"key": "team", "value": "chat"}, True),
        ({"key": "team", "value": "other"}, False),
        ({"key": "team", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
        ({}, False),
        ("team", False),
    ],
)
def test_placement_tolerations_as_kubernetes_reads_them(toleration: Any, is_tolerated: bool) -> None:
    pods = tier(tolerations=[toleration])
    assert (not list(placement(pods, [node(taints=[TEAM_TAINT])]))) is is_tolerated


def test_runtime_class_that_does_not_exist_is_a_problem() -> None:
    assert not list(runtime_class(tier(), ["gvisor"]))
    assert not list(runtime_class(tier(runtimeClassName="nvidia"), ["nvidia"]))
    found = only(runtime_class(tier(runtimeClassName="nvidia"), ["gvisor"]))
    assert (found.level, found.message) == (
        PROBLEM,
        "runtime class nvidia does not exist; the cluster has gvisor",
    )
    assert "engine.runtimeClassName" in found.remedy


def test_gpus_that_labels_promise_and_no_plugin_advertises() -> None:
    bare = node(gpus=0)
    bare["metadata"]["labels"] = {"nvidia.com/gpu.present": "true"}
    found = only(check_cluster.gpus([bare], [], []))
    assert (found.level, found.message) == (
        PROBLEM,
        "no node advertises a GPU, and labels of node n say that there are some",
    )
    assert found.remedy.startswith("install the device plugin")
    plugin = daemon_set("nvidia-device-plugin-daemonset") | {"status": {"numberReady": 0, "desiredNumberScheduled": 2}}
    assert only(check_cluster.gpus([bare], [plugin], [])).remedy.startswith(
        "see DaemonSet nvidia-device-plugin-daemonset"
    )
    assert only(check_cluster.gpus([bare], [], [tier(limits={})])).level == NOTE, "simulated engines only"
    notes = list(check_cluster.gpus([bare, node("m")], [plugin], []))
    assert [(one.level, one.subject) for one in notes] == [
        (NOTE, "gpus"),
        (NOTE, "gpus"),
        (NOTE, "daemonset nvidia-device-plugin-daemonset"),
    ]


def test_gpus_unhealthy_ones_are_noted() -> None:
    broken = node()
    broken["status"]["allocatable"] = {GPU: "6"}
    total, unhealthy = check_cluster.gpus([broken], [], [])
    assert total.message == "nodes have 6 nvidia.com/gpu"
    assert (unhealthy.subject, unhealthy.message) == ("node n", "2 of 8 nvidia.com/gpu are unhealthy")


def test_runtime_class_for_gpus_that_no_engine_uses_is_noted() -> None:
    classes = [{"metadata": {"name": "nv"}, "handler": "nvidia"}, {"metadata": {"name": "g"}, "handler": "runsc"}]
    assert "engine.runtimeClassName: nv" in only(check_cluster.unused_runtime_class(classes, [tier()])).remedy
    assert not list(check_cluster.unused_runtime_class(classes, [tier(runtimeClassName="nv")]))
    assert not list(check_cluster.unused_runtime_class(classes[1:], []))


def test_rdma_two_tiers_without_device_get_the_limit_to_set() -> None:
    with_device = node(rdma__hca=8)
    found = only(check_cluster.rdma([with_device], [tier("decode")]))
    assert found.remedy == "set spec.tiers.decode.pod.resources.limits: {rdma/hca: 1}"
    assert only(check_cluster.rdma([node()], [tier("decode")])).remedy.startswith("use one tier")
    assert not list(check_cluster.rdma([with_device], [tier("decode", {RDMA: 1})]))
    assert not list(check_cluster.rdma([node()], [tier("serve")]))
    assert only(check_cluster.rdma([with_device], [])).message == "nodes advertise rdma/hca"
    assert only(check_cluster.rdma([node()], [])).message == "no node advertises an RDMA device"


@pytest.mark.parametrize(
    ("found", "pods", "read_only", "message"),
    [
        ([claim("ReadWriteMany")], 3, False, None),
        ([claim("ReadOnlyMany")], 3, True, None),
        ([claim("ReadWriteOnce")], 1, False, None),
        ([claim("ReadWriteOnce", phase="Pending", storage_class="late")], 1, False, None),
        ([], 1, False, "claim models does not exist"),
        ([claim("ReadWriteOnce")], 3, False, "claim models is ReadWriteOnce, and up to 3 pods mount it"),
        ([claim("ReadOnlyMany")], 3, False, "claim models is ReadOnlyMany, and engines write into it"),
        ([claim("ReadWriteOnce", phase="Pending")], 1, False, "claim models is not bound to a volume"),
        ([claim("ReadWriteMany", phase="Lost")], 3, False, "claim models is not bound to a volume"),
    ],
)
def test_claims_must_suit_the_pods(found: list[Object], pods: int, read_only: bool, message: str | None) -> None:
    volume = {"name": "model", "persistentVolumeClaim": {"claimName": "models", "readOnly": read_only}}
    classes = [storage_class("late", "x", "WaitForFirstConsumer"), storage_class("shared", "nfs.csi.k8s.io")]
    by_name = {one["metadata"]["name"]: one for one in found}
    pods_of_tier = tier(volumes=[{"name": "home", "emptyDir": {}}, volume])
    messages = [one.message for one in check_cluster.claims(pods_of_tier, pods, by_name, classes)]
    assert messages == ([] if message is None else [message])
    if message and "up to" in message:
        remedy = only(check_cluster.claims(pods_of_tier, pods, by_name, classes)).remedy
        assert remedy == "make a ReadWriteMany claim of StorageClass shared, or set spec.tiers.serve.maxReplicas: 1"


def test_claims_pending_ones_with_unknown_classes_may_be_well() -> None:
    pods = tier(volumes=[{"name": "model", "persistentVolumeClaim": {"claimName": "models"}}])
    pending = {"models": claim("ReadWriteOnce", phase="Pending", storage_class="late")}
    assert not list(check_cluster.claims(pods, 1, pending, None))
    assert only(check_cluster.claims(pods, 1, pending, [])).level == PROBLEM


def test_storage_classes_default_and_shared_ones() -> None:
    good = [storage_class("a", "ebs.csi.aws.com", default=True), storage_class("b", "efs.csi.aws.com")]
    assert not list(check_cluster.storage_classes(good))
    assert [one.message for one in check_cluster.storage_classes(good[:1])] == [
        "no StorageClass is known to offer ReadWriteMany"
    ]
    assert [one.message for one in check_cluster.storage_classes(good[1:])] == ["no StorageClass is the default"]


@pytest.mark.parametrize(
    ("sets", "version", "level"),
    [
        ([daemon_set("cilium")], "v1.33.0", None),
        ([daemon_set("calico-node"), daemon_set("kube-flannel-ds")], "v1.33.0", None),
        ([daemon_set("aws-node", "--enable-network-policy=true")], "v1.33.0", None),
        ([], "v1.33.0+k3s1", None),
        ([daemon_set("aws-node", "--enable-network-policy=false")], "v1.33.0", NOTE),
        ([daemon_set("kube-flannel-ds")], "v1.33.0", NOTE),
        ([daemon_set("kube-proxy")], "v1.33.0", UNCHECKED),
    ],
)
def test_network_policies_by_known_plugins(sets: list[Object], version: str, level: str | None) -> None:
    found = node()
    found["status"]["nodeInfo"] = {"kubeletVersion": version}
    assert [one.level for one in check_cluster.network_policies([found], sets)] == ([] if level is None else [level])


def prometheus_server(selector: Object | None, places: Object | None = None) -> Object:
    spec = {"podMonitorSelector": selector, "podMonitorNamespaceSelector": places}
    return {"metadata": {"name": "k8s", "namespace": "monitoring"}, "spec": spec}


RELEASE_LABEL = {"matchLabels": {"release": "prom"}}


@pytest.mark.parametrize(
    ("server", "is_selected"),
    [
        (prometheus_server(RELEASE_LABEL, {}), True),
        (prometheus_server({}, {"matchLabels": {"scraped": "yes"}}), True),
        (prometheus_server({"matchExpressions": [{"key": "release", "operator": "In", "values": ["prom"]}]}, {}), True),
        (prometheus_server({"matchExpressions": [{"key": "a", "operator": "DoesNotExist"}]}, {}), True),
        (
            prometheus_server({"matchExpressions": [{"key": "release", "operator": "NotIn", "values": ["prom"]}]}, {}),
            False,
        ),
        (prometheus_server({"matchExpressions": [{"key": "release", "operator": "New"}]}, {}), False),
        (prometheus_server(None, {}), False),
        (prometheus_server({}), False),
        (prometheus_server({"matchLabels": {"release": "other"}}, {}), False),
        (prometheus_server({}, {"matchLabels": {"scraped": "no"}}), False),
    ],
)
def test_prometheus_selects_the_pod_monitors(server: Object, is_selected: bool) -> None:
    meta = {"name": "plimsoll-gateway", "namespace": "plimsoll-system", "labels": {"release": "prom"}}
    namespaces = {"plimsoll-system": {"scraped": "yes"}}
    findings = list(check_cluster.prometheus([server], [{"metadata": meta}], namespaces))
    assert [one.subject for one in findings] == ([] if is_selected else ["podmonitor plimsoll-system/plimsoll-gateway"])


def test_prometheus_without_monitors_gets_the_chart_values() -> None:
    found = only(check_cluster.prometheus([prometheus_server(RELEASE_LABEL)], [], {}))
    assert found == Finding(
        NOTE,
        "prometheus",
        "no PodMonitor of Plimsoll exists",
        "set the chart values metrics.podMonitor: {enabled: true, labels: {release: prom}} and"
        " metrics.from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]",
    )
    assert not list(check_cluster.prometheus([], [], {}))


def test_definitions_that_differ_are_told_by_field() -> None:
    own = crd.definitions()
    assert not list(check_release.definitions(own, own))
    assert only(check_release.definitions({}, own)).message == "the cluster has no CRD of Plimsoll: it is not installed"
    older, newer = copy.deepcopy(own), copy.deepcopy(own)
    for one, change in ((older, "pop"), (newer, "add")):
        spec = one[labels.PLURAL]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"][
            "properties"
        ]
        if change == "pop":
            del spec["slo"]
        else:
            spec["colour"] = {"type": "string"}
    found = only(check_release.definitions(older, own))
    assert (found.level, found.message) == (PROBLEM, "the CRD is older than this program: it has no spec.slo")
    found = only(check_release.definitions(newer, own))
    assert (found.level, found.message) == (
        NOTE,
        "the CRD is newer than this program, which does not know spec.colour",
    )
    del older[labels.CHECKPOINT_PLURAL]
    older[labels.PLURAL]["spec"]["versions"][0]["served"] = False
    assert {one.message for one in check_release.definitions(older, own)} == {
        "the CRD does not exist",
        "the CRD does not serve v1alpha1",
    }


def test_definitions_before_install_name_their_release() -> None:
    notes = {"meta.helm.sh/release-name": "p", "meta.helm.sh/release-namespace": "old"}
    found = only(check_release.definitions_before_install({"x": {"metadata": {"annotations": notes}}}))
    assert found.message == "CRDs exist already and belong to release old/p: x"
    assert "crds.install: false" in found.remedy
    assert "belong to no Helm release" in only(check_release.definitions_before_install({"x": {}})).message
    assert not list(check_release.definitions_before_install({}))


def release(namespace: str, *watched: str, version: str = "0.1.0") -> tuple[Object, Object]:
    marks = {labels.INSTANCE: "plimsoll", "app.kubernetes.io/version": version}
    meta = {"name": "plimsoll-operator", "namespace": namespace, "labels": marks}
    return {"metadata": meta}, {"metadata": meta, "data": {"operator.yaml": json.dumps({"watchNamespaces": watched})}}


@pytest.mark.parametrize(
    ("first", "second", "overlap"),
    [([], [], True), (["a"], [], True), (["a", "b"], ["b"], True), (["a"], ["b"], False)],
)
def test_releases_with_overlapping_namespaces_are_a_problem(first: list[str], second: list[str], overlap: bool) -> None:
    both = [release("one", *first), release("two", *second)]
    operators, configs = [one for one, _ in both], [one for _, one in both]
    findings = list(check_release.releases(operators, configs, "0.1.0", before_install=False))
    assert [one.subject for one in findings] == (["release one/plimsoll"] if overlap else [])
    assert not list(
        check_release.releases(operators, [{"data": {"operator.yaml": ":"}}], "0.1.0", before_install=False)
    )


def test_releases_of_another_version_are_noted() -> None:
    operator, config = release("one", version="0.2.0")
    found = only(check_release.releases([operator], [config], "0.1.0", before_install=False))
    assert found.message == "its version is 0.2.0, and that of this program is 0.1.0"
    assert not list(check_release.releases([operator], [config], "", before_install=False))
    found = only(check_release.releases([operator], [config], "0.1.0", before_install=True))
    assert found.message == "it is installed already"
