"""`spec.scaling`: mode, headroom, standby replicas, rate limits, ratio bounds and schedule of the autoscaler."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from plimsoll.api.v1alpha1.api_model import (
    ApiModel,
    IntOrString,
    ValidationRule,
    ValidationRules,
    matching,
    with_values,
)
from plimsoll.api.v1alpha1.scalars import MAX_DURATION_CHARS, decimal_rule, duration_rules
from plimsoll.api.v1alpha1.schedule import ScheduleEntry
from plimsoll.api.v1alpha1.tiers import MAX_TIER_REPLICAS
from plimsoll.core import units
from plimsoll.core.autoscaling.scaling_policy import ReplicaRateLimit as ScalingRateLimit
from plimsoll.core.demand.standby_value import MISS_COST
from plimsoll.core.units import format_number

MAX_SLO_MISS_COST: Final = 100_000
MAX_SCHEDULE_ENTRIES: Final = 16

_RATIO_PATTERN = "^([0-9]{1,3}([.][0-9]{1,3})?|1000)$"
_RATIO_TEXT = IntOrString(8, '2 or "0.5"')


class RateLimitSpec(ApiModel):
    """Largest change of a tier's replica count within a sliding window."""

    replicas: int = Field(
        ge=1, le=MAX_TIER_REPLICAS, description="Largest change in replicas within the window: 1 to 1000."
    )
    per: Annotated[
        str,
        Field(max_length=MAX_DURATION_CHARS),
        duration_rules("0s", "24h", "must be longer than zero and at most 24 hours", exclusive=True),
    ] = Field(description="Length of the window, such as 5m: above 0, at most 24h.")

    def to_core(self) -> ScalingRateLimit:
        return ScalingRateLimit(self.replicas, units.parse_duration(self.per))


class RatioBounds(ApiModel):
    """Bounds on the number of prefill replicas per decode replica."""

    min: (
        Annotated[
            int | str,
            _RATIO_TEXT,
            ValidationRules(
                decimal_rule(_RATIO_PATTERN, 'must be from 0 to 1000 with at most 3 decimals, such as 2 or "0.5"')
            ),
        ]
        | None
    ) = Field(default=None, description='Lower bound, such as "0.5": 0 to 1000. Absent: no bound.')
    max: (
        Annotated[
            int | str,
            _RATIO_TEXT,
            ValidationRules(
                decimal_rule(
                    _RATIO_PATTERN,
                    'must be above 0 and at most 1000 with at most 3 decimals, such as 2 or "0.5"',
                    allow_zero=False,
                )
            ),
        ]
        | None
    ) = Field(default=None, description="Upper bound, such as 2: above 0, at most 1000. Absent: no bound.")

    rules: ClassVar[tuple[ValidationRule[RatioBounds], ...]] = (
        ValidationRule(
            "has(self.min) || has(self.max)",
            "needs min or max",
            lambda own: own.min is not None or own.max is not None,
            reason="FieldValueRequired",
        ),
        ValidationRule(
            f"!has(self.min) || !has(self.max) || !string(self.min).matches('{_RATIO_PATTERN}') ||"
            f" !string(self.max).matches('{_RATIO_PATTERN}') || double(string(self.min)) <= double(string(self.max))",
            "max must not be below min: raise max, or lower min",
            lambda own: own.min is None or own.max is None or Decimal(own.min) <= Decimal(own.max),
            field=".max",
            **with_values(
                "max ",
                ("self.max", lambda own: own.max),
                " must not be below min ",
                ("self.min", lambda own: own.min),
                ": raise max, or lower min",
            ),
        ),
    )

    def to_core(self) -> tuple[float, float]:
        """Return the lower and the upper bound; infinity without an upper bound."""
        return float(self.min or 0), math.inf if self.max is None else float(self.max)


_SAME_HOURS = (
    "(has(a.days) ? a.days : []) == (has(b.days) ? b.days : [])"
    " && a.from == b.from && a.until == b.until && (has(a.timeZone) ? a.timeZone : 'UTC') =="
    " (has(b.timeZone) ? b.timeZone : 'UTC')"
)


def _hours_differ(schedule: Sequence[ScheduleEntry]) -> bool:
    hours = [(frozenset(one.days or ()), one.from_, one.until, one.time_zone) for one in schedule]
    return len(set(hours)) == len(hours)


class ScalingOptions(ApiModel):
    """Autoscaling options of all tiers."""

    mode: Literal["Auto", "Recommend", "Off"] | None = Field(
        default=None,
        description="Auto: the operator sets the replica counts. Recommend: it only shows decisions in the status. "
        "Off: neither. Absent: Auto for tiers, Recommend for targets.",
    )
    paused: bool = Field(
        default=False, description="Freezes the replica counts in every mode. The status still shows decisions."
    )
    headroom: Annotated[
        str,
        Field(max_length=8),
        ValidationRules(matching("^([0-8]?[0-9]|90)%$", "must be a whole percentage from 0% to 90%")),
    ] = Field(
        default="0%",
        description="Share of the SLO capacity (the request rate that a replica carries within the SLO) to keep free: "
        "0% to 90%.",
    )
    slo_miss_cost: Annotated[int, Field(ge=0, le=MAX_SLO_MISS_COST)] | None = Field(
        default=None,
        description="Cost of a request that misses the SLO, in served requests (the newsvendor's underage cost). A "
        f"higher value keeps more standby replicas for level shifts in load: 0 to {MAX_SLO_MISS_COST}; 0 keeps none. "
        f"Absent: {format_number(MISS_COST)}.",
    )
    warm_replicas: int = Field(
        default=0,
        ge=0,
        le=MAX_TIER_REPLICAS,
        description="Replicas that each tier keeps beyond those it needs, up to maxReplicas: 0 to 1000.",
    )
    scale_up: RateLimitSpec | None = Field(
        default=None,
        description="Rate limit on adding replicas to a tier. Absent: the operator adds all needed replicas at once.",
    )
    scale_down: RateLimitSpec | None = Field(
        default=None,
        description="Rate limit on removing replicas from a tier. Absent: the operator removes all unneeded replicas "
        "at once.",
    )
    prefill_per_decode: RatioBounds | None = Field(
        default=None,
        description="Bounds on the number of prefill replicas per decode replica. Absent: each tier follows its own "
        "load.",
    )
    horizon: (
        Annotated[
            str,
            Field(max_length=MAX_DURATION_CHARS),
            duration_rules("1s", "2h", "must be from one second to two hours"),
        ]
        | None
    ) = Field(
        default=None,
        description="Forecast horizon, such as 3m: 1s to 2h. Absent: the measured start-up time.",
    )
    schedule: Annotated[
        tuple[ScheduleEntry, ...],
        Field(max_length=MAX_SCHEDULE_ENTRIES, strict=False),
        ValidationRules(
            ValidationRule[tuple[ScheduleEntry, ...]](
                f"self.all(a, self.exists_one(b, {_SAME_HOURS}))",
                "two entries have the same days, from, until and timeZone: merge them into one",
                _hours_differ,
            )
        ),
    ] = Field(
        default=(),
        json_schema_extra={"x-kubernetes-list-type": "atomic"},
        description="Periods with other replica bounds. If entries overlap, the last one applies.",
    )

    @property
    def headroom_share(self) -> float:
        """Headroom as a share from 0 to 0.9."""
        return units.parse_percent(self.headroom) / 100

    @property
    def horizon_s(self) -> float | None:
        """Forecast horizon in seconds; None: the measured start-up time."""
        return None if self.horizon is None else units.parse_duration(self.horizon)
