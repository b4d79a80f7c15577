"""Status of an InferenceService: conditions, URL, tiers, SLO attainment, decisions and cost.

Another version of the operator may have written the status, so unknown fields are ignored.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from plimsoll.api.v1alpha1.api_model import MapList
from plimsoll.api.v1alpha1.scaling_status import CostStatus, SloStatus
from plimsoll.api.v1alpha1.tier_status import FormattedNumber, StatusModel, TiersStatus
from plimsoll.core.routing.model_names import MAX_ADAPTERS

MAX_NOT_LOADED_ON: Final = 16
MAX_TUNING_CHARS: Final = 256
MAX_REVISION_CHARS: Final = 256


class ConditionStatus(StatusModel):
    """A condition of the service, as metav1.Condition."""

    type: str = Field(max_length=316, description="Type of the condition.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether the condition holds.")
    reason: str = Field(min_length=1, max_length=1024, description="Reason for the status, from a closed list.")
    message: str = Field(max_length=32768, description="Explanation of the status.")
    last_transition_time: str = Field(
        json_schema_extra={"format": "date-time"}, description="Time of the last change of the status."
    )


class AdapterStatus(StatusModel):
    """One adapter. The operator writes it, and gateways read it."""

    name: str = Field(max_length=128, description="Name of the adapter.")
    since: str | None = Field(
        default=None,
        json_schema_extra={"format": "date-time"},
        description="Time since which the service holds the name. Absent: another service or adapter holds it.",
    )
    loaded: str | None = Field(
        default=None, max_length=24, description="Ready engines that have loaded the adapter, of all ready engines."
    )
    error: str | None = Field(
        default=None, max_length=512, description="Why an engine could not load the adapter, in the engine's words."
    )
    not_loaded_on: tuple[Annotated[str, Field(max_length=253)], ...] = Field(
        default=(),
        max_length=MAX_NOT_LOADED_ON,
        strict=False,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description=f"Ready pods without the adapter, at most {MAX_NOT_LOADED_ON}. Gateways prefer others.",
    )


class InferenceServiceStatus(StatusModel):
    """Observed state of the service."""

    observed_generation: int | None = Field(
        default=None,
        ge=0,
        json_schema_extra={"format": "int64"},
        description="Generation of the spec that the status and its conditions refer to.",
    )
    url: str | None = Field(default=None, max_length=2048, description="Base URL for clients inside the cluster.")
    model_names: tuple[Annotated[str, Field(max_length=320)], ...] = Field(
        default=(),
        max_length=8,
        strict=False,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="Names that clients may send as `model`, including those in formerNames.",
    )
    name_claim: str | None = Field(
        default=None,
        max_length=320,
        description="The model name that the service holds, and since when: `NAME since TIME`. Gateways read it. "
        "Absent: another service holds the name, it is not accepted, or it is NAMESPACE/NAME.",
    )
    former_names: tuple[Annotated[str, Field(max_length=384)], ...] = Field(
        default=(),
        max_length=6,
        strict=False,
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="Names that were removed from the spec and are still served, with the end of that: `NAME until "
        "TIME`, or earlier if another service claims the name.",
    )
    adapters: Annotated[tuple[AdapterStatus, ...], Field(max_length=MAX_ADAPTERS, strict=False), MapList()] = Field(
        default=(), description="LoRA adapters of the spec."
    )
    conditions: Annotated[tuple[ConditionStatus, ...], Field(max_length=32, strict=False), MapList(("type",))] = Field(
        default=(),
        description="Conditions of the service. All but Ready and SLOMet are present only while they are true.",
    )
    tiers: TiersStatus | None = Field(default=None, description="Engines and capacity of each tier.")
    engine_tuning: str | None = Field(
        default=None,
        max_length=MAX_TUNING_CHARS,
        description="Arguments that new engines of each tier get from spec.engine.tuning. Absent: none.",
    )
    model_revision: str | None = Field(
        default=None,
        max_length=MAX_REVISION_CHARS,
        description="Commit of an hf:// model, or digest of an s3://, gs:// or https:// model, that ready engines last "
        "reported. Several during a rollout.",
    )
    slo: SloStatus | None = Field(default=None, description="SLO attainment that clients saw in the last minute.")
    limited_by: str | None = Field(
        default=None,
        max_length=128,
        description="Tier nearest to its SLO capacity, and its tightest constraint: TPOT, TTFT, e2e, itl, slots or KV. "
        "The class follows if the target is one of its own, such as `serve TPOT of class chat`.",
    )
    recovery: FormattedNumber | None = Field(
        default=None,
        description="Median time until a failed engine is ready again, such as 21s: of restarts in the pod, else of "
        "starts of a pod. Gateways read it.",
    )
    cost: CostStatus | None = Field(default=None, description="Cost of the service, if the spec has a price.")
