"""`spec.scaling.schedule`: replica bounds by weekday and time of day, and their windows in epoch seconds.

Problem: users write "from 08:00 to 20:00 in Berlin, Monday to Friday"; the core uses seconds since the epoch. Twice a
year the local clock skips or repeats an hour.

Idea: each entry yields windows for the days around now, by the rules of its time zone. A window begins the first time
the clock shows `from` and ends the last time it shows `until`. A skipped time counts as the moment of the skip.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from typing import Annotated, ClassVar, Final, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field

from plimsoll.api.v1alpha1.api_model import ApiModel, SetList, ValidationRule, ValidationRules, matching
from plimsoll.api.v1alpha1.tiers import MAX_TIER_REPLICAS, replicas_in_order
from plimsoll.core.autoscaling.scaling_policy import ScheduleWindow

Day = Literal["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
DAYS: Final[tuple[Day, ...]] = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
HOUR_S: Final = 3600
DAYS_AHEAD: Final = 8  # a week and a day contain the next window of every entry

_HOUR_PATTERN = "([01][0-9]|2[0-3]):[0-5][0-9]"
_IS_ZONE_NAME = matching(
    "^[A-Z][A-Za-z0-9_+-]*(/[A-Z][A-Za-z0-9_+-]*)*$",
    "must be the name of a time zone, such as UTC or Europe/Berlin",
)


def _is_zone(name: str) -> bool:
    assert _IS_ZONE_NAME.holds is not None
    if not _IS_ZONE_NAME.holds(name):
        return True  # the rule on the form reports it
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # OSError: a directory of zones, such as Europe
        return False
    return True


TimeOfDay = Annotated[
    str,
    Field(max_length=5),
    ValidationRules(matching(f"^{_HOUR_PATTERN}$", "must be a time of day from 00:00 to 23:59, such as 08:00")),
]
TimeOfDayOrMidnight = Annotated[
    str,
    Field(max_length=5),
    ValidationRules(matching(f"^({_HOUR_PATTERN}|24:00)$", "must be a time of day from 00:00 to 24:00, such as 20:00")),
]
ZoneName = Annotated[
    str,
    Field(max_length=64),
    ValidationRules(
        _IS_ZONE_NAME,
        # getHours fails for a name that the API server's time zone database lacks; this message then applies.
        ValidationRule[str](
            f"!({_IS_ZONE_NAME.cel}) || (self != 'Local' && timestamp('2000-01-01T00:00:00Z').getHours(self) >= 0)",
            "must be in the time zone database, such as UTC or Europe/Berlin",
            _is_zone,
        ),
    ),
]
MinReplicas = Annotated[int, Field(ge=0, le=MAX_TIER_REPLICAS)]
MaxReplicas = Annotated[int, Field(ge=1, le=MAX_TIER_REPLICAS)]


class ScheduleEntry(ApiModel):
    """A daily period on some weekdays, with replica bounds that replace those of each tier."""

    days: (
        Annotated[
            tuple[Day, ...],
            Field(max_length=7, strict=False),
            SetList(),
            ValidationRules(
                ValidationRule[tuple[Day, ...]](
                    "self.size() > 0", "must have at least one day; omit the field for every day", bool
                )
            ),
        ]
        | None
    ) = Field(default=None, description="Days on which the period begins, Mon to Sun. Absent: every day.")
    from_: TimeOfDay = Field(alias="from", description="Start of the period in timeZone, as HH:MM.")
    until: TimeOfDayOrMidnight = Field(
        description="End of the period in timeZone, as HH:MM up to 24:00. It is on the next day if it is not later "
        "than from."
    )
    time_zone: ZoneName = Field(
        default="UTC", description="Name of the time zone in the IANA database, such as Europe/Berlin."
    )
    min_replicas: MinReplicas | None = Field(
        default=None,
        description="Replaces each tier's minReplicas, up to the maxReplicas in force: 0 to 1000. The operator orders "
        "the replicas one start-up time before the period begins. Absent: the tier's minReplicas.",
    )
    max_replicas: MaxReplicas | None = Field(
        default=None, description="Replaces each tier's maxReplicas: 1 to 1000. Absent: the tier's maxReplicas."
    )

    rules: ClassVar[tuple[ValidationRule[ScheduleEntry], ...]] = (
        ValidationRule(
            "has(self.minReplicas) || has(self.maxReplicas)",
            "needs minReplicas or maxReplicas",
            lambda own: own.min_replicas is not None or own.max_replicas is not None,
            reason="FieldValueRequired",
        ),
        replicas_in_order(),
        ValidationRule(
            "self.from != self.until",
            "until must differ from from; use 00:00 and 24:00 for a whole day",
            lambda own: own.from_ != own.until,
            field=".until",
        ),
    )

    def upcoming_windows(self, now_s: float) -> Iterator[ScheduleWindow]:
        """Yield the windows, in order, that end after `now_s` (epoch seconds) and begin within a week."""
        zone = ZoneInfo(self.time_zone)
        today = datetime.fromtimestamp(now_s, zone).date()
        for day_offset in range(-1, DAYS_AHEAD):  # from yesterday: a window may span midnight
            day = today + timedelta(days=day_offset)
            if DAYS[day.weekday()] in (self.days or DAYS):
                window = self._window(day, zone)
                if window.until_s > max(now_s, window.from_s):  # the clock may skip a whole window
                    yield window

    def _window(self, day: date, zone: ZoneInfo) -> ScheduleWindow:
        last = day if self.until > self.from_ else day + timedelta(days=1)
        return ScheduleWindow(
            _to_timestamp(_local(day, self.from_), zone, first=True),
            _to_timestamp(_local(last, self.until), zone, first=False),
            self.min_replicas,
            self.max_replicas,
        )


def upcoming_windows(schedule: tuple[ScheduleEntry, ...], now_s: float) -> tuple[ScheduleWindow, ...]:
    """Return the windows of all entries that had not ended at the last full hour. The last of overlapping ones applies.

    The result is cached for an hour, because calendar arithmetic is too slow for every tick of many services.
    """
    return _windows_from_hour(schedule, int(now_s // HOUR_S)) if schedule else ()


@functools.lru_cache(maxsize=4096)
def _windows_from_hour(schedule: tuple[ScheduleEntry, ...], hour: int) -> tuple[ScheduleWindow, ...]:
    return tuple(window for entry in schedule for window in entry.upcoming_windows(float(hour * HOUR_S)))


def _local(day: date, time_of_day: str) -> datetime:
    hours, minutes = time_of_day.split(":")
    return datetime.combine(day, time()) + timedelta(hours=int(hours), minutes=int(minutes))


def _to_timestamp(local: datetime, zone: ZoneInfo, *, first: bool) -> float:
    """Return when a zone's clock first or last shows a local time; for a skipped time, the moment of the skip."""
    early, late = (local.replace(tzinfo=zone, fold=fold).timestamp() for fold in (0, 1))
    if early <= late:
        return early if first else late
    timestamps = range(int(late), int(early) + 1)
    index = bisect_left(timestamps, True, key=lambda moment: _local_time(moment, zone) >= local)
    return float(timestamps[index])


def _local_time(moment: int, zone: ZoneInfo) -> datetime:
    return datetime.fromtimestamp(moment, zone).replace(tzinfo=None)
