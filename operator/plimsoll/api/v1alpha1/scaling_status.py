"""What was measured of the promise, what was decided and why, and what it costs."""

from __future__ import annotations

from pydantic import Field

from plimsoll.api.v1alpha1.tier_status import Number, Observed


class MetStatus(Observed):
    """Share of the answers that kept each target, where it is promised and known."""

    ttft: Number | None = Field(
        default=None, description="Whose first token was in time for the length of their prompt, such as 98%."
    )
    tpot: Number | None = Field(
        default=None,
        description="Whose time per output token was within the target; at least, where classes have different ones.",
    )
    e2e: Number | None = Field(default=None, alias="e2e", description="Whose last token was in time.")


class SloStatus(Observed):
    """The promise as clients saw it of late."""

    ttft: Number | None = Field(
        default=None, description="Time to the first token at the promise's percentile, such as 412ms."
    )
    tpot: Number | None = Field(
        default=None, description="Time per output token at the promise's percentile, such as 38ms."
    )
    e2e: Number | None = Field(
        default=None,
        alias="e2e",
        description="Time to the last token at the promise's percentile, such as 9.4s; only where it is promised.",
    )
    itl: Number | None = Field(
        default=None,
        description="99th percentile of the gaps between tokens, such as 31ms; only where it is promised.",
    )
    met: MetStatus | None = Field(
        default=None, description="Share of the answers that kept each target, where it is promised and known."
    )
    attainment: Number | None = Field(
        default=None,
        description="Share of the answers that kept all targets of a request (ttft, tpot, e2e), such as 97%: at least, "
        "since who misses the pace is not known by request.",
    )
    attainment_offered: Number | None = Field(
        default=None,
        description="The same share of all requests that arrived, refused ones included: refusing cannot raise it.",
    )
    not_known: str | None = Field(
        default=None,
        max_length=256,
        description="The target that is not measured, and why; then there is no attainment.",
    )
    offered: Number | None = Field(default=None, description="Requests that arrived, such as 41.2 req/s.")
    window: Number | None = Field(default=None, description="Length of time that is looked back on, such as 1m.")


class TierChangeStatus(Observed):
    """What was decided for one tier."""

    from_: int = Field(
        alias="from", ge=0, json_schema_extra={"format": "int32"}, description="Replicas ordered until then."
    )
    to: int = Field(ge=0, json_schema_extra={"format": "int32"}, description="Replicas decided on.")
    why: str = Field(default="", max_length=4096, description="The steps that led there, and what would come without.")


class TierChangesStatus(Observed):
    """What was decided for each tier."""

    prefill: TierChangeStatus | None = Field(default=None, description="The prefill tier.")
    decode: TierChangeStatus | None = Field(default=None, description="The decode tier.")
    serve: TierChangeStatus | None = Field(default=None, description="The aggregated tier.")


class DecisionStatus(Observed):
    """One decision."""

    time: str = Field(json_schema_extra={"format": "date-time"}, description="When it was made.")
    tiers: TierChangesStatus = Field(default=TierChangesStatus(), description="What was decided for each tier.")
    binding: str | None = Field(default=None, max_length=32, description="The tier nearest to its load line.")


class CostStatus(Observed):
    """What the service costs."""

    per_hour: Number | None = Field(default=None, description="Price of its GPUs for an hour, such as 12.50 USD.")
    per_million_tokens: Number | None = Field(
        default=None, description="Price of a million output tokens at the present load, such as 0.0731 USD."
    )
