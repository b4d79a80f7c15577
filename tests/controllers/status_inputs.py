"""Inputs of a service's status, and its conditions by type."""

from __future__ import annotations

from typing import Any

from plimsoll.api.conditions import (
    Condition,
    ConditionType,
)
from plimsoll.controllers.reconcile.model_names import ModelNames
from plimsoll.controllers.reconcile.service_status import StatusInputs
from plimsoll.controllers.reconcile.tier_health import TierStatusInputs
from tests import builders

PARENT = builders.service()


def tier(kind: str, *, ready: int = 1, desired: int = 1, pods: tuple[Any, ...] = (), **found: Any) -> TierStatusInputs:
    made = builders.deployment(PARENT, kind, replicas=desired, ready=ready, status=found)
    conditions = [{"type": "Ready", "status": "True"}]
    serving = tuple(builders.pod(PARENT, kind, f"{kind}-{n}", conditions=conditions) for n in range(ready))
    return TierStatusInputs(kind, desired, made, (*serving, *pods))


def status_inputs(*tiers: TierStatusInputs, **other: Any) -> StatusInputs:
    facts: dict[str, Any] = {
        "routable_endpoints": 1,
        "gateway_replicas": 1,
        "model_names": ModelNames(("chat", "team/chat")),
        "url": "http://g/v1",
        "service_object": PARENT,
    }
    return StatusInputs(tiers=tiers or (tier("prefill"), tier("decode")), **(facts | other))


def by_type(found: tuple[Condition, ...]) -> dict[ConditionType, Condition]:
    return {condition.type: condition for condition in found}
