"""What the operator says about a service: conditions, where it is reached, its tiers, its promise, its decisions.

Read tolerantly: a status may have been written by another version of the operator.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from plimsoll.api.v1alpha1.base import Keyed
from plimsoll.api.v1alpha1.scaling_status import CostStatus, DecisionStatus, SloStatus
from plimsoll.api.v1alpha1.tier_status import ColdStartsStatus, Observed, TiersStatus

KEPT_DECISIONS: Final = 5


class ConditionStatus(Observed):
    """A statement about the service, as metav1.Condition."""

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


class FormerNameStatus(Observed):
    """A model name that the spec has no more, and that is still answered."""

    name: str = Field(max_length=320, description="The name.")
    until: str = Field(
        json_schema_extra={"format": "date-time"},
        description="It is answered until then, unless a service claims it before.",
    )


class Status(Observed):
    """What was last observed."""

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
        description="Names that clients may send as `model`, those in formerModelNames among them.",
    )
    former_model_names: tuple[FormerNameStatus, ...] = Field(
        default=(),
        max_length=6,
        strict=False,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="Names that the spec has no more, and that are still answered.",
    )
    conditions: Annotated[tuple[ConditionStatus, ...], Field(max_length=32, strict=False), Keyed(("type",))] = Field(
        default=(), description="Statements about the service."
    )
    tiers: TiersStatus | None = Field(default=None, description="Each tier's engines, and what they can carry.")
    slo: SloStatus | None = Field(default=None, description="The promise as clients saw it of late.")
    limited_by: str | None = Field(
        default=None,
        max_length=64,
        description="The tier nearest to its load line, and what breaks first there: TPOT, TTFT, e2e, itl, slots or "
        "KV.",
    )
    cold_start: ColdStartsStatus | None = Field(
        default=None, description="Where the time of a start goes, in each tier, as learned."
    )
    last_decision: DecisionStatus | None = Field(
        default=None, description="The last decision that changed, or would have changed, a tier's replicas."
    )
    decisions: tuple[DecisionStatus, ...] = Field(
        default=(),
        max_length=KEPT_DECISIONS,
        strict=False,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="The decisions before the last one, the newest first.",
    )
    cost: CostStatus | None = Field(default=None, description="What the service costs, where the spec has a price.")
    admission: dict[str, Any] | None = Field(
        default=None,
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
        description="The model by which gateways let requests in: not an interface.",
    )
    learned: dict[str, Any] | None = Field(
        default=None,
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
        description="The operator's own memory, so that a restart forgets nothing: not an interface, at most 64 KiB.",
    )
