"""What the operator says about a service: conditions, where it is reached, and the tiers' counts.

Read tolerantly: a status may have been written by another version of the operator.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from plimsoll.api.v1alpha1.base import Keyed, Model
from plimsoll.api.v1alpha1.tiers import Role


class ConditionStatus(Model):
    """A statement about the service, as metav1.Condition."""

    model_config = ConfigDict(extra="ignore")

    type: str = Field(max_length=316, description="What the statement is about.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it holds.")
    reason: str = Field(min_length=1, max_length=1024, description="Why, as one word of a closed list.")
    message: str = Field(max_length=32768, description="Why, in words.")
    last_transition_time: str = Field(
        json_schema_extra={"format": "date-time"}, description="When the status last changed."
    )
    observed_generation: int | None = Field(
        default=None, ge=0, json_schema_extra={"format": "int64"}, description="Generation of the spec that was judged."
    )


class TierStatus(Model):
    """Counts of one tier's engines."""

    model_config = ConfigDict(extra="ignore")

    replicas: int = Field(default=0, ge=0, json_schema_extra={"format": "int32"}, description="Pods that exist.")
    ready: int = Field(default=0, ge=0, json_schema_extra={"format": "int32"}, description="Pods that are ready.")
    desired: int = Field(default=0, ge=0, json_schema_extra={"format": "int32"}, description="Pods that are wanted.")
    summary: str = Field(default="", max_length=32, description="ready/desired.")
    revision: str = Field(default="", max_length=63, description="Revision that new pods get.")
    selector: str = Field(default="", max_length=1024, description="Label selector of the tier's pods.")


class TiersStatus(Model):
    """Counts of each tier."""

    model_config = ConfigDict(extra="ignore")

    prefill: TierStatus | None = Field(default=None, description="The prefill tier.")
    decode: TierStatus | None = Field(default=None, description="The decode tier.")
    serve: TierStatus | None = Field(default=None, description="The aggregated tier.")

    def of(self, role: Role) -> TierStatus | None:
        """The tier of one role, if the status has it."""
        found: TierStatus | None = getattr(self, role)
        return found


class Status(Model):
    """What was last observed."""

    model_config = ConfigDict(extra="ignore")

    observed_generation: int | None = Field(
        default=None,
        ge=0,
        json_schema_extra={"format": "int64"},
        description="Generation of the spec that was last judged.",
    )
    url: str | None = Field(default=None, max_length=2048, description="Base URL for clients inside the cluster.")
    model_names: tuple[Annotated[str, Field(max_length=320)], ...] = Field(
        default=(),
        max_length=8,
        strict=False,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="Names that clients may send as `model`.",
    )
    conditions: Annotated[tuple[ConditionStatus, ...], Field(max_length=32, strict=False), Keyed(("type",))] = Field(
        default=(), description="Statements about the service."
    )
    tiers: TiersStatus | None = Field(default=None, description="Counts of each tier.")
