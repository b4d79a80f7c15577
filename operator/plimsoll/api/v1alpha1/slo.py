"""The latency promise: a percentile, and how long the first token, every further one and the whole answer may take."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from plimsoll.api.v1alpha1.base import Model, Rule
from plimsoll.api.v1alpha1.scalars import DURATION_LENGTH, IS_DURATION, duration
from plimsoll.core import slo as core
from plimsoll.core import units

Latency = Annotated[
    str,
    Field(max_length=DURATION_LENGTH),
    duration("0s", "3600s", "must be longer than zero and at most one hour", above=True),
]
Allowance = Annotated[str, Field(max_length=DURATION_LENGTH), duration("0s", "3600s", "must be at most one hour")]


_IS_TTFT, _IS_E2E = (re.sub(r"\bself\b", f"self.{name}", IS_DURATION.cel) for name in ("ttft", "e2e"))


def _seconds(text: str | None) -> float:
    """NaN, which compares with nothing, for what is not there or is no duration: other rules tell of that."""
    try:
        return math.nan if text is None else units.parse_duration(text)
    except ValueError:
        return math.nan


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
    e2e: Latency | None = Field(
        default=None,
        alias="e2e",
        description="Time to the last token, such as 20s: above ttft, at most 1h. At the present mix of answers' "
        "lengths it bounds the time per output token; the tighter of that and tpot is in force.",
    )

    rules: ClassVar[tuple[Rule[Any], ...]] = (
        Rule[Any](
            "has(self.ttft) || has(self.tpot) || has(self.e2e)",
            "needs ttft, tpot or e2e",
            lambda own: own.ttft is not None or own.tpot is not None or own.e2e is not None,
            reason="FieldValueRequired",
        ),
        Rule[Any](
            "has(self.ttft) || !has(self.ttftPerKToken)",
            "ttftPerKToken is added to ttft, which is missing",
            lambda own: own.ttft is not None or own.ttft_per_k_token is None,
            field=".ttftPerKToken",
            reason="FieldValueForbidden",
        ),
        Rule[Any](
            f"!has(self.ttft) || !has(self.e2e) || !({_IS_TTFT}) || !({_IS_E2E})"
            " || duration(self.e2e) > duration(self.ttft)",
            "e2e must be longer than ttft, which is a part of it",
            lambda own: not _seconds(own.e2e) <= _seconds(own.ttft),
            field=".e2e",
        ),
    )

    @property
    def ttft_seconds(self) -> float | None:
        return None if self.ttft is None else units.parse_duration(self.ttft)

    @property
    def tpot_seconds(self) -> float | None:
        return None if self.tpot is None else units.parse_duration(self.tpot)

    @property
    def e2e_seconds(self) -> float | None:
        return None if self.e2e is None else units.parse_duration(self.e2e)

    def promised(self, percentile: int) -> core.Slo:
        """The promise that so many percent of the requests meet these targets."""
        return core.Slo(
            share=percentile / 100,
            ttft_s=self.ttft_seconds,
            ttft_per_1k_tokens_s=units.parse_duration(self.ttft_per_k_token or "0s"),
            tpot_s=self.tpot_seconds,
            e2e_s=self.e2e_seconds,
        )


class Slo(Targets):
    """The latency promise: tiers are sized so that it is kept at the least GPU time."""

    itl: Latency | None = Field(
        default=None,
        description="Time between two tokens of an answer, such as 40ms, that 99 in 100 of the service's gaps keep, "
        "whatever the percentile: above 0, at most 1h. It is no target of a request, so it goes beside ttft, tpot or "
        "e2e. Engines tell of it by their own histogram.",
    )
    percentile: int = Field(
        default=95,
        ge=1,
        le=99,
        description="Share of requests, in percent, each of which must meet all targets together.",
    )

    @property
    def itl_seconds(self) -> float | None:
        return None if self.itl is None else units.parse_duration(self.itl)

    def to_core(self) -> core.Slo:
        """The promise that the core sizes for."""
        return replace(self.promised(self.percentile), itl_s=self.itl_seconds)
