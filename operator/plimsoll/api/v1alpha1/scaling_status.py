"""Status fields: measured SLO attainment and cost."""

from __future__ import annotations

from pydantic import Field

from plimsoll.api.v1alpha1.tier_status import FormattedNumber, StatusModel


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
    attainment: FormattedNumber | None = Field(
        default=None,
        description="Share of the responses that met all targets of their request (ttft, tpot, e2e), such as 97%. A "
        "lower bound. SLOMet has the share of each target.",
    )
    attainment_including_rejected: FormattedNumber | None = Field(
        default=None,
        description="The same share of all arrived requests, rejected ones included. Absent: equal to attainment.",
    )
    unavailable_reason: str | None = Field(
        default=None,
        max_length=256,
        description="Target that is not measured, and the reason. The attainment is then absent.",
    )
    offered: FormattedNumber | None = Field(default=None, description="Arrival rate of requests, such as 41.2 req/s.")


class CostStatus(StatusModel):
    """Cost of the service."""

    per_hour: FormattedNumber | None = Field(
        default=None, description="Price of the service's GPUs per hour, such as 12.50 USD."
    )
    per_million_tokens: FormattedNumber | None = Field(
        default=None, description="Price of a million output tokens of successful requests, such as 0.0731 USD."
    )
    per_successful_request: FormattedNumber | None = Field(
        default=None, description="Price of a successful request, such as 0.000731 USD."
    )
