"""What the operator has chosen for engines, in the status and in Events. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plimsoll.api.events import Event, EventReason
from plimsoll.api.message_text import shorten
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.api.v1alpha1.status import MAX_TUNING_CHARS
from plimsoll.controllers.object_cache import role_of
from plimsoll.core.types import Unavailable
from plimsoll.resources import engine_pod
from plimsoll.resources.engine_tuning import MeasuredChunk, StoredArgument, measured_chunk, stored_arguments
from plimsoll.resources.object_meta import tier_name
from plimsoll.resources.platform_config import PlatformConfig

Object = dict[str, Any]
Children = Mapping[tuple[str, str], Object]


def deployed_arguments(service: InferenceService, children: Children) -> dict[str, tuple[StoredArgument, ...]]:
    """The chosen arguments of each tier's Deployment."""
    deployments = {
        role: children.get(("Deployment", tier_name(service.metadata.name, role)))
        for role, _ in service.spec.tiers.items()
    }
    return {
        role: () if one is None else stored_arguments(one["spec"].get("template", {}))
        for role, one in deployments.items()
    }


def tuning_line(
    service: InferenceService, deployed: Mapping[str, Sequence[StoredArgument]], platform: PlatformConfig
) -> str | None:
    """`status.engineTuning`; None without a chosen argument.

    With `tuning: Auto` in the spec, it says why a tier has none.
    """
    texts = []
    for role, tier in service.spec.tiers.items():
        if deployed.get(role):
            texts.append(f"{role}: {', '.join(one.text for one in deployed[role])}")
        elif service.spec.engine.tuning == "Auto":
            chosen = engine_pod.tuned_arguments(service, role, tier, platform)
            if isinstance(chosen, Unavailable):
                texts.append(f"{role}: none, because {chosen.reason}")
    return shorten("; ".join(texts), MAX_TUNING_CHARS) if texts else None


def tuning_events(deployed: Mapping[str, Sequence[StoredArgument]], templates: Iterable[Object]) -> tuple[Event, ...]:
    """An Event for each new template whose chosen arguments differ from those of the tier's Deployment.

    templates: new ControllerRevisions.
    """
    found = []
    for revision in templates:
        role, chosen = role_of(revision), stored_arguments(revision["data"])
        before, after = ({(one.flag, one.value) for one in stored} for stored in (deployed.get(role, ()), chosen))
        if before != after:
            text = "new engines are not tuned"
            if chosen:
                arguments = ", ".join(one.text for one in chosen)
                text = f"new engines get {arguments}; explain says why, and spec.engine.tuning Off undoes it"
            found.append(Event(EventReason.ENGINE_TUNED, f"{role}: {text}", revision["metadata"]["name"]))
    return tuple(found)


def chunk_event(children: Children, desired: Iterable[Object], wanted: MeasuredChunk | None) -> Event | None:
    """The Event for a workload that gets the chunk that measurements ask for; None if none does.

    desired: the objects to apply. wanted: None for no change.
    """
    if wanted is None:
        return None
    for one in desired:
        live = children.get((one["kind"], one["metadata"]["name"]))
        if live is None or one["kind"] != "Deployment":
            continue
        if measured_chunk(live) != measured_chunk(one) == wanted.tokens:
            arguments = ", ".join(row.text for row in stored_arguments(one["spec"]["template"]))
            text = f"serve: new engines get {arguments or 'no chosen arguments'}: {wanted.reason}"
            return Event(EventReason.ENGINE_TUNED, text, f"{one['metadata']['name']} {wanted.at_s:.0f}")
    return None
