"""What one tier lacks, from its workload and pods, and its condition. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from plimsoll.api.conditions import TIER_DEGRADED_TYPES, Condition, ConditionReason
from plimsoll.api.events import MAX_EVENT_MESSAGE_CHARS
from plimsoll.api.message_text import MAX_QUOTE_CHARS, join_within, shorten
from plimsoll.controllers import pod_startup, tier_workload
from plimsoll.controllers.reconcile import pod_diagnosis
from plimsoll.controllers.replicas_owner import replicas_set_by

Object = dict[str, Any]

UNSTARTABLE: Final = frozenset({ConditionReason.IMAGE_UNAVAILABLE, ConditionReason.CONFIG_ERROR})


@dataclass(frozen=True)
class TierStatusInputs:
    """One observed tier. desired: replicas that the autoscaler wants. workload: None before it is created.

    workers: the pods of engines with several nodes, except their leaders. workload_problem: why the workload cannot be
    applied, None if it can. is_namespace_terminating: whether pods are missing because the namespace is being deleted.
    Kubernetes does not say so at the workload. volume_problem: why a pod waits for a volume, which only its Events say.
    earlier: pods that a deleted service of this name has left, and that have not ended.
    """

    role: str
    desired: int
    workload: Object | None
    pods: tuple[Object, ...]
    workers: tuple[Object, ...] = ()
    workload_problem: pod_diagnosis.PodProblem | None = None
    is_namespace_terminating: bool = False
    volume_problem: pod_diagnosis.PodProblem | None = None
    earlier: int = 0

    @property
    def pending(self) -> int:
        """Desired replicas without a pod."""
        return max(0, self.desired - self.ready - self.starting - self.silent)

    @property
    def silent(self) -> int:
        """Pods whose node does not report."""
        return sum(not pod_startup.has_ended(pod) and pod_startup.silent_node(pod) is not None for pod in self.pods)

    @property
    def current_pods(self) -> tuple[Object, ...]:
        """The pods of the workload's present template."""
        return pod_diagnosis.current_pods(self.workload, self.pods)

    @property
    def ready(self) -> int:
        """Ready pods that are not being deleted. Counted here, because the workload's own count follows later."""
        return _ready(self.pods)

    @property
    def ready_current(self) -> int:
        """Ready pods of the workload's present template."""
        return _ready(self.current_pods)

    @property
    def terminating(self) -> int:
        """Pods that are being deleted and still run."""
        return sum(pod_startup.is_terminating(pod) and not pod_startup.has_ended(pod) for pod in self.pods)

    @property
    def starting(self) -> int:
        """Pods that are neither ready nor being deleted, without those that failed or whose node does not report."""
        return _starting(self.pods)

    @property
    def cannot_start(self) -> bool:
        """Whether a pod of the tier waits for something that only a person mends."""
        problem = _problem(self)
        return problem is not None and problem.reason in UNSTARTABLE

    @property
    def starting_current(self) -> int:
        """Starting pods of the workload's present template."""
        return _starting(self.current_pods)


@dataclass(frozen=True)
class TierHealth:
    """Whether a tier has its replicas, and what it lacks.

    is_ready: every desired replica is ready. is_settled: it is also rolled out, and nothing about it changes. problem:
    why it is degraded, None if it is not. message: empty for a settled tier without a problem. event_message: the
    message of the Event about the problem.
    """

    role: str
    is_ready: bool
    is_settled: bool
    problem: ConditionReason | None = None
    message: str = ""
    event_message: str = ""

    @property
    def degraded(self) -> Condition | None:
        """The condition of a tier with a problem."""
        if self.problem is None:
            return None
        return Condition(TIER_DEGRADED_TYPES[self.role], True, self.problem, self.message, self.event_message)


def tier_health(tier: TierStatusInputs, slow_transfer_message: str | None) -> TierHealth:
    """The state of a tier, with the most severe problem of its pods.

    slow_transfer_message: why remote prefill does not pay; None if it pays or is unknown.
    """
    ready, total, ready_current = tier.ready, tier.desired, tier.ready_current
    count = f"{ready} of {total} ready" if ready <= total else f"{ready} ready, {total} desired"
    is_ready = ready >= total
    if is_ready and _is_rolled_out(tier):
        if total and slow_transfer_message is not None:
            message = f"{count}, but {slow_transfer_message}"
            return TierHealth(tier.role, True, True, ConditionReason.TRANSFER_SLOW, message)
        return TierHealth(tier.role, True, True)
    is_rolling = tier.workload is not None and ready > ready_current
    if is_rolling:
        count += f", {ready_current} at the new revision"
    # Pods that are rejected do not exist, so the newest pods may be of the old template.
    is_lacking = ready_current < total or tier.workload_problem is not None
    problem = _problem(tier) if is_lacking else pod_diagnosis.most_severe(tier.workload, ())
    if problem is not None:
        message = f"{count}: {problem.message}"
        if problem.reason is ConditionReason.UNSCHEDULABLE and is_ready:
            message += f"; spec.tiers.{tier.role}.rollout.maxSurge starts this pod before an old one stops"
        brief = join_within(
            MAX_EVENT_MESSAGE_CHARS,
            f"{tier.role} {count}: {shorten(problem.message, MAX_QUOTE_CHARS)}",
            f"see {TIER_DEGRADED_TYPES[tier.role]}",
        )
        return TierHealth(tier.role, is_ready, False, problem.reason, message, brief)
    if (paused := _paused_rollout(tier)) is not None:
        message = f"{count}; {paused}"
    elif is_rolling:
        message = count
    elif not is_ready:
        message = f"{count}: {_missing(tier)}{_other_order(tier)}"
    elif max(ready + tier.starting, tier_workload.counted_replicas(tier.workload)) > total:
        message = f"{count}: the surplus is removed"
    else:
        message = f"{count}, Kubernetes has not acted on the newest change yet"
    return TierHealth(tier.role, is_ready, False, None, message)


def _problem(tier: TierStatusInputs) -> pod_diagnosis.PodProblem | None:
    if tier.is_namespace_terminating and tier.pending:
        return pod_diagnosis.NAMESPACE_DELETED
    if tier.workload_problem is not None:
        return tier.workload_problem
    workers = pod_diagnosis.current_pods(tier.workload, tier.workers)
    return pod_diagnosis.most_severe(tier.workload, (*tier.current_pods, *workers)) or tier.volume_problem


def _ready(pods: Iterable[Object]) -> int:
    return sum(pod_startup.is_ready(pod) and not pod_startup.is_terminating(pod) for pod in pods)


def _starting(pods: Iterable[Object]) -> int:
    return sum(_is_starting(pod) for pod in pods)


def _is_starting(pod: Object) -> bool:
    is_known = not pod_startup.is_terminating(pod) and pod_startup.silent_node(pod) is None
    return is_known and not pod_startup.is_ready(pod)


def _missing(tier: TierStatusInputs) -> str:
    """What the replicas that are not ready wait for."""
    starting = tier.starting_current
    pending = tier.desired - tier.ready - starting - tier.silent
    counts = {
        "starting": starting,
        "on nodes that do not report": tier.silent,
        "not created yet": pending,
        "terminating": tier.terminating,
        "of a deleted service of this name": tier.earlier,
    }
    return ", ".join(f"{count} {state}" for state, count in counts.items() if count > 0)


def _other_order(tier: TierStatusInputs) -> str:
    """Who has ordered fewer replicas than are desired, as the end of a sentence; empty if no other client has."""
    other = None if tier.workload is None else replicas_set_by(tier.workload)
    ordered = tier.desired if tier.workload is None else tier_workload.ordered_replicas(tier.workload)
    if other is None or ordered >= tier.desired:
        return ""
    return f"; {other} set the replica count to {ordered}, and Plimsoll sets it to {tier.desired}"


def _is_rolled_out(tier: TierStatusInputs) -> bool:
    """True if the workload has observed its newest spec and runs exactly the desired pods of it."""
    workload = tier.workload
    return workload is not None and tier_workload.runs_exactly(workload, tier.pods, tier.desired)


def _paused_rollout(tier: TierStatusInputs) -> str | None:
    """That someone has paused the rollout of a Deployment with pods to replace; None if it is not so."""
    workload = tier.workload
    if workload is None or tier_workload.paused((workload,)) is None:
        return None
    if tier_workload.updated_replicas(workload) >= tier_workload.counted_replicas(workload):
        return None
    namespace, name = (workload["metadata"][field] for field in ("namespace", "name"))
    remedy = f"resume it with kubectl -n {namespace} rollout resume deployment {name}"
    return f"the rollout of Deployment {name} is paused: {remedy}"


def is_fully_rolled_out(tier: TierStatusInputs) -> bool:
    """True if no pod of an older revision is left, so that its stored template can be deleted."""
    return _is_rolled_out(tier) and tier.ready >= tier.desired
