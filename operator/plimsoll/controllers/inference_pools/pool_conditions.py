"""The condition InferencePoolUnusable: what keeps gateways from using the pool of a service. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from plimsoll.api import labels
from plimsoll.api.conditions import Condition, ConditionReason, ConditionType
from plimsoll.api.events import MAX_EVENT_MESSAGE_CHARS
from plimsoll.api.message_text import shorten

Object = dict[str, Any]

_MAX_NAME_CHARS: Final = 80  # of names from elsewhere in an Event
_REFUSABLE: Final = ("Accepted", "ResolvedRefs")  # conditions of a parent that are False if it does not use the pool


def _unusable(reason: ConditionReason, message: str, event_message: str = "") -> Condition:
    return Condition(ConditionType.INFERENCE_POOL_UNUSABLE, True, reason, message, event_message)


KIND_MISSING: Final = _unusable(
    ConditionReason.POOL_KIND_MISSING,
    f"the cluster has no kind {labels.POOL_KIND} of {labels.POOL_API_VERSION}; install the CRDs of the Gateway API"
    " Inference Extension, or set gateway.endpointPicker.inferencePools to false",
)


def rejected(message: str) -> Condition:
    """For a request that the API server denies or does not answer."""
    return _unusable(ConditionReason.POOL_REJECTED, message, shorten(message, MAX_EVENT_MESSAGE_CHARS))


def taken(live: Object, found: Sequence[str]) -> Condition:
    """For a pool of somebody else. found: what must change."""
    name, owner = live["metadata"]["name"], shorten(_owner(live), _MAX_NAME_CHARS)
    problem = f"InferencePool {name} belongs to {owner}, and requests by it do not come to Plimsoll's picker"
    message = f"{problem}: {'; '.join(found)}. Change it so, or delete it and the operator creates its own"
    brief = f"InferencePool {name} belongs to {owner} and differs: change it as the condition says, or delete it"
    return _unusable(ConditionReason.POOL_TAKEN, message, brief)


def not_accepted(live: Object) -> Condition | None:
    """The condition while a gateway refuses the present pool."""
    generation = live["metadata"].get("generation", 0)
    for parent in (live.get("status") or {}).get("parents") or ():
        for one in parent.get("conditions") or ():
            is_present = one.get("observedGeneration", generation) >= generation
            if one.get("type") in _REFUSABLE and one.get("status") == "False" and is_present:
                return _refused(live["metadata"]["name"], parent.get("parentRef") or {}, one)
    return None


def _owner(live: Object) -> str:
    """Who a pool belongs to: its owners, else the field managers of its spec."""
    meta = live["metadata"]
    owners = [f"{one.get('kind')} {one.get('name')}" for one in meta.get("ownerReferences", ())]
    managers = [str(one.get("manager")) for one in meta.get("managedFields", ()) if not one.get("subresource")]
    return ", ".join(owners or [f"field manager {name}" for name in managers] or ["an unknown client"])


def _refused(pool: str, reference: Object, condition: Object) -> Condition:
    namespace = f"{reference['namespace']}/" if "namespace" in reference else ""
    gateway = shorten(f"{reference.get('kind', 'Gateway')} {namespace}{reference.get('name')}", _MAX_NAME_CHARS)
    cause = f"{condition.get('type')} is False for reason {condition.get('reason')}"
    message = f"{gateway} does not use InferencePool {pool}: {cause}: {condition.get('message')}"
    brief = f"{gateway} does not use InferencePool {shorten(pool, 63)}: {shorten(cause, _MAX_NAME_CHARS)}"
    return _unusable(ConditionReason.POOL_NOT_ACCEPTED, message, brief)
