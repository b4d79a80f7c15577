"""How replicas follow the load: whether at all, how much is kept free, how fast, within which bounds and ratio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from plimsoll.api.v1alpha1.base import IntOrString, Model, Rule, Rules, matching
from plimsoll.api.v1alpha1.scalars import DURATION_LENGTH, decimal, duration
from plimsoll.api.v1alpha1.schedule import ScheduleEntry
from plimsoll.api.v1alpha1.tiers import MAX_REPLICAS
from plimsoll.core import units
from plimsoll.core.forecast import MISS_COST
from plimsoll.core.scaling.policy import RateLimit as ScalingRateLimit

MAX_MISS_COST: Final = 100_000
MAX_SCHEDULE: Final = 16

_RATIO = "^([0-9]{1,3}([.][0-9]{1,3})?|1000)$"
_RATIO_TEXT = IntOrString(8, '2 or "0.5"')


class RateLimit(Model):
    """At most so many replicas of a tier in any stretch of time."""

    replicas: int = Field(ge=1, le=MAX_REPLICAS, description="Replicas, 1 to 1000.")
    per: Annotated[
        str,
        Field(max_length=DURATION_LENGTH),
        duration("0s", "24h", "must be longer than zero and at most 24 hours", above=True),
    ] = Field(description="Length of the stretch, such as 5m: above 0, at most 24h.")

    def to_core(self) -> ScalingRateLimit:
        return ScalingRateLimit(self.replicas, units.parse_duration(self.per))


class RatioBounds(Model):
    """Bounds on how many prefill replicas there are for one decode replica."""

    min: (
        Annotated[
            int | str,
            _RATIO_TEXT,
            Rules(decimal(_RATIO, 'must be from 0 to 1000 with at most 3 decimals, such as 2 or "0.5"')),
        ]
        | None
    ) = Field(default=None, description='At least so many, such as "0.5"; 0 to 1000, absent: no bound.')
    max: (
        Annotated[
            int | str,
            _RATIO_TEXT,
            Rules(
                decimal(
                    _RATIO, 'must be above 0 and at most 1000 with at most 3 decimals, such as 2 or "0.5"', zero=False
                )
            ),
        ]
        | None
    ) = Field(default=None, description="At most so many, such as 2; above 0, at most 1000, absent: no bound.")

    rules: ClassVar[tuple[Rule[RatioBounds], ...]] = (
        Rule(
            "has(self.min) || has(self.max)",
            "needs min or max",
            lambda own: own.min is not None or own.max is not None,
            reason="FieldValueRequired",
        ),
        Rule(
            f"!has(self.min) || !has(self.max) || !string(self.min).matches('{_RATIO}') ||"
            f" !string(self.max).matches('{_RATIO}') || double(string(self.min)) <= double(string(self.max))",
            "max must not be below min",
            lambda own: own.min is None or own.max is None or Decimal(own.min) <= Decimal(own.max),
            field=".max",
        ),
    )

    def to_core(self) -> tuple[float, float]:
        """Least and most; infinity without a most."""
        return float(self.min or 0), math.inf if self.max is None else float(self.max)


_SAME_HOURS = (
    "(has(a.days) ? a.days : []) == (has(b.days) ? b.days : [])"
    " && a.from == b.from && a.until == b.until && a.timeZone == b.timeZone"
)


def _differ(schedule: Sequence[ScheduleEntry]) -> bool:
    hours = [(frozenset(one.days or ()), one.from_, one.until, one.time_zone) for one in schedule]
    return len(set(hours)) == len(hours)


class Scaling(Model):
    """How replicas follow the load, alike in all tiers."""

    mode: Literal["Auto", "Recommend", "Off"] = Field(
        default="Auto",
        description="Auto: replicas are set as decided. Recommend: decisions are shown in the status and replicas stay "
        "as they are. Off: replicas stay as they are and nothing is recommended.",
    )
    paused: bool = Field(
        default=False, description="Keeps replicas as they are for a while, whatever the mode; decisions are shown."
    )
    headroom: Annotated[
        str,
        Field(max_length=8),
        Rules(matching("^([0-8]?[0-9]|90)%$", "must be a whole percentage from 0% to 90%")),
    ] = Field(
        default="0%",
        description="Share of the load line (the load that a replica carries within the promise) that is kept free, "
        "0% to 90%.",
    )
    miss_cost: Annotated[int, Field(ge=0, le=MAX_MISS_COST)] | None = Field(
        default=None,
        description="What a request that misses the promise is worth, in requests served: the higher, the more spare "
        f"replicas are kept for leaps in load. 0 to {MAX_MISS_COST}; 0 keeps none; absent: {MISS_COST:g}.",
    )
    warm_replicas: int = Field(
        default=0, ge=0, le=MAX_REPLICAS, description="Replicas of each tier kept beyond its need, up to maxReplicas."
    )
    scale_up: RateLimit | None = Field(
        default=None, description="Limit on replicas added to a tier; absent: at once, all that are needed."
    )
    scale_down: RateLimit | None = Field(
        default=None, description="Limit on replicas taken from a tier; absent: all that are no longer needed."
    )
    prefill_per_decode: RatioBounds | None = Field(
        default=None,
        description="Bounds on prefill replicas for each decode replica; absent: each tier follows its own load.",
    )
    horizon: (
        Annotated[
            str,
            Field(max_length=DURATION_LENGTH),
            duration("1s", "2h", "must be from one second to two hours"),
        ]
        | None
    ) = Field(
        default=None,
        description="How far ahead load is forecast, such as 3m: 1s to 2h; absent: the start-up time that was learned.",
    )
    schedule: Annotated[
        tuple[ScheduleEntry, ...],
        Field(max_length=MAX_SCHEDULE, strict=False),
        Rules(
            Rule[tuple[ScheduleEntry, ...]](
                f"self.all(a, self.exists_one(b, {_SAME_HOURS}))",
                "two entries have the same days, from, until and timeZone: make one of them",
                _differ,
            )
        ),
    ] = Field(
        default=(),
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="Hours in which each tier has other bounds; where entries overlap, the last one counts.",
    )

    @property
    def headroom_share(self) -> float:
        """From 0 to 0.9."""
        return units.parse_percent(self.headroom) / 100

    @property
    def horizon_s(self) -> float | None:
        """How far to look ahead; None: the learned start-up time."""
        return None if self.horizon is None else units.parse_duration(self.horizon)
