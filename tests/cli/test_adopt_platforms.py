"""Engines of KServe, Dynamo, KubeAI and Ray: the object that is proposed, and who else writes its count.

The objects have the fields of their projects' API types and documents.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from plimsoll.api.v1alpha1 import parse
from plimsoll.cli.adopt import documents
from plimsoll.core.errors import Forbidden
from tests.cli.fake_kube import FakeKube
from tests.cli.test_adopt import GROUPS, PODS, VLLM, owner, pod, workload

Object = dict[str, Any]

KINDS = {
    "/apis/serving.kserve.io/v1beta1": (("inferenceservices", "InferenceService", False),),
    "/apis/serving.kserve.io/v1alpha1": (("llminferenceservices", "LLMInferenceService", False),),
    "/apis/nvidia.com/v1alpha1": (
        ("dynamocomponentdeployments", "DynamoComponentDeployment", False),
        ("dynamographdeploymentscalingadapters", "DynamoGraphDeploymentScalingAdapter", True),
    ),
    "/apis/nvidia.com/v1beta1": (
        ("dynamographdeploymentscalingadapters", "DynamoGraphDeploymentScalingAdapter", True),
    ),
    "/apis/kubeai.org/v1": (("models", "Model", True),),
    "/apis/ray.io/v1": (("rayclusters", "RayCluster", False), ("rayservices", "RayService", False)),
}  # fmt: skip
ADAPTERS = "/apis/nvidia.com/{}/namespaces/team/dynamographdeploymentscalingadapters"


def discovery() -> Object:
    """What the API server says of each group's kinds, and of their scale."""
    found: Object = dict(GROUPS)
    for path, kinds in KINDS.items():
        resources = [{"name": name, "kind": kind, "namespaced": True} for name, kind, _ in kinds]
        resources += [{"name": f"{name}/scale", "kind": "Scale"} for name, _, is_scalable in kinds if is_scalable]
        found[path] = {"resources": resources}
    return found


def controlled_by(api_version: str, kind: str, name: str) -> Object:
    return {"apiVersion": api_version, "kind": kind, "name": name, "uid": name, "controller": True}


async def adopt(pods: list[Object], *objects: Object) -> str:
    answers: Object = {PODS: {"items": pods}, **discovery()}
    for one in objects:
        answers |= one
    [text] = await documents(FakeKube(answers), "team")
    return text


@pytest.mark.parametrize(
    ("parent", "labels"),
    [
        (
            controlled_by("serving.kserve.io/v1beta1", "InferenceService", "llama"),
            {"serving.kserve.io/inferenceservice": "llama"},
        ),
        (
            controlled_by("serving.kserve.io/v1alpha1", "LLMInferenceService", "llama"),
            {"app.kubernetes.io/part-of": "llminferenceservice", "llm-d.ai/role": "both"},
        ),
    ],
)
async def test_workload_of_kserve_is_proposed_with_its_owner(parent: Object, labels: Object) -> None:
    text = await adopt(
        [pod(owned_by=owner("ReplicaSet", "llama-kserve-1"), labels=labels, **VLLM)],
        workload("replicasets", "llama-kserve-1", owner("Deployment", "llama-kserve")),
        workload("deployments", "llama-kserve", parent),
    )
    spec = parse(yaml.safe_load(text)).spec
    assert spec.sized_tiers["serve"].scale_target_ref.label == "Deployment llama-kserve"
    assert f"# {parent['kind']} llama manages it and may set its replicas: keep mode Recommend" in text


def worker(component: str = "VllmDecodeWorker", **labels: str) -> Object:
    """A pod of a Dynamo component."""
    own = {
        "nvidia.com/dynamo-graph-deployment-name": "agg",
        "nvidia.com/dynamo-component": component,
        "nvidia.com/dynamo-component-type": "worker",
    }
    ports = [{"name": "http", "containerPort": 8000}, {"name": "system", "containerPort": 9090}]
    return pod(
        owned_by=owner("ReplicaSet", "agg-1"), labels=own | labels, image="nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.3",
        command=["python3", "-m", "dynamo.vllm", "--model", "Qwen/Qwen3-8B"], ports=ports,
        resources={"limits": {"nvidia.com/gpu": "1"}},
    )  # fmt: skip


DYNAMO_DEPLOYMENT = (
    workload("replicasets", "agg-1", owner("Deployment", "agg-decode")),
    workload("deployments", "agg-decode", controlled_by("nvidia.com/v1alpha1", "DynamoComponentDeployment", "agg-d")),
)


def adapter(version: str, name: str, component: str) -> Object:
    field = "componentName" if version == "v1beta1" else "serviceName"
    return {
        "metadata": {"name": name, "namespace": "team"},
        "spec": {"replicas": 2, "dgdRef": {"name": "agg", field: component}},
        "status": {"replicas": 2, "selector": f"nvidia.com/dynamo-component={component}"},
    }


@pytest.mark.parametrize("version", ["v1alpha1", "v1beta1"])
async def test_adapter_of_a_dynamo_component_is_proposed(version: str) -> None:
    listed = [adapter(version, "agg-frontend", "Frontend"), adapter(version, "agg-dec", "VllmDecodeWorker")]
    answers = {ADAPTERS.format(version): {"items": listed}}
    if version == "v1alpha1":
        answers["/apis/nvidia.com/v1beta1"] = {"resources": []}
    text = await adopt([worker()], *DYNAMO_DEPLOYMENT, answers)
    manifest = yaml.safe_load(text)
    assert parse(manifest)
    target = manifest["spec"]["targets"]["serve"]
    assert target["scaleTargetRef"] == {
        "apiVersion": f"nvidia.com/{version}", "kind": "DynamoGraphDeploymentScalingAdapter", "name": "agg-dec",
    }  # fmt: skip
    assert (target["metricsPort"], target["maxReplicas"]) == (9090, 4)
    assert "Dynamo's planner writes the adapter too, where it runs" in text


async def test_dynamo_component_without_adapter_is_refused() -> None:
    """Its operator would set the Deployment's count back."""
    text = await adopt([worker()], *DYNAMO_DEPLOYMENT, {ADAPTERS.format("v1beta1"): {"items": []}})
    assert yaml.safe_load(text) is None
    assert "component VllmDecodeWorker of DynamoGraphDeployment agg has no DynamoGraphDeploymentScalingAdapter" in text
    assert "enable scalingAdapter" in text


async def test_adapters_that_cannot_be_read_are_named() -> None:
    text = await adopt([worker()], *DYNAMO_DEPLOYMENT, {ADAPTERS.format("v1beta1"): Forbidden("no list", 403)})
    assert yaml.safe_load(text) is None
    assert "cannot be read (no list)" in text


async def test_other_parts_of_dynamo_are_no_engines() -> None:
    frontend = worker("Frontend", **{"nvidia.com/dynamo-component-type": "frontend"})
    assert (await adopt([frontend])).startswith("# no engine was found")
    prefill = worker(**{"nvidia.com/dynamo-sub-component-type": "prefill"})
    found = {ADAPTERS.format("v1beta1"): {"items": [adapter("v1beta1", "agg-dec", "VllmDecodeWorker")]}}
    assert "not adopted: its role is prefill" in await adopt([prefill], found)


@pytest.mark.parametrize(
    ("is_off", "note"),
    [
        (False, "KubeAI's autoscaler sets its replicas: keep mode Recommend, or set its spec.autoscalingDisabled"),
        (True, "KubeAI's autoscaler is off (spec.autoscalingDisabled)"),
    ],
)
async def test_model_of_kubeai_is_proposed_with_a_selector(is_off: bool, note: str) -> None:
    """Its scale has no selector, and its controller sets the replicas."""
    labels = {"model": "qwen3", "app.kubernetes.io/managed-by": "kubeai"}
    model = {"metadata": {"name": "qwen3", "namespace": "team"}, "spec": {"engine": "VLLM", "replicas": 2}}
    model["spec"] |= {"autoscalingDisabled": True} if is_off else {}
    text = await adopt(
        [pod(owned_by=controlled_by("kubeai.org/v1", "Model", "qwen3"), labels=labels, **VLLM)],
        {"/apis/kubeai.org/v1/namespaces/team/models/qwen3": model},
    )
    target = parse(yaml.safe_load(text)).spec.sized_tiers["serve"]
    assert target.scale_target_ref.label == "Model qwen3"
    assert target.pod_selector == "model=qwen3"
    assert note in text


async def test_worker_group_of_ray_is_refused_with_the_reason() -> None:
    parent = controlled_by("ray.io/v1", "RayCluster", "rs-raycluster")
    cluster = {"metadata": {"name": "rs-raycluster", "namespace": "team", "ownerReferences": [
        controlled_by("ray.io/v1", "RayService", "rs")]}, "spec": {"workerGroupSpecs": [{"replicas": 2}]}}  # fmt: skip
    service = {"metadata": {"name": "rs", "namespace": "team"}, "spec": {}}
    text = await adopt(
        [pod(owned_by=parent, labels={"ray.io/serve": "true"}, image="rayproject/ray-llm:2.50")],
        {"/apis/ray.io/v1/namespaces/team/rayclusters/rs-raycluster": cluster},
        {"/apis/ray.io/v1/namespaces/team/rayservices/rs": service},
    )
    assert yaml.safe_load(text) is None
    assert "not adopted: its owner RayService rs has no scale subresource: Ray has the count of a worker group" in text
