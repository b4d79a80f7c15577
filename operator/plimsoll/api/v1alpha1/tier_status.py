"""What was observed of one tier: its engines, what they can carry, and how long they take to start."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import ConfigDict, Field
from pydantic.config import JsonDict

from plimsoll.api.v1alpha1.base import Keyed, Model
from plimsoll.api.v1alpha1.tiers import Role

Number = Annotated[str, Field(max_length=32)]  # with its unit; a CRD has no floats
_COUNT: Final[JsonDict] = {"format": "int32"}


class Observed(Model):
    """Base of what the operator writes: another version's fields are passed over."""

    model_config = ConfigDict(extra="ignore")


class LatencyStatus(Observed):
    """What one replica is taken to do, as fitted from what engines measured."""

    base_seconds: Number | None = Field(
        default=None, description="Time of an engine step before any work: launch, and reading the weights; seconds."
    )
    work_seconds: Number | None = Field(
        default=None, description="GPU time that one request takes, as requests are now; seconds."
    )
    known: bool = Field(
        default=False, description="Whether measurements say so; until then it is what model and GPU suggest."
    )
    words: str = Field(default="", max_length=1024, description="The same in words, with how sure it is.")


class StartupStatus(Observed):
    """How long something takes, as learned."""

    p50: Number | None = Field(default=None, description="Half take at most so long, such as 41s.")
    p90: Number | None = Field(default=None, description="Nine in ten take at most so long, such as 63s.")


class PhaseStatus(StartupStatus):
    """One phase of a start."""

    name: str = Field(min_length=1, max_length=63, description="Name of the phase, such as pull or load.")


class ColdStartStatus(Observed):
    """Where the time of a start goes."""

    variant: str = Field(
        default="",
        max_length=1024,
        description="What these starts were of: model, image, GPUs, nodes asked for. Each has its own times.",
    )
    phases: Annotated[tuple[PhaseStatus, ...], Field(max_length=16, strict=False), Keyed()] = Field(
        default=(), description="The phases, in their order."
    )


class StartingStatus(Observed):
    """Pods on their way to ready."""

    count: int = Field(default=0, ge=0, json_schema_extra=_COUNT, description="Pods that are not ready yet.")
    overdue: int = Field(
        default=0,
        ge=0,
        json_schema_extra=_COUNT,
        description="Those of them that take longer than earlier starts explain; nothing counts on them.",
    )
    next_ready: str | None = Field(
        default=None,
        json_schema_extra={"format": "date-time"},
        description="When the first of them is likely to be ready, by what earlier starts took.",
    )


class TierStatus(Observed):
    """One tier's engines, and what they can carry."""

    replicas: int = Field(default=0, ge=0, json_schema_extra=_COUNT, description="Pods that exist.")
    ready: int = Field(default=0, ge=0, json_schema_extra=_COUNT, description="Pods that are ready.")
    desired: int = Field(default=0, ge=0, json_schema_extra=_COUNT, description="Pods that are wanted.")
    needed: Annotated[int, Field(ge=0, json_schema_extra=_COUNT)] | None = Field(
        default=None,
        description="Pods that the forecast load needs, before limits; absent: load or model are not known.",
    )
    summary: str = Field(default="", max_length=32, description="ready/desired.")
    revision: str = Field(default="", max_length=63, description="Revision that new pods get.")
    selector: str = Field(default="", max_length=1024, description="Label selector of the tier's pods.")
    utilisation: Number | None = Field(
        default=None,
        description="Present load as a share of what the ready pods carry within the promise, such as 71%.",
    )
    knee: Number | None = Field(
        default=None, description="Load that one pod carries within the promise, such as 9.1 req/s."
    )
    model: LatencyStatus | None = Field(default=None, description="What one replica is taken to do.")
    starting: StartingStatus | None = Field(default=None, description="Pods on their way; absent: none.")
    startup: StartupStatus | None = Field(default=None, description="How long a pod takes from its order to ready.")


class TiersStatus(Observed):
    """Each tier's engines."""

    prefill: TierStatus | None = Field(default=None, description="The prefill tier.")
    decode: TierStatus | None = Field(default=None, description="The decode tier.")
    serve: TierStatus | None = Field(default=None, description="The aggregated tier.")

    def of(self, role: Role) -> TierStatus | None:
        """The tier of one role, if the status has it."""
        found: TierStatus | None = getattr(self, role)
        return found


class ColdStartsStatus(Observed):
    """Where the time of a start goes, in each tier."""

    prefill: ColdStartStatus | None = Field(default=None, description="The prefill tier.")
    decode: ColdStartStatus | None = Field(default=None, description="The decode tier.")
    serve: ColdStartStatus | None = Field(default=None, description="The aggregated tier.")
