"""The last step of a decision: the replica count of a tier's workload or target, and the Event about it.

Only `spec.replicas` is written, through the scale subresource and with a field manager of its own. The write cannot
conflict with the rest of the workload, and another autoscaler can own that field instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from plimsoll.adapters.kube_client import DEPLOYMENTS, KubeClient
from plimsoll.api import labels
from plimsoll.api.events import MAX_EVENT_MESSAGE_CHARS, Event, EventReason
from plimsoll.api.message_text import join_within
from plimsoll.controllers.autoscale import pod_deletion_cost
from plimsoll.controllers.autoscale.service_snapshot import tier_of
from plimsoll.controllers.autoscale.signal_sources import SignalSources
from plimsoll.controllers.object_cache import Key, ObjectCache, key_of
from plimsoll.controllers.targets.target_state import ScaledObject
from plimsoll.core.autoscaling.scale_down_candidates import replica_load
from plimsoll.core.autoscaling.scaling_decision import TierDecision
from plimsoll.core.errors import ClusterError, NotFound
from plimsoll.telemetry import operator_metrics
from plimsoll.telemetry.service_log import ServiceLog

Object = dict[str, Any]
RecordEvent = Callable[[Object, Event], Awaitable[None]]
TierKey = tuple[Key, str]

MAX_WRITES: Final = 16  # at once; a slow API server delays the others, and no decision

log = ServiceLog(__name__)


@dataclass(frozen=True)
class ScaleChange:
    """A tier whose workload or target has another replica count than decided."""

    service_object: Object
    scaled: ScaledObject
    tier: str
    decision: TierDecision

    @property
    def replicas_before(self) -> int:
        return self.scaled.replicas

    @property
    def key(self) -> TierKey:
        return key_of(self.service_object), self.tier

    def event(self, deletion_note: str = "") -> Event:
        """The Event of the change. Clauses that do not fit are left out; `kubectl plimsoll explain` has all of them.

        deletion_note: which pods are deleted; may be empty.
        """
        after, generation = self.decision.replicas, self.scaled.metadata.get("generation")
        reason = EventReason.SCALED_UP if after > self.replicas_before else EventReason.SCALED_DOWN
        if not (after and self.replicas_before) and self.decision.override is None:
            reason = EventReason.SCALED_FROM_ZERO if after else EventReason.SCALED_TO_ZERO
        first, *others = self.decision.brief_reasons
        head = f"{self.tier} {self.replicas_before} -> {after}: {first}"
        advice = ""
        if self.decision.override is not None:
            fields = f"spec.tiers.{self.tier}.minReplicas and maxReplicas"
            advice = f"to keep a count, set {fields}, not the {self.scaled.resource.kind}"
        clauses = (advice, *others, deletion_note, self.decision.counterfactual or "")
        message = join_within(MAX_EVENT_MESSAGE_CHARS, head, *clauses)
        return Event(reason, message, f"{self.tier}/{self.replicas_before}/{after}/{generation}")


class ScaleWriter:
    """Applies changes of replica counts outside the ticks: one write at a time for a tier, `MAX_WRITES` in all."""

    def __init__(self, kube: KubeClient, cache: ObjectCache, sources: SignalSources, record_event: RecordEvent) -> None:
        self._kube = kube
        self._cache = cache
        self._sources = sources
        self._record_event = record_event
        self._due: dict[TierKey, ScaleChange] = {}  # decided last
        self._tasks: dict[TierKey, asyncio.Task[None]] = {}
        self._written: dict[TierKey, tuple[int, int]] = {}  # resourceVersion of the object before, and replicas
        self._slots = asyncio.Semaphore(MAX_WRITES)

    def submit(self, changes: list[ScaleChange], contain: Callable[[Key], AbstractContextManager[None]]) -> None:
        """Write these changes and no others. A write that has not begun is replaced or withdrawn.

        changes: all tiers whose replica count differs from the last decision. contain: contains an unexpected error to
        a service.
        """
        self._due = {change.key: change for change in changes}
        self._written = {key: written for key, written in self._written.items() if key in self._due}
        for key, change in self._due.items():
            is_written = self._written.get(key) == (change.scaled.resource_version, change.decision.replicas)
            if key not in self._tasks and not is_written:
                task = self._tasks[key] = asyncio.create_task(self._write(key, contain))
                task.add_done_callback(partial(self._forget, key))
        operator_metrics.OPERATOR_SCALE_WRITES_PENDING.set(len(self._tasks))

    async def finish(self) -> None:
        """Wait for the writes under way."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def cancel(self) -> None:
        """Cancel the writes under way, since this process no longer leads."""
        for task in self._tasks.values():
            task.cancel()

    def _forget(self, key: TierKey, task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        operator_metrics.OPERATOR_SCALE_WRITES_PENDING.set(len(self._tasks))

    async def _write(self, key: TierKey, contain: Callable[[Key], AbstractContextManager[None]]) -> None:
        async with self._slots:
            change = self._due.get(key)
            if change is not None:
                with contain(key[0]):
                    if await self._apply(change):
                        self._written[key] = change.scaled.resource_version, change.decision.replicas

    async def _apply(self, change: ScaleChange) -> bool:
        """Set the replica count of a tier; returns whether it is set. A failure is logged; the next tick retries."""
        key, scaled = key_of(change.service_object), change.scaled
        is_smaller = change.decision.replicas < change.replicas_before
        selects_pods = is_smaller and scaled.is_owned and scaled.resource == DEPLOYMENTS  # others delete in order
        deletion_note = await self._annotate_deletion_costs(change) if selects_pods else ""
        try:
            await self._kube.scale(
                scaled.resource,
                scaled.metadata["namespace"],
                scaled.metadata["name"],
                change.decision.replicas,
                labels.SCALER_FIELD_MANAGER,
            )
        except NotFound:
            return False
        except ClusterError as error:
            message = "cannot set the replica count; retrying at the next tick"
            log.warning(key, message, object=scaled.label, error=str(error))
            return False
        if not scaled.is_owned:
            self._sources.on_target_written(key, change.tier, str(scaled.metadata.get("uid", "")))
        direction = "up" if change.decision.replicas > change.replicas_before else "down"
        operator_metrics.OPERATOR_SCALE_CHANGES.labels(change.tier, direction).inc()
        try:
            await self._record_event(change.service_object, change.event(deletion_note))
        except ClusterError as error:
            message = "replica count set, but its Event cannot be written"
            log.warning(key, message, object=scaled.label, error=str(error))
        return True

    async def _annotate_deletion_costs(self, change: ScaleChange) -> str:
        """Annotate the pods to delete; returns the note for the Event. On failure Kubernetes selects the pods."""
        key, replicas = key_of(change.service_object), change.decision.replicas
        service = "/".join(key)
        readings = [one.services[service] for one in self._sources.gateways()[0] if service in one.services]
        selection = pod_deletion_cost.select_pods(
            (p for p in self._cache.tier_pods(key) if tier_of(p) == change.tier),
            replicas,
            lambda pod: replica_load(
                readings, pod, self._sources.running_requests(key[0], pod), self._sources.cached_tokens(key[0], pod)
            ),
        )
        try:
            await pod_deletion_cost.annotate(self._kube, self._cache, selection)
        except (ClusterError, TimeoutError) as error:
            log.warning(key, "cannot set pod-deletion-cost; Kubernetes selects the pods to delete", error=str(error))
            return "Kubernetes selects the pods to delete, because pod-deletion-cost could not be set"
        return selection.summary
