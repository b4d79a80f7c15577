"""Engines of a cluster in, manifests with targets out: what is found, guessed, and refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from plimsoll.api.v1alpha1 import parse
from plimsoll.cli.adopt import AdoptCommandError, documents, evidence_of
from plimsoll.core.errors import Forbidden
from tests.cli.fake_kube import FakeKube

Object = dict[str, Any]

PODS = "/api/v1/namespaces/team/pods"
APPS = "/apis/apps/v1"
GROUPS = {
    APPS: {
        "resources": [
            {"name": name, "kind": kind, "namespaced": True}
            for name, kind in (
                ("deployments", "Deployment"), ("deployments/scale", "Scale"), ("statefulsets", "StatefulSet"),
                ("statefulsets/scale", "Scale"), ("replicasets", "ReplicaSet"), ("replicasets/scale", "Scale"),
                ("daemonsets", "DaemonSet"),
            )
        ]
    }
}  # fmt: skip


def owner(kind: str, name: str) -> Object:
    return {"apiVersion": "apps/v1", "kind": kind, "name": name, "uid": name, "controller": True}


def pod(name: str = "llm-1", owned_by: Object | None = None, labels: Object | None = None, **container: Any) -> Object:
    meta: Object = {"name": name, "namespace": "team", "uid": name, "labels": labels or {}}
    if owned_by is not None:
        meta["ownerReferences"] = [owned_by]
    return {"metadata": meta, "spec": {"containers": [{"name": "main", **container}]}, "status": {}}


def workload(plural: str, name: str, owned_by: Object | None = None, replicas: int = 3) -> Object:
    meta: Object = {"name": name, "namespace": "team", "ownerReferences": [owned_by] if owned_by else []}
    return {f"{APPS}/namespaces/team/{plural}/{name}": {"metadata": meta, "spec": {"replicas": replicas}}}


async def adopt(pods: list[Object], *objects: Object) -> list[str]:
    answers: Object = {PODS: {"items": pods}, **GROUPS}
    for one in objects:
        answers |= one
    return await documents(FakeKube(answers), "team")


VLLM = {
    "image": "vllm/vllm-openai:v0.32.0",
    "args": ["--model", "Qwen/Qwen3-8B", "--port=9000", "--served-model-name", "chat"],
    "resources": {"limits": {"nvidia.com/gpu": "2"}},
}


async def test_object_with_many_replicas_has_the_highest_bound() -> None:
    found = [pod(owned_by=owner("StatefulSet", "llm"), **VLLM)]
    [text] = await adopt(found, workload("statefulsets", "llm", replicas=800))
    assert parse(yaml.safe_load(text)).spec.sized_tiers["serve"].replica_bounds == (1, 1000)


async def test_manifest_that_would_be_invalid_is_refused_by_field() -> None:
    gpus = {**VLLM, "resources": {"limits": {"nvidia.com/gpu": "128"}}}
    [text] = await adopt([pod(owned_by=owner("StatefulSet", "llm"), **gpus)], workload("statefulsets", "llm"))
    assert "not adopted: spec.targets.serve.gpus: must be at most 64, not 128" in text
    assert yaml.safe_load(text) is None


async def test_deployment_of_vllm_becomes_a_valid_manifest() -> None:
    [text] = await adopt(
        [pod(owned_by=owner("ReplicaSet", "llm-abc"), **VLLM), pod("llm-2", owner("ReplicaSet", "llm-abc"), **VLLM)],
        workload("replicasets", "llm-abc", owner("Deployment", "llm")),
        workload("deployments", "llm"),
    )
    manifest = yaml.safe_load(text)
    spec = parse(manifest).spec
    target = spec.sized_tiers["serve"]
    assert manifest["metadata"] == {"name": "llm", "namespace": "team"}
    assert spec.model.uri == "hf://Qwen/Qwen3-8B"
    assert spec.model.name == "chat"
    assert manifest["spec"]["targets"]["serve"] == {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llm"},
        "metricsPort": 9000, "minReplicas": 1, "maxReplicas": 6, "gpus": 2,
    }  # fmt: skip
    assert target.replica_bounds == (1, 6)
    assert "# Deployment team/llm: container main has image vllm/vllm-openai:v0.32.0, 2 pods\n" in text
    assert "# minReplicas and maxReplicas: a guess; it has 3 replicas now\n" in text
    assert "mode is Recommend: nothing is written" in text
    assert "set targets.serve.port to the port of their OpenAI API (vLLM's is that of its metrics, 9000)" in text


async def test_stateful_set_with_serve_command_names_guesses() -> None:
    command = {"image": "registry/own:1", "command": ["sh", "-c", "vllm serve /models/a --max-num-seqs 8"]}
    [text] = await adopt([pod(owned_by=owner("StatefulSet", "llm.9x"), **command)], workload("statefulsets", "llm.9x"))
    manifest = yaml.safe_load(text)
    assert parse(manifest).spec.model.uri == "file:///models/a"
    assert manifest["metadata"]["name"] == "llm-9x"
    assert manifest["spec"]["targets"]["serve"]["metricsPort"] == 8000
    assert "container main runs vllm serve" in text
    assert "metricsPort: 8000, vLLM's default; a guess" in text
    assert "gpus: none in the pod's limits; 1 is a guess" in text


async def test_owner_of_the_deployment_is_named() -> None:
    controller = {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "name": "k",
        "controller": True,
    }
    [text] = await adopt(
        [pod(owned_by=owner("Deployment", "llm"), labels={"serving.kserve.io/inferenceservice": "k"}, image="own:1")],
        workload("deployments", "llm", controller),
    )
    assert "label serving.kserve.io/inferenceservice=k" in text
    assert "InferenceService k manages it and may set its replicas" in text
    assert "engine: not known from image own:1; a target must serve vLLM's metrics" in text
    assert parse(yaml.safe_load(text)).spec.model.uri == "file:///unknown"


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (
            pod("lone", **VLLM),
            "team/Pod lone: container main has image vllm/vllm-openai:v0.32.0; not adopted: no object",
        ),
        (pod(owned_by=owner("DaemonSet", "d"), **VLLM), "not adopted: its owner DaemonSet d has no scale subresource"),
        (pod(owned_by=owner("ReplicaSet", "gone"), **VLLM), "not adopted: its owner ReplicaSet gone is gone"),
        (
            pod(owned_by=owner("Deployment", "llm"), image="lmsysorg/sglang:v0.5"),
            "not adopted: the engine of image lmsysorg/sglang:v0.5 is not supported as a target yet",
        ),
        (
            pod(owned_by=owner("Deployment", "llm"), labels={"llm-d.ai/role": "decode"}, **VLLM),
            "not adopted: its role is decode, and not exactly one object of its pair has the role prefill",
        ),
        (
            pod(owned_by=owner("Deployment", "llm"), labels={"disaggregatedset.x-k8s.io/name": "pd"}, **VLLM),
            "not adopted: DisaggregatedSet pd sets its replicas",
        ),
    ],
)
async def test_what_cannot_be_adopted_is_a_comment_with_the_reason(found: Object, reason: str) -> None:
    [text] = await adopt([found], workload("daemonsets", "d"), workload("deployments", "llm"))
    assert yaml.safe_load(text) is None
    assert reason in text


async def test_text_of_a_pod_cannot_leave_its_comment() -> None:
    hostile = {"image": "vllm/vllm-openai:1\nkind: Secret"}
    arguments = {**hostile, "args": ["--model", "/m\nspec: {}\n---\nkind: Pod"]}
    found = [
        pod(owned_by=owner("Deployment", "llm"), **hostile),
        pod("odd-1", owner("Deployment", "odd"), **arguments),
        pod("lone", image="vllm:1\nkind: Pod"),
    ]
    made = await adopt(found, workload("deployments", "llm"), workload("deployments", "odd"))
    assert "not adopted: spec.model.uri" in "".join(made)
    [manifest] = [one for one in yaml.safe_load_all("---\n".join(made)) if one is not None]
    assert manifest["kind"] == "InferenceService"
    assert manifest["spec"]["slo"] == {"ttft": "1s", "tpot": "50ms"}


async def test_nothing_found_says_what_was_looked_for() -> None:
    own = pod(owned_by=owner("Deployment", "chat-serve"), labels={"plimsoll.dev/role": "serve"}, **VLLM)
    [text] = await adopt([own, pod("web", owner("Deployment", "web"), image="nginx:1")])
    assert text.startswith("# no engine was found in namespace team: adopt looks for vLLM in images")


async def test_missing_permission_is_an_error() -> None:
    with pytest.raises(AdoptCommandError, match="needs permission to list pods in namespace team"):
        await documents(FakeKube({PODS: Forbidden("no", 403)}), "team")


@pytest.mark.parametrize("image", ["ghcr.io/llm-d/llm-d-inference-scheduler:v1", "nginx:1", "plimsoll/gateway:1"])
def test_other_images_are_no_evidence(image: str) -> None:
    assert evidence_of(pod(image=image)) is None


def of_pair(role: str, *args: str, **labels: str) -> Object:
    words = [*VLLM["args"], *args]
    return pod(f"pd-{role}-1", owner("Deployment", f"pd-{role}"), labels, **{**VLLM, "args": words})


@pytest.mark.parametrize(
    "pair",
    [
        [of_pair(role, **{"llm-d.ai/role": role, "llm-d.ai/model": "qwen"}) for role in ("prefill", "decode")],
        [
            of_pair("prefill", "--kv-transfer-config", '{"kv_connector":"P2pNcclConnector","kv_role":"kv_producer"}'),
            of_pair("decode", '--kv-transfer-config={"kv_connector":"P2pNcclConnector","kv_role":"kv_consumer"}'),
        ],
        [of_pair("prefill", "--is-prefill-worker"), of_pair("decode", "--disaggregation-mode", "decode")],
    ],
    ids=["llm-d", "vllm", "dynamo"],
)
async def test_pair_becomes_one_manifest_with_both_roles(pair: list[Object]) -> None:
    [text] = await adopt(pair, workload("deployments", "pd-prefill", replicas=1), workload("deployments", "pd-decode"))
    spec = parse(yaml.safe_load(text)).spec
    assert {role: target.scale_target_ref.name for role, target in spec.sized_tiers.items()} == {  # type: ignore[union-attr]
        "prefill": "pd-prefill", "decode": "pd-decode",
    }  # fmt: skip
    assert [target.replica_bounds for target in spec.sized_tiers.values()] == [(1, 2), (1, 6)]
    assert spec.model.name == "chat"
    assert "# Deployment team/pd-prefill: " in text
    assert "the TTFT of prefill engines lacks the KV transfer" in text
    assert "targets.serve" not in text


async def test_two_prefill_fleets_of_a_model_are_not_guessed() -> None:
    found = [of_pair(role, **{"llm-d.ai/role": role}) for role in ("prefill", "decode")]
    more = pod("x-1", owner("Deployment", "x"), {"llm-d.ai/role": "prefill"}, **VLLM)
    made = await adopt([*found, more], *(workload("deployments", name) for name in ("pd-prefill", "pd-decode", "x")))
    assert len(made) == 3
    assert all("not adopted: its role is" in text for text in made)


async def test_pairs_of_two_models_are_kept_apart() -> None:
    def of_model(model: str, role: str) -> Object:
        name = f"{model}-{role}"
        return pod(name, owner("Deployment", name), {"llm-d.ai/role": role, "llm-d.ai/model": model}, **VLLM)

    names = [(model, role) for model in ("a", "b") for role in ("prefill", "decode")]
    made = await adopt(
        [of_model(*name) for name in names], *(workload("deployments", "-".join(name)) for name in names)
    )
    refs = [
        [target["scaleTargetRef"]["name"] for target in yaml.safe_load(text)["spec"]["targets"].values()]
        for text in made
    ]
    assert refs == [["a-prefill", "a-decode"], ["b-prefill", "b-decode"]]


async def test_prefill_and_decode_of_two_models_are_no_pair() -> None:
    found = [
        pod(role, owner("Deployment", role), {"llm-d.ai/role": role}, **{**VLLM, "args": ["--model", model]})
        for role, model in (("prefill", "a/one"), ("decode", "b/other"))
    ]
    made = await adopt(found, *(workload("deployments", role) for role in ("prefill", "decode")))
    assert [text.partition("not adopted: ")[2][:11] for text in made] == ["its role is"] * 2


HPAS = "/apis/autoscaling/v2/namespaces/team/horizontalpodautoscalers"


async def test_autoscaler_of_the_object_is_named() -> None:
    scaler = {
        "metadata": {"name": "theirs", "namespace": "team"},
        "spec": {"scaleTargetRef": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "llm"}},
    }
    found = [pod(owned_by=owner("StatefulSet", "llm"), **VLLM)]
    note = "# HorizontalPodAutoscaler theirs scales it: mode Auto would yield to it\n"
    for autoscalers, is_named in (([scaler], True), ([], False)):
        [text] = await adopt(found, workload("statefulsets", "llm"), {HPAS: {"items": autoscalers}})
        assert (note in text) is is_named
    [text] = await adopt(found, workload("statefulsets", "llm"), {HPAS: Forbidden("no", 403)})
    assert "# HorizontalPodAutoscalers: could not be read, and one may scale it\n" in text


async def test_chart_value_for_other_kinds_is_named() -> None:
    group = "/apis/fleets.example.dev/v1"
    kinds = (("modelfleets", "ModelFleet"), ("modelfleets/scale", "Scale"))
    resources = [{"name": name, "kind": kind, "namespaced": True} for name, kind in kinds]
    fleet = {"metadata": {"name": "llm", "namespace": "team"}, "spec": {"replicas": 1}}
    answers = {group: {"resources": resources}, f"{group}/namespaces/team/modelfleets/llm": fleet}
    owned_by = {**owner("ModelFleet", "llm"), "apiVersion": "fleets.example.dev/v1"}
    value = "the chart value targets.resources needs {apiGroup: fleets.example.dev, resources: [modelfleets]}"
    [text] = await adopt([pod(owned_by=owned_by, **VLLM)], answers)
    assert value in text
    [text] = await adopt([pod(owned_by=owner("StatefulSet", "llm"), **VLLM)], workload("statefulsets", "llm"))
    assert "targets.resources" not in text
