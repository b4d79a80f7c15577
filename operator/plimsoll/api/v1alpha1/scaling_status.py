"""Status fields: measured SLO attainment, scaling decisions and cost."""

from __future__ import annotations

from pydantic import Field

from plimsoll.api.v1alpha1.tier_status import FormattedNumber, StatusModel


class TargetAttainmentStatus(StatusModel):
    """Share of the responses that met each target."""

    ttft: FormattedNumber | None = Field(
        default=None, description="Share whose first token met the TTFT target for their prompt length, such as 98%."
    )
    tpot: FormattedNumber | None = Field(
        default=None,
        description="Share whose time per output token met the target. It is a lower bound if targets differ by class.",
    )
    e2e: FormattedNumber | None = Field(
        default=None, alias="e2e", description="Share whose last token met the e2e target."
    )


class SloStatus(StatusModel):
    """SLO attainment that clients saw in the last minute."""

    ttft: FormattedNumber | None = Field(
        default=None, description="Time to first token at the SLO's percentile, such as 412ms."
    )
    tpot: FormattedNumber | None = Field(
        default=None, description="Time per output token at the SLO's percentile, such as 38ms."
    )
    e2e: FormattedNumber | None = Field(
        default=None,
        alias="e2e",
        description="Time to the last token at the SLO's percentile, such as 9.4s; only with an e2e target.",
    )
    itl: FormattedNumber | None = Field(
        default=None,
        description="99th percentile of the inter-token latency, such as 31ms; only with an itl target.",
    )
    attainment_by_target: TargetAttainmentStatus | None = Field(
        default=None, description="Share of the responses that met each target that is set and measured."
    )
    attainment: FormattedNumber | None = Field(
        default=None,
        description="Share of the responses that met all targets of their request (ttft, tpot, e2e), such as 97%. It "
        "is a lower bound, because TPOT misses are not measured per request.",
    )
    attainment_including_rejected: FormattedNumber | None = Field(
        default=None,
        description="The same share of all arrived requests, rejected ones included. Rejections cannot raise it.",
    )
    unavailable_reason: str | None = Field(
        default=None,
        max_length=256,
        description="Target that is not measured, and the reason. The attainment is then absent.",
    )
    offered: FormattedNumber | None = Field(default=None, description="Arrival rate of requests, such as 41.2 req/s.")


class TierChangeStatus(StatusModel):
    """Decision for one tier."""

    from_: int = Field(
        alias="from", ge=0, json_schema_extra={"format": "int32"}, description="Replica count before the decision."
    )
    to: int = Field(ge=0, json_schema_extra={"format": "int32"}, description="Replica count that was decided.")
    reason: str = Field(
        default="", max_length=4096, description="Steps of the decision, and the expected latency without it."
    )


class TierChangesStatus(StatusModel):
    """Decision for each tier."""

    prefill: TierChangeStatus | None = Field(default=None, description="The prefill tier.")
    decode: TierChangeStatus | None = Field(default=None, description="The decode tier.")
    serve: TierChangeStatus | None = Field(default=None, description="The aggregated tier.")


class DecisionStatus(StatusModel):
    """One scaling decision."""

    time: str = Field(json_schema_extra={"format": "date-time"}, description="Time of the decision.")
    tiers: TierChangesStatus = Field(default=TierChangesStatus(), description="Decision for each tier.")
    binding: str | None = Field(default=None, max_length=32, description="Tier nearest to its SLO capacity.")


class CostStatus(StatusModel):
    """Cost of the service."""

    per_hour: FormattedNumber | None = Field(
        default=None, description="Price of the service's GPUs per hour, such as 12.50 USD."
    )
    per_million_tokens: FormattedNumber | None = Field(
        default=None, description="Price of a million output tokens at the current load, such as 0.0731 USD."
    )
