"""What `check` finds in a cluster, and that each finding has the value that helps."""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from plimsoll.adapters.kube_client import (
    CONFIGMAPS,
    DEPLOYMENTS,
    HORIZONTALPODAUTOSCALERS,
    INFERENCESERVICES,
    KubeClient,
)
from plimsoll.api import crd, labels
from plimsoll.cli import check_cluster, check_release
from plimsoll.cli.check import (
    CLAIMS,
    DAEMONSETS,
    DEFINITIONS,
    NAMESPACES,
    PODMONITORS,
    PROMETHEUSES,
    RUNTIMECLASSES,
    STORAGECLASSES,
    check,
)
from plimsoll.cli.cluster import ClusterQueryError
from plimsoll.cli.findings import NODES, NOTE, PROBLEM, UNCHECKED, Finding, exit_status, print_findings
from plimsoll.cli.main import main
from plimsoll.cli.placement import TierPods, placement, runtime_class
from plimsoll.core.errors import BackendUnavailable, Forbidden, InvalidSpec
from tests import builders
from tests.apiserver import ApiServer
from tests.cli import fake_kube

Object = dict[str, Any]

GPU, RDMA = "nvidia.com/gpu", "rdma/hca"
GPU_TAINT = {"key": GPU, "effect": "NoSchedule"}
TEAM_TAINT = {"key": "team", "value": "chat", "effect": "NoSchedule"}
MANIFEST = {
    "apiVersion": labels.API_VERSION,
    "kind": labels.KIND,
    "metadata": {"name": "chat", "namespace": "team"},
    "spec": {
        "model": {"uri": "pvc://models/chat", "name": "chat"},
        "tiers": {"serve": {"maxReplicas": 3, "gpus": 2}},
    },
}
ALL_KINDS = (
    NODES, RUNTIMECLASSES, STORAGECLASSES, NAMESPACES, DAEMONSETS, PROMETHEUSES, PODMONITORS, CONFIGMAPS, DEPLOYMENTS,
    INFERENCESERVICES, CLAIMS, HORIZONTALPODAUTOSCALERS,
)  # fmt: skip


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


def claim(*modes: str, phase: str = "Bound", storage_class: str | None = None) -> Object:
    meta = {"name": "models", "namespace": "team"}
    return {
        "metadata": meta,
        "spec": {"accessModes": [*modes], "storageClassName": storage_class},
        "status": {"phase": phase},
    }


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
    assert found.message == "CRDs exist already, of release old/p: x"
    assert "crds.install: false" in found.remedy
    assert "of no Helm release" in only(check_release.definitions_before_install({"x": {}})).message
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


def cluster_of(**objects: Any) -> dict[str, Any]:
    """Answers of a cluster whose CRDs are this program's. objects: items by plural name."""
    answers: dict[str, Any] = {one.path(): {"items": objects.get(one.plural, [])} for one in ALL_KINDS}
    answers |= {DEFINITIONS.path(None, f"{name}.{labels.GROUP}"): one for name, one in crd.definitions().items()}
    return answers


GOOD = {
    "nodes": [node(taints=[GPU_TAINT])],
    "daemonsets": [daemon_set("cilium")],
    "storageclasses": [storage_class("a", "nfs", default=True)],
}


async def test_check_healthy_cluster_has_no_problem() -> None:
    findings = await check(fake_kube.FakeKube(cluster_of(**GOOD)), None)
    assert [(one.level, one.subject) for one in findings] == [(NOTE, "gpus"), (NOTE, "rdma")]
    assert exit_status(findings) == 0


async def test_check_before_install_judges_the_first_engine() -> None:
    nodes = [node(taints=[GPU_TAINT, TEAM_TAINT])]
    kube = fake_kube.FakeKube({one.path(): {"items": []} for one in ALL_KINDS} | {NODES.path(): {"items": nodes}})
    findings = await check(kube, None, before_install=True)
    problem = only(one for one in findings if one.level == PROBLEM)
    assert problem.subject == "engines"
    assert problem.remedy == "set spec.tiers.serve.pod.tolerations: [{key: team, value: 'chat', effect: NoSchedule}]"
    findings = await check(kube, None)
    assert only(one for one in findings if one.subject == "crds").level == PROBLEM


async def test_check_judges_services_and_manifests() -> None:
    parent = builders.service()
    parent["spec"]["tiers"] = {"serve": {"maxReplicas": 2}}
    deployment = builders.deployment(parent, "serve")
    deployment["spec"]["template"] = tier(nodeSelector={"pool": "h200"}).template
    scaler = {
        "metadata": {"name": "x", "namespace": "team"},
        "spec": {"scaleTargetRef": {"kind": "Deployment", "name": "chat-serve"}},
    }
    answers = cluster_of(
        **GOOD, inferenceservices=[parent], deployments=[deployment], horizontalpodautoscalers=[scaler]
    )
    findings = await check(fake_kube.FakeKube(answers), None, [MANIFEST | {"metadata": {"name": "new"}}])
    assert [(one.subject, one.message) for one in findings if one.level == PROBLEM] == [
        ("team/chat serve", "no node has the labels pool=h200"),
        ("default/new serve", "claim models does not exist"),
        ("team/chat hpa x", "it scales Deployment chat-serve, which Plimsoll scales too: the two undo each other"),
    ]
    with pytest.raises(InvalidSpec):
        await check(fake_kube.FakeKube(answers), None, [{"kind": "Pod"}])


async def test_check_several_nodes_need_leader_worker_sets() -> None:
    manifest = copy.deepcopy(MANIFEST)
    manifest["spec"]["tiers"] = {"serve": {"gpus": 8, "nodes": 2}}
    manifest["spec"]["model"] = {"uri": "hf://Qwen/Qwen3-8B"}
    answers = cluster_of(**GOOD)
    findings = await check(fake_kube.FakeKube(answers), None, [manifest])
    problem = only(one for one in findings if one.level == PROBLEM)
    assert problem.message == "team/chat has tiers of several nodes, and the cluster has no LeaderWorkerSet v1"
    served = {"resources": [{"name": labels.SET_PLURAL, "kind": labels.SET_KIND, "namespaced": True}]}
    answers[f"/apis/{labels.SET_API_VERSION}"] = served
    assert exit_status(await check(fake_kube.FakeKube(answers), None, [manifest])) == 0


@pytest.mark.parametrize("error", [Forbidden("forbidden", 403), BackendUnavailable("too slow")])
async def test_check_says_what_it_could_not_read(error: Exception) -> None:
    answers = dict.fromkeys(cluster_of(), error)
    findings = await check(fake_kube.FakeKube(answers), None)
    assert {one.level for one in findings} == {UNCHECKED}
    assert {one.subject for one in findings} == {*(one.plural for one in ALL_KINDS), "crds"}
    assert all(one.remedy for one in findings)


async def test_check_unreachable_cluster_is_an_error() -> None:
    kube = fake_kube.FakeKube({"/api/v1": BackendUnavailable("no route to host")})
    with pytest.raises(ClusterQueryError, match="cannot use the cluster: no route to host"):
        await check(kube, None)
    answers = cluster_of(**GOOD) | {"/api/v1": Forbidden("forbidden", 403)}
    assert exit_status(await check(fake_kube.FakeKube(answers), None)) == 0


def test_findings_heading_counts_what_was_not_checked(capsys: pytest.CaptureFixture[str]) -> None:
    unread = Finding(UNCHECKED, "nodes", "forbidden")
    assert print_findings("cluster", [unread], as_json=False) == 0
    assert capsys.readouterr().out.splitlines()[0] == "cluster: no problem, 1 not checked"
    assert print_findings("cluster", [unread, Finding(PROBLEM, "a", "b")], as_json=False) == 1
    assert capsys.readouterr().out.splitlines()[0] == "cluster: 1 to mend, 1 not checked"


@pytest.fixture
def real_cluster(cluster: ApiServer) -> Iterator[ApiServer]:
    """An API server with a node of GPUs, and a claim that one pod may mount."""
    kubectl = [str(cluster.kubectl), f"--kubeconfig={cluster.kubeconfig}"]
    objects = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "checked"}},
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "checked"}, "spec": {"taints": [TEAM_TAINT]}},
        {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models", "namespace": "checked"},
            "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}},
        },
    ]  # fmt: skip
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    subprocess.run([*kubectl, "apply", "-f", "-"], input=listed, text=True, check=True, capture_output=True)
    status = json.dumps({"status": {"allocatable": {GPU: "8"}, "capacity": {GPU: "8"}}})
    patch = ["patch", "node", "checked", "--subresource=status", "-p", status]
    subprocess.run([*kubectl, *patch], check=True, capture_output=True)
    ready = json.dumps({"spec": {"taints": [TEAM_TAINT]}})  # the API server marks a new node as not ready
    subprocess.run([*kubectl, "patch", "node", "checked", "--type=merge", "-p", ready], check=True, capture_output=True)
    yield cluster
    delete = ["delete", "node/checked", "namespace/checked", "--wait=false"]
    subprocess.run([*kubectl, *delete], check=True, capture_output=True)


@pytest.mark.api
def test_check_of_a_real_api_server(real_cluster: ApiServer, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(json.dumps(MANIFEST | {"metadata": {"name": "chat", "namespace": "checked"}}))
    words = ["check", "--kubeconfig", str(real_cluster.kubeconfig), "-f", str(path), "-n", "checked"]
    assert main([*words, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    problems = [(one["subject"], one["message"]) for one in document["findings"] if one["level"] == PROBLEM]
    assert problems == [
        (
            "checked/chat serve",
            "all nodes that fit its pods have taints that it does not tolerate, such as team=chat:NoSchedule",
        ),
        ("checked/chat serve", "claim models is not bound to a volume"),
        ("checked/chat serve", "claim models is ReadWriteOnce, and up to 3 pods mount it"),
    ], "the CRDs of the server have the fields of this program"
    assert document["problems"] == 3
    assert main([*words, "--pre"]) == 1
    assert "CRDs exist already, of no Helm release" in capsys.readouterr().out


@pytest.mark.api
def test_doctor_prints_json(cluster: ApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a service that no operator has seen."""

    async def create() -> None:
        kube = await KubeClient.connect(str(cluster.kubeconfig))
        meta = {"name": "unseen", "namespace": "default"}
        await kube.create({**copy.deepcopy(MANIFEST), "metadata": meta})
        await kube.close()

    asyncio.run(create())
    assert main(["doctor", "unseen", "-n", "default", "--kubeconfig", str(cluster.kubeconfig), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["subject"], document["problems"]) == ("default/unseen", 1)
    assert document["findings"][0]["message"] == "no operator has written a status yet"
