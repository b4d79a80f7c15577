"""The verb `check` as it is typed: what it judges, prints and returns."""

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
from plimsoll.core.errors import BackendUnavailable, Forbidden, InvalidSpec
from tests import builders
from tests.apiserver import ApiServer
from tests.cli import fake_kube
from tests.cli.check_objects import GPU, GPU_TAINT, TEAM_TAINT, daemon_set, node, only, storage_class, tier

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
    assert "CRDs exist already" in capsys.readouterr().out


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
