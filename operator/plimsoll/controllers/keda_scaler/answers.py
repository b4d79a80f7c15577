"""What the KEDA scaler answers for a trigger: a recommended count, or an error that names the next action. Pure.

Without a count KEDA must get an error and not 0, so that the `fallback` of its ScaledObject applies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final

from plimsoll.api.recommendation import Recommendation
from plimsoll.controllers.object_cache import Key
from plimsoll.core.autoscaling.scaling_policy import ScalingMode

METRIC_NAME: Final = "plimsoll-recommended-replicas"
TARGET: Final = 1  # average per replica, so that the HPA's count is the metric's value
SHOWN_CHARACTERS: Final = 80  # of a text from the trigger

Lookup = Callable[[Key], Recommendation | None]


class ErrorKind(StrEnum):
    """Names of gRPC status codes."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"  # the trigger must change
    NOT_FOUND = "NOT_FOUND"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"  # the service must change
    UNAVAILABLE = "UNAVAILABLE"  # a later try may succeed


class ScalerError(Exception):
    """There is no count for a trigger; the message is for the ScaledObject's status and Events."""

    def __init__(self, kind: ErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def service_key(namespace: str, metadata: Mapping[str, str]) -> Key:
    """Namespace and name of the service of a trigger. namespace: of the ScaledObject. Raises ScalerError."""
    name = metadata.get("service", "")
    if not name:
        raise ScalerError(ErrorKind.INVALID_ARGUMENT, "the trigger's metadata needs service: name an InferenceService")
    return metadata.get("namespace") or namespace, name


def replicas(lookup: Lookup, namespace: str, metadata: Mapping[str, str]) -> int:
    """The recommended replica count for a trigger. namespace: of the ScaledObject. Raises ScalerError."""
    key = service_key(namespace, metadata)
    subject = f"InferenceService {_shown('/'.join(key))}"
    found = lookup(key)
    if found is None:
        raise ScalerError(ErrorKind.NOT_FOUND, f"the operator does not scale {subject}: correct service and namespace")
    if found.stale:
        text = f"no recent recommendation for {subject}: {found.stale_reason}; see the operator's log"
        raise ScalerError(ErrorKind.UNAVAILABLE, text)
    tier = _tier(found, metadata.get("tier", ""), subject)
    count = found.tiers[tier].recommended_replicas
    if count is None:
        remedy = (
            "set spec.scaling.mode to Recommend" if found.mode is ScalingMode.OFF else "set spec.slo, which sizes it"
        )
        raise ScalerError(ErrorKind.FAILED_PRECONDITION, f"{subject} has no recommendation for tier {tier}: {remedy}")
    return count


def _tier(found: Recommendation, name: str, subject: str) -> str:
    names = ", ".join(found.tiers)
    if not name and len(found.tiers) == 1:
        return next(iter(found.tiers))
    if not name:
        raise ScalerError(ErrorKind.INVALID_ARGUMENT, f"{subject} has several tiers: set tier to one of {names}")
    if name not in found.tiers:
        raise ScalerError(ErrorKind.NOT_FOUND, f"{subject} has no tier {_shown(name)}: set tier to one of {names}")
    return name


def _shown(text: str) -> str:
    printable = "".join(character if character.isprintable() else "?" for character in text)
    return printable if len(printable) <= SHOWN_CHARACTERS else f"{printable[:SHOWN_CHARACTERS]}..."
