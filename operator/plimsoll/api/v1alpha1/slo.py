"""The latency promise: a percentile, and how long the first token and every further one may take."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from pydantic import Field

from plimsoll.api.v1alpha1.base import Model, Rule, Rules, matching, quote
from plimsoll.core import units

LONGEST_SECONDS: Final = 3600

_IS_DURATION = matching(
    units.DURATION_PATTERN.replace(r"\.", "[.]"),
    "must be a duration with a unit (us, ms, s, m, h), such as 500ms or 1.5s",
)


def _in_range(text: str) -> bool:
    try:
        return 0 < units.parse_duration(text) <= LONGEST_SECONDS
    except ValueError:
        return True  # said by the rule on its form


Latency = Annotated[
    str,
    Field(max_length=32),
    Rules(
        _IS_DURATION,
        Rule[str](
            f"!({_IS_DURATION.cel}) || (duration(self) > duration('0s') && duration(self) <="
            f" duration({quote(f'{LONGEST_SECONDS}s')}))",
            "must be longer than zero and at most one hour",
            _in_range,
        ),
    ),
]


class Slo(Model):
    """The latency promise. Validated and shown; nothing acts on it yet."""

    percentile: int = Field(
        default=95, ge=1, le=99, description="Share of requests, in percent, that must be this quick."
    )
    ttft: Latency | None = Field(default=None, description="Time to the first token, such as 500ms.")
    tpot: Latency | None = Field(default=None, description="Time per output token after the first, such as 50ms.")

    rules: ClassVar[tuple[Rule[Slo], ...]] = (
        Rule(
            "has(self.ttft) || has(self.tpot)",
            "needs ttft or tpot",
            lambda own: own.ttft is not None or own.tpot is not None,
            reason="FieldValueRequired",
        ),
    )

    @property
    def ttft_seconds(self) -> float | None:
        return None if self.ttft is None else units.parse_duration(self.ttft)

    @property
    def tpot_seconds(self) -> float | None:
        return None if self.tpot is None else units.parse_duration(self.tpot)
