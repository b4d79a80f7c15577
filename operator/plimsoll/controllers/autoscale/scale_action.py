"""The last step of a decision: the replica count of a tier's Deployment, and the Event about it.

Only `spec.replicas` is written, through the scale subresource and with a field manager of its own. The write cannot
conflict with the rest of the Deployment, and another autoscaler can own that field instead.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from plimsoll.adapters.kube_client import KubeClient
from plimsoll.api import labels
from plimsoll.api.events import MAX_EVENT_MESSAGE_CHARS, Event, EventReason
from plimsoll.api.message_text import join_within
from plimsoll.controllers.autoscale import pod_deletion_cost
from plimsoll.controllers.autoscale.service_snapshot import tier_of
from plimsoll.controllers.autoscale.signal_sources import SignalSources
from plimsoll.controllers.object_cache import ObjectCache, key_of
from plimsoll.core.autoscaling.scale_down_candidates import replica_load
from plimsoll.core.autoscaling.scaling_decision import TierDecision
from plimsoll.core.errors import ClusterError, NotFound
from plimsoll.telemetry import metrics
from plimsoll.telemetry.service_log import ServiceLog

Object = dict[str, Any]
RecordEvent = Callable[[Object, Event], Awaitable[None]]

log = ServiceLog(__name__)


@dataclass(frozen=True)
class ScaleChange:
    """A tier whose Deployment has another replica count than decided."""

    service_object: Object
    deployment: Object
    tier: str
    replicas_before: int
    decision: TierDecision

    def event(self, deletion_note: str = "") -> Event:
        """The Event of the change. Clauses that do not fit are left out; `kubectl plimsoll explain` has all of them.

        deletion_note: which pods are deleted; may be empty.
        """
        after, generation = self.decision.replicas, self.deployment["metadata"].get("generation")
        reason = EventReason.SCALED_UP if after > self.replicas_before else EventReason.SCALED_DOWN
        if not (after and self.replicas_before) and self.decision.override is None:
            reason = EventReason.SCALED_FROM_ZERO if after else EventReason.SCALED_TO_ZERO
        first, *others = self.decision.brief_reasons
        head = f"{self.tier} {self.replicas_before} -> {after}: {first}"
        advice = ""
        if self.decision.override is not None:
            advice = f"to keep a count, set spec.tiers.{self.tier}.minReplicas and maxReplicas, not the Deployment"
        clauses = (advice, *others, deletion_note, self.decision.counterfactual or "")
        message = join_within(MAX_EVENT_MESSAGE_CHARS, head, *clauses)
        return Event(reason, message, f"{self.tier}/{self.replicas_before}/{after}/{generation}")


class ScaleWriter:
    """Applies changes of replica counts."""

    def __init__(self, kube: KubeClient, cache: ObjectCache, sources: SignalSources, record_event: RecordEvent) -> None:
        self._kube = kube
        self._cache = cache
        self._sources = sources
        self._record_event = record_event

    async def apply(self, change: ScaleChange) -> None:
        """Set the replica count of a tier. A failure is logged; the next tick retries."""
        key, deployment_meta = key_of(change.service_object), change.deployment["metadata"]

        deletion_note = (
            await self._annotate_deletion_costs(change) if change.decision.replicas < change.replicas_before else ""
        )
        try:
            await self._kube.scale(
                deployment_meta["namespace"],
                deployment_meta["name"],
                change.decision.replicas,
                labels.SCALER_FIELD_MANAGER,
            )
        except NotFound:
            return
        except ClusterError as error:
            message = "cannot set the Deployment's replicas; retrying at the next tick"
            log.warning(key, message, deployment=deployment_meta["name"], error=str(error))
            return
        direction = "up" if change.decision.replicas > change.replicas_before else "down"
        metrics.OPERATOR_SCALE_CHANGES.labels(change.tier, direction).inc()
        try:
            await self._record_event(change.service_object, change.event(deletion_note))
        except ClusterError as error:
            message = "Deployment scaled, but its Event cannot be written"
            log.warning(key, message, deployment=deployment_meta["name"], error=str(error))

    async def _annotate_deletion_costs(self, change: ScaleChange) -> str:
        """Annotate the pods to delete; returns the note for the Event. On failure Kubernetes selects the pods."""
        key, replicas = key_of(change.service_object), change.decision.replicas
        service = "/".join(key)
        readings = [one.services[service] for one in self._sources.gateways()[0] if service in one.services]
        selection = pod_deletion_cost.select_pods(
            (p for p in self._cache.children("Pod", key) if tier_of(p) == change.tier),
            replicas,
            lambda pod: replica_load(readings, pod, self._sources.running_requests(key[0], pod)),
        )
        try:
            await pod_deletion_cost.annotate(self._kube, self._cache, selection)
        except (ClusterError, TimeoutError) as error:
            log.warning(key, "cannot set pod-deletion-cost; Kubernetes selects the pods to delete", error=str(error))
            return "Kubernetes selects the pods to delete, because pod-deletion-cost could not be set"
        return selection.summary
