"""What `adopt` knows of the platforms that own engines: Dynamo, KubeAI and Ray.

Problem: the nearest object with a `scale` subresource is not always the one to scale. Dynamo's operator sets the count
of its Deployments back, KubeAI's autoscaler that of its Models, and Ray has the counts in a list.

Idea: the facts of each platform are here, from its API types: the `scale` of Dynamo's
DynamoGraphDeploymentScalingAdapter is made for other autoscalers, that of KubeAI's Model names no pods, and KubeRay's
kinds have none.
"""

from __future__ import annotations

from typing import Any, Final

from plimsoll.adapters.kube_client import KubeClient
from plimsoll.controllers.replicas_owner import is_kubeai_model, is_scaled_by_kubeai
from plimsoll.core.errors import ClusterError
from plimsoll.engines import vllm

KubeObject = dict[str, Any]

ADAPTER_KIND: Final = "DynamoGraphDeploymentScalingAdapter"
_ADAPTER_VERSIONS: Final = ("nvidia.com/v1beta1", "nvidia.com/v1alpha1")  # the second is deprecated
_GRAPH: Final = "nvidia.com/dynamo-graph-deployment-name"  # labels of a component's pods
_COMPONENT: Final = "nvidia.com/dynamo-component"
_COMPONENT_TYPE: Final = "nvidia.com/dynamo-component-type"
_SUB_TYPE: Final = "nvidia.com/dynamo-sub-component-type"
_PAIR_LABELS: Final = (_GRAPH, "llm-d.ai/model", "llm-d.ai/inferenceServing", "llm-d.ai/inference-serving")
# Role, Dynamo's flag, and vLLM's kv_role. The role kv_both, which NIXL often has, says nothing.
_ROLE_ARGUMENTS: Final = (
    ("prefill", "--is-prefill-worker", "kv_producer"),
    ("decode", "--is-decode-worker", "kv_consumer"),
)
_WITHOUT_ENGINE: Final = frozenset({"frontend", "planner", "epp"})
_DYNAMO_PORT: Final = "system"  # name of the port that has the engine's metrics
_RAY_KINDS: Final = frozenset({"RayCluster", "RayService"})
_RAY_HINT: Final = ": Ray has the count of a worker group in workerGroupSpecs[].replicas, where Plimsoll writes nothing"


def has_no_engine(pod: KubeObject) -> bool:
    """Whether a pod is a part of a platform that runs an engine's image for something else."""
    return _labels(pod).get(_COMPONENT_TYPE) in _WITHOUT_ENGINE


def disaggregated_role(pod: KubeObject) -> str:
    """The role of a Dynamo worker that does one of prefill and decode; "" for others."""
    own = _labels(pod)
    found = own.get(_SUB_TYPE) or own.get(_COMPONENT_TYPE)
    return str(found) if found in ("prefill", "decode") else ""


def pair_key(pod: KubeObject) -> tuple[str, str]:
    """What the prefill and decode engines of one pair have in common: their namespace, and graph or model."""
    own = _labels(pod)
    return str(pod["metadata"]["namespace"]), next((str(own[name]) for name in _PAIR_LABELS if name in own), "")


def role_of_arguments(words: list[str]) -> str:
    """The role that a command line gives an engine; "" for one that does both, or that says nothing."""
    values, flags = vllm.flag_values(words), frozenset(map(vllm.flag_name, words))
    for role, flag, kv_role in _ROLE_ARGUMENTS:
        is_of_transfer = kv_role in values.get(vllm.KV_TRANSFER_CONFIG, "")
        if is_of_transfer or flag in flags or values.get("--disaggregation-mode") == role:
            return role
    return ""


def metrics_port(pod: KubeObject, container: KubeObject) -> int | None:
    """The port that a platform declares for the engine's metrics; None if it declares none."""
    if _GRAPH not in _labels(pod):
        return None
    ports = (int(one["containerPort"]) for one in container.get("ports") or () if one.get("name") == _DYNAMO_PORT)
    return next(ports, None)


async def dynamo_adapter(kube: KubeClient, pod: KubeObject) -> KubeObject | str | None:
    """The adapter of a Dynamo component, a text if it has none, and None for a pod of something else."""
    graph, component = _labels(pod).get(_GRAPH), _labels(pod).get(_COMPONENT)
    if not graph:
        return None
    label = f"component {component} of DynamoGraphDeployment {graph}"
    try:
        for version in _ADAPTER_VERSIONS:
            discovered = await kube.discover(version, ADAPTER_KIND)
            if discovered is None:
                continue
            adapters, _ = await kube.list(discovered[0], pod["metadata"]["namespace"])
            for one in adapters:
                ref = one.get("spec", {}).get("dgdRef", {})
                if (ref.get("name"), ref.get("componentName") or ref.get("serviceName")) == (graph, component):
                    return {"apiVersion": version, "kind": ADAPTER_KIND, **one}
            break
    except ClusterError as error:
        return f"the {ADAPTER_KIND} of {label} cannot be read ({error})"
    return (
        f"{label} has no {ADAPTER_KIND}, and Dynamo's operator sets the count of its Deployment: enable scalingAdapter"
    )


def missing_scale_hint(kind: str) -> str:
    """What to add to the sentence that a kind has no `scale` subresource; "" for most."""
    return _RAY_HINT if kind in _RAY_KINDS else ""


def pod_selector(owner: KubeObject) -> str | None:
    """The selector of the pods of KubeAI's Model, whose scale names none; None for other objects."""
    return f"model={owner['metadata']['name']}" if _is_kubeai_model(owner) else None


def writer_note(owner: KubeObject) -> str | None:
    """Who else writes the count of a platform's object, as a comment; None if the platform says nothing of it."""
    if owner["kind"] == ADAPTER_KIND:
        return "Dynamo's planner writes the adapter too, where it runs: keep mode Recommend, or stop it first"
    if _is_kubeai_model(owner):
        if is_scaled_by_kubeai(owner):
            remedy = "keep mode Recommend, or set its spec.autoscalingDisabled to true"
            return f"KubeAI's autoscaler sets its replicas: {remedy}"
        return "KubeAI's autoscaler is off (spec.autoscalingDisabled), so that Plimsoll may set the replicas"
    return None


def _is_kubeai_model(owner: KubeObject) -> bool:
    return is_kubeai_model(str(owner["apiVersion"]), owner["kind"])


def _labels(pod: KubeObject) -> KubeObject:
    found: KubeObject = pod["metadata"].get("labels") or {}
    return found
