"""The document of `GET /v1/recommendations`: what each service needs, for autoscalers and for layers above the cluster.

The JSON schema in `docs/reference/recommendations.schema.json` is generated from these models. A field that is added
keeps the version; a field that is removed or changes its meaning raises it.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from plimsoll.core.autoscaling.scaling_decision import ScalingLimit
from plimsoll.core.autoscaling.scaling_policy import ScalingMode

VERSION: Final = 1
SCHEMA_ID: Final = "https://plimsoll.dev/schemas/recommendations.v1.json"
_RFC3339: Final[dict[str, Any]] = {"format": "date-time"}

Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0.0)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True)


class TierLoad(_Model):
    """Load and capacity of a tier, in requests per second of the current mix."""

    requests_per_second: Rate = Field(description="Current load.")
    forecast_requests_per_second: Rate = Field(description="Load that the recommendation is for.")
    capacity_per_replica: Rate = Field(description="SLO capacity of one replica: its highest load within the SLO.")
    utilization: Rate | None = Field(
        description="Current load as a share of the SLO capacity of the ready replicas; null without ready replicas."
    )


class TierRecommendation(_Model):
    """Replicas of one tier."""

    current_replicas: Count | None = Field(description="Ordered replicas at the decision; null if not observed.")
    ready_replicas: Count | None = Field(description="Ready replicas at the decision; null if not observed.")
    recommended_replicas: Count | None = Field(
        description="Replicas that the tier should have, after all limits: what mode Auto sets. Null without an SLO, in"
        " mode Off, and before the first decision."
    )
    needed_replicas: Count | None = Field(description="Replicas that the forecast needs, before limits. Null: unknown.")
    min_replicas: Count = Field(description="Lower bound now, with the schedule.")
    max_replicas: Count = Field(description="Upper bound now, with the schedule.")
    limits: list[ScalingLimit] = Field(description="Limits that changed the count.")
    frozen: bool = Field(description="The demand is unknown, so the recommendation is the current count.")
    reasons: list[str] = Field(description="Why, in the order of the steps; text for people.")
    demand: TierLoad | None = Field(description="Null if unknown.")


class Recommendation(_Model):
    """Recommendation for one service."""

    namespace: str
    name: str = Field(description="Name of the InferenceService.")
    mode: ScalingMode | None = Field(description="`spec.scaling.mode`; null before the first decision.")
    paused: bool = Field(description="`spec.scaling.paused`.")
    decided_at: str | None = Field(json_schema_extra=_RFC3339, description="Null before the first decision.")
    age_seconds: Annotated[float, Field(ge=0.0)] | None = Field(description="Age of the decision.")
    stale: bool = Field(description="The recommendation must not be applied; staleReason says why.")
    stale_reason: str | None
    binding_tier: str | None = Field(description="The tier nearest to its SLO capacity.")
    tiers: dict[str, TierRecommendation] = Field(description="By tier: prefill and decode, or serve.")


class RecommendationList(_Model):
    """Recommendations for all services that this operator scales, by namespace and name."""

    version: Annotated[int, Field(ge=VERSION, le=VERSION)] = VERSION
    at: str = Field(json_schema_extra=_RFC3339, description="Time of the answer, at most one second ago.")
    items: list[Recommendation]


def json_schema() -> dict[str, Any]:
    """The JSON schema of `GET /v1/recommendations`. `$defs/Recommendation` is the answer for one service."""
    schema = RecommendationList.model_json_schema(by_alias=True, mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID, **schema}
