"""The scaling tick: one pass over all services, deciding each tier's replicas and setting what differs.

Only `spec.replicas` is written here, through the scale subresource and under the scaler's own field manager, so that
it never meets the rest of the Deployment, and so that another scaler could own that one field instead.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from plimsoll.adapters.kube import Kube
from plimsoll.api import labels
from plimsoll.api.events import Event, EventReason
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers.store import Store, key_of
from plimsoll.core.errors import ClusterError, InvalidSpec, NotFound
from plimsoll.core.scaling import Observation, Policy, TierDecision, TierPolicy, decide
from plimsoll.resources import meta
from plimsoll.telemetry import metrics

Object = dict[str, Any]

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0


def decisions(service: InferenceService) -> dict[str, TierDecision]:
    """What the core decides for a service, from its spec's bounds alone: without signals, time plays no part."""
    bounds: dict[str, TierPolicy] = {kind: TierPolicy(*tier.bounds) for kind, tier in service.spec.tiers.items()}
    return dict(decide(Observation(), Policy(bounds), 0.0).tiers)


@dataclass(frozen=True)
class Change:
    """One tier whose Deployment has other replicas than decided."""

    raw: Object
    deployment: Object
    tier: str
    before: int
    decision: TierDecision

    def event(self) -> Event:
        after, generation = self.decision.replicas, self.deployment["metadata"].get("generation")
        reason = EventReason.SCALED_UP if after > self.before else EventReason.SCALED_DOWN
        message = f"{self.tier} {self.before} -> {after}: {self.decision.why}"
        return Event(reason, message, f"{self.tier}/{self.before}/{after}/{generation}")


def changes(store: Store) -> list[Change]:
    """Every tier that must be scaled. Pure: reads the cache alone."""
    due = []
    for raw in store.all(labels.KIND):
        if raw["metadata"].get("deletionTimestamp"):
            continue
        service = store.typed(raw)
        if isinstance(service, InvalidSpec):
            continue
        namespace, _ = key_of(raw)
        for tier, decision in decisions(service).items():
            live = store.get("Deployment", (namespace, meta.tier_name(service.metadata.name, tier)))
            if live is None or meta.owner_uid(live) != raw["metadata"]["uid"]:
                continue
            before = live["spec"].get("replicas", 1)
            if before != decision.replicas:
                due.append(Change(raw, live, tier, before, decision))
    return due


async def tick(store: Store, kube: Kube, tell: Callable[[Object, Event], Awaitable[None]]) -> None:
    """Set what differs; a tier that cannot be set is tried again at the next tick."""
    for change in changes(store):
        target = change.deployment["metadata"]
        try:
            await kube.scale(target["namespace"], target["name"], change.decision.replicas, labels.SCALER)
        except NotFound:
            continue
        except ClusterError as error:
            log.warning("could not scale", extra={"deployment": target["name"], "error": str(error)})
            continue
        direction = "up" if change.decision.replicas > change.before else "down"
        metrics.OPERATOR_SCALED.labels(change.tier, direction).inc()
        await tell(change.raw, change.event())
