"""`plimsoll doctor NAME`: what is wrong with one service, and what to do.

It reads the service, its workloads, pods, Events and InferencePool, the HorizontalPodAutoscalers of its namespace,
the nodes, and the operator's document. It changes nothing. What the user may not read is listed, and the rest is still
checked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from plimsoll.adapters.kube_client import (
    DEPLOYMENTS,
    EVENTS,
    HORIZONTALPODAUTOSCALERS,
    INFERENCEPOOLS,
    PODS,
    KubeClient,
    Resource,
)
from plimsoll.adapters.normalize import epoch_s
from plimsoll.api import labels
from plimsoll.api.conditions import ABNORMAL_TRUE, ConditionReason
from plimsoll.cli import cluster, kubeconfig
from plimsoll.cli.explain import skipped_prefill
from plimsoll.cli.findings import NODES, NOTE, PROBLEM, UNCHECKED, Finding, print_findings, read_all
from plimsoll.cli.json_access import get_int, get_list, get_mapping, get_number, get_text
from plimsoll.cli.output import format_age
from plimsoll.cli.placement import TierPods, placement
from plimsoll.cli.replica_writers import foreign_writers
from plimsoll.controllers import tier_workload
from plimsoll.controllers.reconcile import pod_diagnosis
from plimsoll.core.errors import ClusterError, PlimsollError
from plimsoll.core.units import format_figure

KubeObject = dict[str, Any]

MAX_FINDINGS_PER_KIND: Final = 5
EVENT_AGE_S: Final = 3600.0
_EVENT_TIMES: Final = (("series", "lastObservedTime"), ("lastTimestamp",), ("eventTime",))  # one or several are set
_IMAGE: Final = re.compile(r"\(image [^()]*\)$")  # the end of a message about an image that cannot be pulled
_CHOSEN_REASONS: Final = frozenset(  # of scaling that the user has turned off
    {ConditionReason.RECOMMEND_ONLY, ConditionReason.SCALING_OFF, ConditionReason.PAUSED}
)
_START_REASONS: Final = frozenset({"Starting", "DemandUnknown"})
_OPERATOR_LOGS: Final = "see the operator's log: kubectl -n {} logs deploy/plimsoll-operator --tail=100"


@dataclass(frozen=True)
class Patient:
    """Objects read for one service. A list is None if it could not be read. document: the operator's, or None.

    workloads: the Deployments and LeaderWorkerSets that could be read.
    """

    service: KubeObject
    workloads: Sequence[KubeObject] = ()
    pods: list[KubeObject] | None = None
    events: list[KubeObject] | None = None
    autoscalers: list[KubeObject] | None = None
    nodes: list[KubeObject] | None = None
    pool: KubeObject | None = None
    document: Any = None

    @property
    def name(self) -> str:
        return get_text(self.service, "metadata", "name") or ""


def run(arguments: argparse.Namespace) -> int:
    namespace = arguments.namespace or kubeconfig.current_namespace(arguments.kubeconfig)
    findings = asyncio.run(_examine(arguments, namespace))
    return print_findings(f"{namespace}/{arguments.name}", findings, as_json=arguments.json)


async def _examine(arguments: argparse.Namespace, namespace: str) -> list[Finding]:
    async with cluster.connect(arguments.kubeconfig) as kube:
        return await examine(kube, namespace, arguments.name, arguments.operator_namespace, time.time())


async def examine(kube: KubeClient, namespace: str, name: str, operator_namespace: str, now_s: float) -> list[Finding]:
    """Return the findings. now_s: seconds since the epoch. Raises ClusterQueryError if there is no such service."""
    service = await cluster.get_service(kube, namespace, name)
    unread: list[Finding] = []
    selector = f"{labels.SERVICE}={name}"
    workloads, pods, events, autoscalers, nodes = await asyncio.gather(
        asyncio.gather(*(read_all(kube, one, namespace, unread, selector) for one in _workload_kinds(service))),
        read_all(kube, PODS, namespace, unread, selector),
        read_all(kube, EVENTS, namespace, unread),
        read_all(kube, HORIZONTALPODAUTOSCALERS, namespace, unread),
        read_all(kube, NODES, None, unread),
    )
    pool = None
    with contextlib.suppress(ClusterError):  # most users have no such kind, and no right to read it
        pool = await kube.get(INFERENCEPOOLS, namespace, name)
    document = None
    try:
        leader = await cluster.find_leader(kube, operator_namespace)
        document = (await cluster.get_documents(kube, leader, operator_namespace, [(namespace, name)])).get(
            (namespace, name)
        )
    except PlimsollError as error:
        unread.append(Finding(UNCHECKED, "operator", str(error)))
    found = [one for listed in workloads for one in listed or ()]
    patient = Patient(service, found, pods, events, autoscalers, nodes, pool, document)
    return [*diagnose(patient, operator_namespace, now_s), *unread]


def _workload_kinds(service: KubeObject) -> Sequence[Resource]:
    """The kinds of a service's workloads; LeaderWorkerSets, which most users may not read, only if it has some."""
    tiers = get_mapping(service, "spec", "tiers").values()
    return tier_workload.TIER_WORKLOADS if any((get_int(tier, "nodes") or 1) > 1 for tier in tiers) else (DEPLOYMENTS,)


def diagnose(patient: Patient, operator_namespace: str, now_s: float) -> list[Finding]:
    """Return the problems of a service, from its objects."""
    return [
        *_unprocessed_spec(patient, operator_namespace),
        *_conditions(patient),
        *_pods(patient),
        *_placement(patient),
        *foreign_writers(patient.service, patient.workloads, patient.autoscalers or ()),
        *_bypassed_gateways(patient),
        *_skipped_prefill(patient),
        *_unused_pool(patient),
        *_warnings(patient, now_s),
    ]


def _unprocessed_spec(patient: Patient, operator_namespace: str) -> Iterable[Finding]:
    remedy = _OPERATOR_LOGS.format(operator_namespace)
    generation = get_int(patient.service, "metadata", "generation")
    observed = get_int(patient.service, "status", "observedGeneration")
    if get_text(patient.service, "metadata", "deletionTimestamp"):
        yield Finding(NOTE, "service", "it is being deleted")
    elif observed is None:
        yield Finding(PROBLEM, "operator", "no operator has written a status yet", remedy)
    elif generation is not None and observed < generation:
        message = f"the status is of generation {observed}, the spec of {generation}: the operator is behind"
        yield Finding(PROBLEM, "operator", message, remedy)


def _conditions(patient: Patient) -> Iterable[Finding]:
    """Conditions that are not as they should be. Those that every start has are no problem while it lasts."""
    listed = get_list(patient.service, "status", "conditions")
    is_starting = any(get_text(one, "type") == "Ready" and get_text(one, "reason") == "Starting" for one in listed)
    causes: set[str] = set()
    for one in listed:
        kind, status = get_text(one, "type") or "", get_text(one, "status")
        message = f"{get_text(one, 'reason')}: {get_text(one, 'message')}"
        if (kind in ABNORMAL_TRUE and status == "True") or (kind not in ABNORMAL_TRUE and status == "False"):
            if message in causes:  # Ready and the condition of a tier tell of one problem
                continue
            causes.add(message)
            reason = get_text(one, "reason")
            is_note = kind == "Reconciling" or reason in _CHOSEN_REASONS
            is_note = is_note or (is_starting and reason in _START_REASONS)
            yield Finding(NOTE if is_note else PROBLEM, kind, message, _pod_remedy(one, patient))
        elif status == "Unknown":
            yield Finding(NOTE, kind, message)


def _pod_remedy(condition: KubeObject, patient: Patient) -> str:
    """The command that shows the pod whose problem a condition quotes; empty if it quotes none."""
    for pod in patient.pods or ():
        problem = pod_diagnosis.pod_problem(pod)
        if problem is not None and _tells(condition, pod, problem):
            return _describe_command(pod)
    return ""


def _describe_command(pod: KubeObject) -> str:
    return f"kubectl -n {get_text(pod, 'metadata', 'namespace')} describe pod {get_text(pod, 'metadata', 'name')}"


def _cause(pod: KubeObject, problem: pod_diagnosis.PodProblem) -> str:
    """What pods with the same problem share: the image that cannot be pulled, else what is said after the pod's name.

    The kubelet says in turns why a pull has failed, and that it waits before the next one.
    """
    image = _IMAGE.search(problem.message)
    return image.group() if image else problem.message.partition(get_text(pod, "metadata", "name") or "")[2]


def _tells(condition: KubeObject, pod: KubeObject, problem: pod_diagnosis.PodProblem) -> bool:
    """Whether a condition is about the problem of a pod, or the same one of another pod."""
    is_same_reason = get_text(condition, "reason") == problem.reason
    return is_same_reason and _cause(pod, problem) in (get_text(condition, "message") or "")


def _pods(patient: Patient) -> Iterable[Finding]:
    """Pods with a problem that no condition and no pod before them has, and tiers whose pods do not exist."""
    if patient.pods is None:
        return
    found = []
    conditions, causes = get_list(patient.service, "status", "conditions"), set[tuple[str, str]]()
    for pod in patient.pods:
        problem = pod_diagnosis.pod_problem(pod)
        restarts = sum(get_int(one, "restartCount") or 0 for one in get_list(pod, "status", "containerStatuses"))
        name = f"pod {get_text(pod, 'metadata', 'name')}"
        if problem is not None:
            cause = problem.reason, _cause(pod, problem)
            if cause not in causes and not any(_tells(one, pod, problem) for one in conditions):
                causes.add(cause)
                found.append(Finding(PROBLEM, name, f"{problem.reason}: {problem.message}", _describe_command(pod)))
        elif restarts:
            times = "once" if restarts == 1 else f"{restarts} times"
            found.append(Finding(NOTE, name, f"its containers have restarted {times}"))
    yield from _some(found)
    for workload in patient.workloads:
        role, desired = _role(workload), get_int(workload, "spec", "replicas") or 0
        pods = [pod for pod in patient.pods if _role(pod) == role]
        unselected = tier_workload.unselected_replicas(tier_workload.counted_replicas(workload), pods)
        if unselected:
            if ConditionReason.LABELS_MATCH_NOTHING not in _reasons(patient):  # else the condition says it
                message = (
                    f"{tier_workload.label(workload)} has {unselected} in status.replicas, and no pod has its labels"
                )
                yield Finding(PROBLEM, f"tier {role}", message, "kubectl get pods --show-labels: look for a webhook")
        elif desired and not pods:
            remedy = f"see the Events of {tier_workload.label(workload)} for a quota or a webhook"
            yield Finding(PROBLEM, f"tier {role}", f"{desired} replicas are desired, and no pod has its labels", remedy)


def _placement(patient: Patient) -> Iterable[Finding]:
    """Tiers whose pods fit no node."""
    for workload in patient.workloads if patient.nodes is not None else ():
        role = _role(workload)
        pods = TierPods(f"tier {role}", f"spec.tiers.{role}", tier_workload.pod_template(workload))
        yield from placement(pods, patient.nodes or ())


def _bypassed_gateways(patient: Patient) -> Iterable[Finding]:
    """Requests in engines that no gateway has sent. Those of targets need none. Later a condition says it."""
    if get_mapping(patient.service, "spec", "targets") or ConditionReason.GATEWAYS_BYPASSED in _reasons(patient):
        return
    metrics = get_mapping(patient.document, "metrics")
    rate, in_flight = (get_number(metrics, "gateways", name) for name in ("rate_per_s", "in_flight"))
    running = sum(get_number(tier, "running") or 0.0 for tier in get_mapping(metrics, "tiers").values())
    if running and not rate and not in_flight:
        message = f"engines run {format_figure(running)} requests, and no gateway has sent one: demand is not seen"
        remedy = f"send requests to status.url ({get_text(patient.service, 'status', 'url') or 'unknown'})"
        yield Finding(PROBLEM, "traffic", message, remedy)


def _skipped_prefill(patient: Patient) -> Iterable[Finding]:
    """Requests of a pair that its router, or a client, has sent to decode engines alone."""
    if figures := skipped_prefill(get_mapping(patient.document, "metrics", "gateways")):
        message = f"{figures}: they size decode, and TTFT lacks them"
        remedy = "if the router should not do so, check that it reaches ready prefill engines, and who bypasses it"
        yield Finding(NOTE, "traffic", message, remedy)


def _unused_pool(patient: Patient) -> Iterable[Finding]:
    """An InferencePool that no gateway uses: its list of parents is empty."""
    if patient.pool is not None and not get_list(patient.pool, "status", "parents"):
        message = "no gateway uses the InferencePool: no HTTPRoute that a gateway accepts names it"
        remedy = f"kubectl get httproutes -A, and name InferencePool {patient.name} in backendRefs"
        yield Finding(NOTE, f"inferencepool {patient.name}", message, remedy)


def _warnings(patient: Patient, now_s: float) -> Iterable[Finding]:
    """The newest Warnings of the last hour about the service, its workloads and its pods."""
    names = {patient.name}
    names |= {get_text(one, "metadata", "name") or "" for one in (*patient.workloads, *(patient.pods or ()))}
    recent = []
    for event in patient.events or ():
        times = (get_text(event, *path) for path in _EVENT_TIMES)
        at_s = max(filter(None, map(epoch_s, times)), default=0.0)
        is_about = get_text(event, "involvedObject", "name") in names
        if is_about and get_text(event, "type") == "Warning" and now_s - at_s <= EVENT_AGE_S:
            recent.append((at_s, event))
    recent.sort(key=lambda one: one[0], reverse=True)
    for at_s, event in recent[:MAX_FINDINGS_PER_KIND]:
        age = format_age(max(0.0, now_s - at_s))
        subject = f"{get_text(event, 'involvedObject', 'kind')} {get_text(event, 'involvedObject', 'name')}"
        yield Finding(NOTE, subject, f"{age} ago, {get_text(event, 'reason')}: {get_text(event, 'message')}")


def _some(found: Sequence[Finding]) -> Iterable[Finding]:
    """The first findings of one kind, problems first, and the number of the others."""
    ordered = sorted(found, key=lambda one: one.level != PROBLEM)
    yield from ordered[:MAX_FINDINGS_PER_KIND]
    if len(ordered) > MAX_FINDINGS_PER_KIND:
        yield Finding(NOTE, "pods", f"{len(ordered) - MAX_FINDINGS_PER_KIND} more have restarted or have problems")


def _reasons(patient: Patient) -> set[str | None]:
    """The reasons of the service's conditions."""
    return {get_text(one, "reason") for one in get_list(patient.service, "status", "conditions")}


def _role(obj: KubeObject) -> str:
    return get_text(get_mapping(obj, "metadata", "labels"), labels.ROLE) or ""
