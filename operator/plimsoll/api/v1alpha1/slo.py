"""`spec.slo`: a percentile, and latency targets for the first token, each further token and the whole response."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from plimsoll.api.v1alpha1.api_model import ApiModel, ValidationRule, with_values
from plimsoll.api.v1alpha1.scalars import IS_DURATION, MAX_DURATION_CHARS, duration_rules
from plimsoll.core import slo as core
from plimsoll.core import units

LatencyTarget = Annotated[
    str,
    Field(max_length=MAX_DURATION_CHARS),
    duration_rules("0s", "3600s", "must be longer than zero and at most one hour", exclusive=True),
]
LatencyAllowance = Annotated[
    str, Field(max_length=MAX_DURATION_CHARS), duration_rules("0s", "3600s", "must be at most one hour")
]


_IS_TTFT, _IS_E2E = (re.sub(r"\bself\b", f"self.{name}", IS_DURATION.cel) for name in ("ttft", "e2e"))


def _seconds(text: str | None) -> float:
    """Return NaN for an absent or invalid duration; other rules report the latter."""
    try:
        return math.nan if text is None else units.parse_duration(text)
    except ValueError:
        return math.nan


class LatencyTargets(ApiModel):
    """Latency targets that a request must meet together."""

    ttft: LatencyTarget | None = Field(
        default=None,
        description="Time to first token (TTFT), such as 500ms: above 0, at most 1h. A prefill tier is sized by it, "
        "and keeps minReplicas without it.",
    )
    ttft_per_k_token: LatencyAllowance | None = Field(
        default=None,
        alias="ttftPerKToken",
        description="Time added to ttft for each 1,000 prompt tokens, such as 100ms: 0s to 1h. Without it, long "
        "prompts may miss the target even on idle engines. Absent: 0s.",
    )
    tpot: LatencyTarget | None = Field(
        default=None,
        description="Mean time per output token of a request after its first token (TPOT), such as 50ms: above 0, at "
        "most 1h.",
    )
    e2e: LatencyTarget | None = Field(
        default=None,
        alias="e2e",
        description="Time to the last token, such as 20s: above ttft, at most 1h. The operator derives a TPOT target "
        "from it for the current output lengths; the tighter of that target and tpot applies.",
    )

    rules: ClassVar[tuple[ValidationRule[Any], ...]] = (
        ValidationRule[Any](
            "has(self.ttft) || has(self.tpot) || has(self.e2e)",
            "needs ttft, tpot or e2e",
            lambda own: own.ttft is not None or own.tpot is not None or own.e2e is not None,
            reason="FieldValueRequired",
        ),
        ValidationRule[Any](
            "has(self.ttft) || !has(self.ttftPerKToken)",
            "ttftPerKToken needs ttft, to which it is added",
            lambda own: own.ttft is not None or own.ttft_per_k_token is None,
            field=".ttftPerKToken",
            reason="FieldValueForbidden",
        ),
        ValidationRule[Any](
            f"!has(self.ttft) || !has(self.e2e) || !({_IS_TTFT}) || !({_IS_E2E})"
            " || duration(self.e2e) > duration(self.ttft)",
            "e2e must be longer than ttft, because it includes it: raise e2e, or lower ttft",
            lambda own: not _seconds(own.e2e) <= _seconds(own.ttft),
            field=".e2e",
            **with_values(
                "e2e ",
                ("self.e2e", lambda own: own.e2e),
                " must be longer than ttft ",
                ("self.ttft", lambda own: own.ttft),
                ", because it includes it: raise e2e, or lower ttft",
            ),
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

    def to_core_slo(self, percentile: int) -> core.Slo:
        """Return the core SLO that `percentile` percent of the requests meet these targets."""
        return core.Slo(
            share=percentile / 100,
            ttft_s=self.ttft_seconds,
            ttft_per_1k_tokens_s=units.parse_duration(self.ttft_per_k_token or "0s"),
            tpot_s=self.tpot_seconds,
            e2e_s=self.e2e_seconds,
        )


class SloSpec(LatencyTargets):
    """Latency SLO that the operator sizes the tiers for."""

    itl: LatencyTarget | None = Field(
        default=None,
        description="Inter-token latency (ITL) at the 99th percentile over all tokens of the service, such as 40ms: "
        "above 0, at most 1h. The percentile field does not apply. It needs ttft, tpot or e2e too.",
    )
    percentile: int = Field(
        default=95,
        ge=1,
        le=99,
        description="Percentage of requests that must meet all their targets: 1 to 99.",
    )

    @property
    def itl_seconds(self) -> float | None:
        return None if self.itl is None else units.parse_duration(self.itl)

    def to_core(self) -> core.Slo:
        """Return the SLO that the core sizes for."""
        return replace(self.to_core_slo(self.percentile), itl_s=self.itl_seconds)
