"""Status of one tier: its engines, their capacity and their start-up times."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field
from pydantic.config import JsonDict

from plimsoll.api.v1alpha1.api_model import ApiModel
from plimsoll.api.v1alpha1.tiers import RoleName

FormattedNumber = Annotated[str, Field(max_length=32)]  # a number with its unit; a CRD has no floats
_INT32: Final[JsonDict] = {"format": "int32"}


class StatusModel(ApiModel):
    """Base of the status types; unknown fields of another version are ignored."""

    model_config = ConfigDict(extra="ignore")


class TierStatus(StatusModel):
    """Engines and capacity of one tier."""

    summary: str = Field(default="", max_length=32, description="Ready and desired pods, such as 2/3.")
    needed: Annotated[int, Field(ge=0, json_schema_extra=_INT32)] | None = Field(
        default=None,
        description="Number of pods that the forecast load needs, before limits, if it differs from desired. Without "
        "capacityPerReplica it is unknown.",
    )
    capacity_per_replica: FormattedNumber | None = Field(
        default=None,
        description="SLO capacity of one pod, its highest load within the SLO, and the share of that of all ready pods "
        "that the present load uses: such as `9.1 req/s, 70% used`.",
    )
    draft_acceptance: FormattedNumber | None = Field(
        default=None,
        description="Share of drafted tokens that the engines accepted in the last minute, to the next 10%.",
    )
    starting_pods: str | None = Field(
        default=None,
        max_length=64,
        description="Number of pods that are not ready yet, how many of them exceed the usual start-up time, and the "
        "time at which the first of them is expected to be ready: such as `2, 1 overdue, next at TIME`. Absent: none.",
    )
    pod_selector: str | None = Field(
        default=None,
        max_length=1024,
        description="Label selector by which gateways find the pods of a target with a port. Absent: they send it "
        "nothing.",
    )
    yielded_to: Annotated[str, Field(max_length=512)] | None = Field(
        default=None,
        description="Who else sets the replica count of the target, so that the operator only recommends. Absent: "
        "no other writer.",
    )
    yielded_cause: Literal["Autoscaler", "Apply", "LaterWrite"] | None = Field(
        default=None,
        description="What shows yieldedTo. Autoscaler: a HorizontalPodAutoscaler has the object as its target. Apply: "
        "a field manager applies spec.replicas. LaterWrite: the count was changed after Plimsoll had set it; the "
        "operator yields until the spec of the service changes.",
    )


class TiersStatus(StatusModel):
    """Status of each tier."""

    prefill: TierStatus | None = Field(default=None, description="The prefill tier.")
    decode: TierStatus | None = Field(default=None, description="The decode tier.")
    serve: TierStatus | None = Field(default=None, description="The aggregated tier.")

    def get(self, role: RoleName) -> TierStatus | None:
        """Return the tier of a role, or None."""
        tier: TierStatus | None = getattr(self, role)
        return tier
