"""`plimsoll adopt`: finds engines in the cluster and prints a manifest with `targets` for each. It writes nothing.

Problem: a fleet that exists says nowhere that it serves a model, on which port, and what scales it.

Idea: an engine's pod shows itself by its image, its command line, or the labels of KServe, llm-d and other operators,
and if the user asks for it by its metrics page (`metric_pages`).
The pod's owners lead to the object with the replica count. What was guessed is a comment in the manifest, and what was
found but cannot be adopted is a comment in its place.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from plimsoll.adapters.engine_of_pod import command_line
from plimsoll.adapters.kube_client import HORIZONTALPODAUTOSCALERS, PODS, KubeClient, Resource
from plimsoll.api import labels
from plimsoll.api.v1alpha1 import parse
from plimsoll.api.v1alpha1.targets import ScaleTargetRef
from plimsoll.api.v1alpha1.tiers import MAX_TIER_REPLICAS
from plimsoll.cli import adopt_platforms, cluster
from plimsoll.cli.kubeconfig import current_namespace
from plimsoll.cli.manifests import service_name
from plimsoll.cli.metric_pages import FoundPages, MetricsPage, find_pages, owner_key
from plimsoll.cli.output_files import print_text
from plimsoll.cli.placement import GPU_RESOURCE
from plimsoll.controllers.targets.target_state import autoscaler_of
from plimsoll.core.errors import ClusterError, Forbidden, InvalidSpec, NotFound, PlimsollError
from plimsoll.engines import vllm
from plimsoll.engines.engine import Feature

KubeObject = dict[str, Any]

MAX_OWNERS: Final = 6  # levels above a pod
DEFAULT_PORT: Final = 8000
_VLLM_IMAGE: Final = re.compile(r"vllm|/llm-d(-[a-z]+)?[:@]|rhaiis")
_OTHER_ENGINES: Final = re.compile(
    r"sglang|text-generation-inference|tensorrt|tritonserver|llama[.-]?cpp|ollama|lmdeploy|nim/"
)
_ENGINE_LABELS: Final = (
    "serving.kserve.io/inferenceservice",
    "llm-d.ai/inferenceServing",
    "llm-d.ai/inference-serving",
    "llm-d.ai/model",
    "nvidia.com/dynamo-component-type",
    "ray.io/serve",
)
_ROLE_LABEL: Final = "llm-d.ai/role"
_WORKER_INDEX: Final = "leaderworkerset.sigs.k8s.io/worker-index"
_DISAGGREGATED_SET: Final = "disaggregatedset.x-k8s.io/name"  # its LeaderWorkerSets have its revision in their names
_HUB_NAME: Final = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9._-]*/[A-Za-z0-9_][A-Za-z0-9._-]*$")
_TTFT, _TPOT = "1s", "50ms"


class AdoptCommandError(PlimsollError):
    """The cluster cannot be read; the message has the cause."""


@dataclass
class Fleet:
    """Engines of one object. owner: that object. pods: its pods with an engine. evidence: why they are engines.

    page: their metrics page, None if it was not read. notes: what else its user must know.
    """

    owner: KubeObject
    pods: list[KubeObject] = field(default_factory=list)
    evidence: str = ""
    page: MetricsPage | None = None
    notes: list[str] = field(default_factory=list)


def run(arguments: argparse.Namespace) -> int:
    """Print the manifests of all fleets in a namespace, or in all of them."""

    async def find() -> list[str]:
        async with cluster.connect(arguments.kubeconfig) as kube:
            namespace = None if arguments.all_namespaces else arguments.namespace
            if namespace is None and not arguments.all_namespaces:
                namespace = current_namespace(arguments.kubeconfig)
            return await documents(kube, namespace, reads_pages=arguments.metrics_pages)

    print_text("---\n".join(asyncio.run(find())))
    return 0


async def documents(kube: KubeClient, namespace: str | None, *, reads_pages: bool = False) -> list[str]:
    """The YAML documents, at least one: a comment if there is nothing to adopt. namespace: None for all.

    reads_pages: whether to ask pods for their metrics page that nothing else shows.
    """
    place = f"namespace {namespace}" if namespace else "any namespace"
    try:
        pods, _ = await kube.list(PODS, namespace)
    except Forbidden as error:
        raise AdoptCommandError(f"forbidden: needs permission to list pods in {place} ({error})") from error
    except ClusterError as error:
        raise AdoptCommandError(f"cannot list pods in {place}: {error}") from error
    foreign = [pod for pod in pods if {labels.ROLE, labels.WORKER_OF}.isdisjoint(pod["metadata"].get("labels", {}))]
    found = FoundPages({})
    if reads_pages:
        try:
            found = await find_pages(kube, [pod for pod in foreign if evidence_of(pod) is None])
        except Forbidden as error:
            message = f"forbidden: --metrics-pages needs permission to get pods/proxy in {place} ({error})"
            raise AdoptCommandError(message) from error
    fleets: dict[tuple[str, ...], Fleet] = {}
    others: dict[tuple[str, ...], str] = {}
    for pod in foreign:
        page, evidence = found.pages.get(owner_key(pod)), evidence_of(pod)
        if evidence is None and page is not None:
            evidence = f"port {page.port} has a metrics page of {page.engine.title}"
        if evidence is None:
            continue
        owner = await adopt_platforms.dynamo_adapter(kube, pod) or await _scalable_owner(kube, pod)
        if isinstance(owner, str):
            key = (pod["metadata"]["namespace"], _owner_name(pod))
            others.setdefault(key, _comments([f"{'/'.join(key)}: {evidence}; not adopted: {owner}"]))
            continue
        meta = owner["metadata"]
        fleet = fleets.setdefault(
            (meta["namespace"], owner["kind"], meta["name"]), Fleet(owner, evidence=evidence, page=page)
        )
        fleet.pods.append(pod)
    await _add_notes(kube, namespace, fleets.values())
    made = [manifest_of(*pair) for pair in paired([fleet for _, fleet in sorted(fleets.items())])]
    unread = []
    if found.unread:
        unread.append(_comments([f"metrics pages of {found.unread} more workloads were not read: use -n"]))
    return [*made, *others.values(), *unread] or [f"# no engine was found in {place}: {_SIGNS}\n"]


async def _add_notes(kube: KubeClient, namespace: str | None, fleets: Iterable[Fleet]) -> None:
    """Note what scales each fleet, and the permission that the operator lacks. namespace: None for all."""
    autoscalers: list[KubeObject] | None = None
    with contextlib.suppress(ClusterError):
        autoscalers, _ = await kube.list(HORIZONTALPODAUTOSCALERS, namespace)
    for fleet in fleets:
        api_version, kind, meta = fleet.owner["apiVersion"], fleet.owner["kind"], fleet.owner["metadata"]
        if autoscalers is None:
            fleet.notes.append("HorizontalPodAutoscalers: could not be read, and one may scale it")
        else:
            ref = ScaleTargetRef.model_construct(api_version=api_version, kind=kind, name=meta["name"])
            of_namespace = [one for one in autoscalers if one["metadata"]["namespace"] == meta["namespace"]]
            if (writer := autoscaler_of(ref, of_namespace)) is not None:
                fleet.notes.append(f"{writer.name} scales it: mode Auto would yield to it")
        if (api_version, kind) in _READABLE:
            continue
        discovered = await kube.discover(api_version, kind)
        if discovered is not None:
            value = f"{{apiGroup: {api_version.rpartition('/')[0]}, resources: [{discovered[0].plural}]}}"
            fleet.notes.append(f"permission: the chart value targets.resources needs {value}")


_READABLE: Final = frozenset({("apps/v1", "Deployment"), ("apps/v1", "StatefulSet")})  # by the chart's defaults
_SIGNS: Final = (
    "adopt looks for vLLM in images and command lines, for labels of KServe, llm-d, Dynamo and Ray, and with"
    " --metrics-pages at metrics pages"
)


def evidence_of(pod: KubeObject) -> str | None:
    """Why a pod is an engine; None if nothing shows it."""
    if adopt_platforms.has_no_engine(pod):
        return None
    for container in pod["spec"].get("containers", ()):
        words = command_line(container)
        if "serve" in words and any(word.rsplit("/", 1)[-1] == "vllm" for word in words):
            return f"container {container['name']} runs vllm serve"
        if any("vllm.entrypoints" in word for word in words):
            return f"container {container['name']} runs vLLM's API server"
        image = str(container.get("image", ""))
        if _VLLM_IMAGE.search(image) or _OTHER_ENGINES.search(image):
            return f"container {container['name']} has image {image}"
    found = pod["metadata"].get("labels", {})
    return next((f"label {name}={found[name]}" for name in _ENGINE_LABELS if name in found), None)


def paired(fleets: list[Fleet]) -> list[tuple[Fleet, ...]]:
    """Fleets of serve engines alone, and each prefill fleet with its decode fleet, if no other one can be meant."""
    members: dict[tuple[str, ...], list[Fleet]] = {}
    for fleet in fleets:
        if role_of(fleet):
            pod = fleet.pods[0]
            model, _ = _model(command_line(_engine_container(pod)))
            members.setdefault((*adopt_platforms.pair_key(pod), model["uri"]), []).append(fleet)
    pairs: dict[int, tuple[Fleet, ...]] = {}
    for group in members.values():
        by_role = sorted(group, key=role_of, reverse=True)  # prefill first
        if [role_of(one) for one in by_role] == ["prefill", "decode"]:
            pairs |= {id(by_role[0]): tuple(by_role), id(by_role[1]): ()}
    return [found for fleet in fleets if (found := pairs.get(id(fleet), (fleet,)))]


def role_of(fleet: Fleet) -> str:
    """The role of a fleet whose engines do one of prefill and decode, by labels or command line; "" for others."""
    pod = fleet.pods[0]
    own = (pod["metadata"].get("labels") or {}).get(_ROLE_LABEL)
    if own in ("prefill", "decode"):
        return str(own)
    words = command_line(_engine_container(pod))
    return adopt_platforms.disaggregated_role(pod) or adopt_platforms.role_of_arguments(words)


def manifest_of(*fleets: Fleet) -> str:
    """The manifest of a fleet, or of a prefill and a decode fleet, as YAML with comments; comments alone for what
    cannot be adopted.
    """
    refusals = [_refusal(fleet, is_paired=len(fleets) > 1) for fleet in fleets]
    if any(refusals):
        reasons = [f"not adopted: {refusal or 'the other engines of its pair are not'}" for refusal in refusals]
        return _comments(
            [line for fleet, reason in zip(fleets, reasons, strict=True) for line in (_head(fleet), reason)]
        )
    first, meta = fleets[-1], fleets[-1].owner["metadata"]
    model, model_note = _model(command_line(_engine_container(first.pods[0])))
    notes, targets, port = [], {}, 0
    for fleet in fleets:
        target, of_target = _target(fleet)
        role, port = role_of(fleet) or "serve", target["metricsPort"]
        targets[role] = target
        notes += [_head(fleet), *([model_note] if fleet is first else []), *of_target]
    notes.append(f"slo: a guess ({_TTFT} to the first token, {_TPOT} for each further one); set what your users need")
    notes.append(_pair_note() if len(fleets) > 1 else _port_note(port))
    notes.extend(filter(None, [_writer_note(fleet.owner) for fleet in fleets]))
    notes.extend(note for fleet in fleets for note in fleet.notes)
    notes.append(
        "mode is Recommend: nothing is written. Set scaling.mode to Auto once the recommendations convince you"
    )
    manifest = {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND,
        "metadata": {"name": service_name(meta["name"]), "namespace": meta["namespace"]},
        "spec": {
            "model": model,
            "slo": {"ttft": _TTFT, "tpot": _TPOT},
            "targets": targets,
            "scaling": {"mode": "Recommend"},
        },
    }
    try:
        parse(manifest)
    except InvalidSpec as error:
        return _comments([*map(_head, fleets), f"not adopted: {error}"])
    return _comments(notes) + yaml.safe_dump(manifest, sort_keys=False)


def _head(fleet: Fleet) -> str:
    meta = fleet.owner["metadata"]
    label = f"{fleet.owner['kind']} {meta['namespace']}/{meta['name']}"
    return f"{label}: {fleet.evidence}, {_count(len(fleet.pods), 'pod')}"


def _port_note(port: int) -> str:
    return (
        "port: not set, so Plimsoll routes nothing. To admit and route their requests, set targets.serve.port to the"
        f" port of their OpenAI API (vLLM's is that of its metrics, {port}), and model.name to a name that they serve"
    )


def _pair_note() -> str:
    return (
        "prefill and decode: a pair by labels or command lines. Clients keep their route; the TTFT of prefill engines"
        " lacks the KV transfer, and requests that skip them"
    )


def _target(fleet: Fleet) -> tuple[KubeObject, list[str]]:
    """The target of a fleet, and how its fields were found."""
    meta, pod = fleet.owner["metadata"], fleet.pods[0]
    container = _engine_container(pod)
    words, image = command_line(container), str(container.get("image", ""))
    port, port_note = _metrics_port(fleet, container, words)
    notes = [port_note]
    if fleet.page is None and "vllm" not in " ".join((image, *words)):
        notes.append(f"engine: not known from image {image}; a target must serve vLLM's metrics")
    gpus = max(1, sum(_gpus(one) for one in pod["spec"].get("containers", ())))
    gpu_note = (
        f"gpus: {gpus} of the pod's limits" if _gpus(container) else "gpus: none in the pod's limits; 1 is a guess"
    )
    target: KubeObject = {
        "scaleTargetRef": {"apiVersion": fleet.owner["apiVersion"], "kind": fleet.owner["kind"], "name": meta["name"]},
        "metricsPort": port,
    }
    if _WORKER_INDEX in pod["metadata"].get("labels", {}):
        name = pod["metadata"]["labels"].get("leaderworkerset.sigs.k8s.io/name", meta["name"])
        target["podSelector"] = f"leaderworkerset.sigs.k8s.io/name={name},{_WORKER_INDEX}=0"
        group = [one for each in _group(fleet.pods, pod) for one in each["spec"].get("containers", ())]
        gpus = max(1, sum(_gpus(one) for one in group))
        gpu_note = f"gpus: {gpus} of all pods of a group; podSelector: the leaders, which have the API server"
    if (selector := adopt_platforms.pod_selector(fleet.owner)) is not None:
        target["podSelector"] = selector
    replicas = int(fleet.owner.get("spec", {}).get("replicas", 1) or 0)
    target |= {"minReplicas": 1, "maxReplicas": min(max(2, 2 * replicas), MAX_TIER_REPLICAS), "gpus": gpus}
    return target, [
        *notes,
        gpu_note,
        f"minReplicas and maxReplicas: a guess; it has {_count(replicas, 'replica')} now",
    ]


def _refusal(fleet: Fleet, *, is_paired: bool) -> str | None:
    """Why a fleet cannot be adopted; None if it can. is_paired: whether it is one of prefill and decode."""
    image = str(_engine_container(fleet.pods[0]).get("image", ""))
    if fleet.page is not None and Feature.TARGETS not in fleet.page.engine.features:
        return f"the engine {fleet.page.engine.title} is not supported as a target yet"
    if _OTHER_ENGINES.search(image):
        return f"the engine of image {image} is not supported as a target yet"
    own_labels = fleet.pods[0]["metadata"].get("labels", {})
    if name := own_labels.get(_DISAGGREGATED_SET):
        return f"DisaggregatedSet {name} sets its replicas, and renames it with each revision"
    if not is_paired and (role := role_of(fleet)):
        other = "decode" if role == "prefill" else "prefill"
        return f"its role is {role}, and not exactly one object of its pair has the role {other}"
    return None


def _writer_note(owner: KubeObject) -> str | None:
    """Who else may write the count of an object; None if nothing shows it."""
    note, controller = adopt_platforms.writer_note(owner), _controller(owner)
    if note is not None or controller is None:
        return note
    return f"{controller} manages it and may set its replicas: keep mode Recommend, or scale through that"


def _metrics_port(fleet: Fleet, container: KubeObject, words: list[str]) -> tuple[int, str]:
    """The port of the engine's metrics, and how it was found."""
    if fleet.page is not None:
        return fleet.page.port, f"metricsPort: {fleet.page.port} of its metrics page"
    declared = adopt_platforms.metrics_port(fleet.pods[0], container)
    if declared is not None:
        return declared, f"metricsPort: {declared} of the container's port for metrics"
    return _port(container, words)


async def _scalable_owner(kube: KubeClient, pod: KubeObject) -> KubeObject | str:
    """The nearest owner above a pod with a `scale` subresource and a controller's count; a text if there is none.

    A ReplicaSet of a Deployment has one too, but the Deployment sets it; so has a StatefulSet of a LeaderWorkerSet.
    """
    found: KubeObject | None = None
    child, reason = pod, "no object owns the pod"
    for _ in range(MAX_OWNERS):
        owner = next((one for one in child["metadata"].get("ownerReferences", ()) if one.get("controller")), None)
        if owner is None:
            break
        name = f"{owner['kind']} {owner['name']}"
        try:
            discovered = await kube.discover(str(owner["apiVersion"]), str(owner["kind"]))
            if discovered is None:
                reason = f"the cluster does not serve its owner {name}"
                break
            resource, is_scalable = discovered
            if not is_scalable and found is not None:
                break
            child = await _get(kube, resource, pod["metadata"]["namespace"], owner)
        except NotFound:
            reason = f"its owner {name} is gone"
            break
        except ClusterError as error:
            reason = f"its owner {name} cannot be read ({error})"
            break
        if is_scalable:
            found = child
        else:
            reason = f"its owner {name} has no scale subresource{adopt_platforms.missing_scale_hint(owner['kind'])}"
    return found if found is not None else reason


async def _get(kube: KubeClient, resource: Resource, namespace: str, owner: Mapping[str, Any]) -> KubeObject:
    live = await kube.get(resource, namespace, str(owner["name"]))
    return {"apiVersion": owner["apiVersion"], "kind": owner["kind"], **live}


def _owner_name(pod: KubeObject) -> str:
    owners = pod["metadata"].get("ownerReferences") or ()
    return f"{owners[0]['kind']} {owners[0]['name']}" if owners else f"Pod {pod['metadata']['name']}"


def _controller(owner: KubeObject) -> str | None:
    found = next((one for one in owner["metadata"].get("ownerReferences", ()) if one.get("controller")), None)
    return None if found is None else f"{found['kind']} {found['name']}"


def _engine_container(pod: KubeObject) -> KubeObject:
    containers: list[KubeObject] = pod["spec"]["containers"]
    for container in containers:
        if "vllm" in " ".join((str(container.get("image", "")), *command_line(container))):
            return container
    return next((one for one in containers if _OTHER_ENGINES.search(str(one.get("image", "")))), containers[0])


def _port(container: KubeObject, words: list[str]) -> tuple[int, str]:
    flag = vllm.flag_count(words, vllm.PORT)
    if flag is not None:
        return flag, f"metricsPort: {flag} of --port"
    ports = [int(one["containerPort"]) for one in container.get("ports", ()) if "containerPort" in one]
    if ports:
        chosen = DEFAULT_PORT if DEFAULT_PORT in ports else ports[0]
        return chosen, f"metricsPort: {chosen} of the container's ports; a guess if it has several"
    return DEFAULT_PORT, f"metricsPort: {DEFAULT_PORT}, vLLM's default; a guess"


def _model(words: list[str]) -> tuple[KubeObject, str]:
    """`spec.model`, and how it was found."""
    values = vllm.flag_values(words)
    name = values.get("--model", "")
    if not name and "serve" in words[:-1]:
        following = words[words.index("serve") + 1]
        name = "" if following.startswith("-") else following
    served = values.get(vllm.SERVED_MODEL_NAME, "").split(" ")[0]
    model: KubeObject = {"name": served} if served else {}
    if _HUB_NAME.match(name):
        return {"uri": f"hf://{name}", **model}, f"model: {name} of the command line"
    if name.startswith("/"):
        return {"uri": f"file://{name}", **model}, f"model: {name} of the command line"
    note = "model: not in the command line; set uri, from which known models are sized"
    return {"uri": "file:///unknown", **model}, note


def _gpus(container: KubeObject) -> int:
    limits = (container.get("resources") or {}).get("limits") or {}
    return sum(int(count) for name, count in limits.items() if GPU_RESOURCE.search(name) and str(count).isdigit())


def _group(pods: Iterable[KubeObject], pod: KubeObject) -> list[KubeObject]:
    """The pods of a LeaderWorkerSet's group."""
    index = "leaderworkerset.sigs.k8s.io/group-index"
    own = pod["metadata"]["labels"].get(index)
    return [one for one in pods if one["metadata"].get("labels", {}).get(index) == own]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _comments(lines: list[str]) -> str:
    """Return the lines as comments. Text from a pod stays in its line, so that it adds nothing to a manifest."""
    return "".join(f"# {' '.join(line.split())}\n" for line in lines)
