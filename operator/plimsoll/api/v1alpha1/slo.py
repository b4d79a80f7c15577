"""The latency promise: a percentile, and how long the first token and every further one may take."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from plimsoll.api.v1alpha1.base import Model, Rule
from plimsoll.api.v1alpha1.scalars import DURATION_LENGTH, duration
from plimsoll.core import slo as core
from plimsoll.core import units

Latency = Annotated[
    str,
    Field(max_length=DURATION_LENGTH),
    duration("0s", "3600s", "must be longer than zero and at most one hour", above=True),
]
Allowance = Annotated[str, Field(max_length=DURATION_LENGTH), duration("0s", "3600s", "must be at most one hour")]


class Targets(Model):
    """The targets that a request meets together."""

    ttft: Latency | None = Field(
        default=None, description="Time to the first token, such as 500ms: above 0, at most 1h."
    )
    ttft_per_k_token: Allowance | None = Field(
        default=None,
        alias="ttftPerKToken",
        description="Added to ttft for each 1,000 prompt tokens, such as 100ms: without it, long prompts miss even on "
        "idle engines. 0s to 1h; absent: nothing.",
    )
    tpot: Latency | None = Field(
        default=None,
        description="Mean time per output token of a request after its first, such as 50ms: above 0, at most 1h.",
    )

    rules: ClassVar[tuple[Rule[Any], ...]] = (
        Rule[Any](
            "has(self.ttft) || has(self.tpot)",
            "needs ttft or tpot",
            lambda own: own.ttft is not None or own.tpot is not None,
            reason="FieldValueRequired",
        ),
        Rule[Any](
            "has(self.ttft) || !has(self.ttftPerKToken)",
            "ttftPerKToken is added to ttft, which is missing",
            lambda own: own.ttft is not None or own.ttft_per_k_token is None,
            field=".ttftPerKToken",
            reason="FieldValueForbidden",
        ),
    )

    @property
    def ttft_seconds(self) -> float | None:
        return None if self.ttft is None else units.parse_duration(self.ttft)

    @property
    def tpot_seconds(self) -> float | None:
        return None if self.tpot is None else units.parse_duration(self.tpot)

    def promised(self, percentile: int) -> core.Slo:
        """The promise that so many percent of the requests meet these targets."""
        return core.Slo(
            share=percentile / 100,
            ttft_s=self.ttft_seconds,
            ttft_per_1k_tokens_s=units.parse_duration(self.ttft_per_k_token or "0s"),
            tpot_s=self.tpot_seconds,
        )


class Slo(Targets):
    """The latency promise: tiers are sized so that it is kept at the least GPU time."""

    percentile: int = Field(
        default=95,
        ge=1,
        le=99,
        description="Share of requests, in percent, each of which must meet all targets together.",
    )

    def to_core(self) -> core.Slo:
        """The promise that the core sizes for."""
        return self.promised(self.percentile)
