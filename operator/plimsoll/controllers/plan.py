"""Plan: from what was observed and decided to what must be written. Pure.

A tier's pod template is rendered once for each state of the user's spec and kept in a ControllerRevision; the plan
takes the kept one, so that a new operator, chart or default image restarts no engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.controllers.drift import replicas_owned_elsewhere
from plimsoll.controllers.observe import Observed
from plimsoll.resources import meta, objects
from plimsoll.resources.objects import KeptTemplate
from plimsoll.resources.platform import Platform

Object = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What a converged service has.

    keep: pod templates to create first; wish: objects to apply; spare: objects to delete; revisions: the
    ControllerRevision of each tier.
    """

    keep: tuple[Object, ...]
    wish: tuple[Object, ...]
    spare: tuple[Object, ...]
    revisions: dict[str, str]


def plan(seen: Observed, service: InferenceService, replicas: Mapping[str, int], platform: Platform) -> Plan:
    """The objects of one service. replicas: that each tier should have."""
    keep: list[Object] = []
    wish = objects.shared(service, seen.raw, platform)
    revisions: dict[str, str] = {}
    for kind, _ in service.spec.tiers.items():
        name = revisions[kind] = objects.revision_name(service, kind)
        kept = seen.revisions.get(name)
        if kept is None or not kept.get("data"):
            earlier = seen.revisions.get(objects.earlier_revision_name(service, kind), {})
            kept = objects.revision(service, seen.raw, kind, platform, earlier.get("data"))
            keep.append(kept)
        live = seen.children.get(("Deployment", meta.tier_name(service.metadata.name, kind)))
        wish += objects.tier(service, seen.raw, kind, KeptTemplate(name, kept["data"]), _replicas(live, replicas[kind]))
    wanted = {(obj["kind"], obj["metadata"]["name"]) for obj in wish}
    spare = tuple(child for name_, child in seen.children.items() if name_ not in wanted)
    return Plan(tuple(keep), tuple(wish), spare, revisions)


def _replicas(live: Object | None, desired: int) -> int | None:
    """What our apply says of replicas: the first one decides, later ones repeat, none once it has another owner.

    Changes go through the scale subresource alone; an apply that left the field out too early would remove it.
    """
    if live is None:
        return desired
    return None if replicas_owned_elsewhere(live) else int(live["spec"].get("replicas", 1))
