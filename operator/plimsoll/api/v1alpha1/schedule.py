"""Other bounds at certain hours: a schedule in the words of the week, and its windows in time.

Problem: users say "from 08:00 to 20:00 in Berlin, Monday to Friday"; the core knows seconds since the epoch. Twice a
year the clock skips an hour or shows one twice.

Idea: each entry becomes its windows of the days around now, through the time zone's own rules. A window begins when the
clock first shows its beginning and ends when it last shows its end; a time that is skipped is shown at the skip.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from typing import Annotated, ClassVar, Final, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import Field

from plimsoll.api.v1alpha1.base import Distinct, Model, Rule, Rules, matching
from plimsoll.api.v1alpha1.tiers import MAX_REPLICAS
from plimsoll.core.scaling import Window

Day = Literal["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
DAYS: Final[tuple[Day, ...]] = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
HOUR_S: Final = 3600
DAYS_AHEAD: Final = 8  # a week and a day: the next window of every entry, whatever the hour

_HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]"
_IS_ZONE_NAME = matching(
    "^[A-Z][A-Za-z0-9_+-]*(/[A-Z][A-Za-z0-9_+-]*)*$",
    "must be a time zone's name, such as UTC or Europe/Berlin",
)


def _is_zone(name: str) -> bool:
    assert _IS_ZONE_NAME.holds is not None
    if not _IS_ZONE_NAME.holds(name):
        return True  # said by the rule on its form
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # OSError: a folder of zones, such as Europe
        return False
    return True


Clock = Annotated[
    str,
    Field(max_length=5),
    Rules(matching(f"^{_HOUR}$", "must be a time of day from 00:00 to 23:59, such as 08:00")),
]
ClockOrMidnight = Annotated[
    str,
    Field(max_length=5),
    Rules(matching(f"^({_HOUR}|24:00)$", "must be a time of day from 00:00 to 24:00, such as 20:00")),
]
ZoneName = Annotated[
    str,
    Field(max_length=64),
    Rules(
        _IS_ZONE_NAME,
        # A name that the API server's own time zones lack is an error in getHours, told with this message.
        Rule[str](
            f"!({_IS_ZONE_NAME.cel}) || (self != 'Local' && timestamp('2000-01-01T00:00:00Z').getHours(self) >= 0)",
            "must be in the time zone database, such as UTC or Europe/Berlin",
            _is_zone,
        ),
    ),
]
Least = Annotated[int, Field(ge=0, le=MAX_REPLICAS)]
Most = Annotated[int, Field(ge=1, le=MAX_REPLICAS)]


class ScheduleEntry(Model):
    """Hours of certain days in which each tier has other bounds."""

    days: (
        Annotated[
            tuple[Day, ...],
            Field(max_length=7, strict=False),
            Distinct(),
            Rules(Rule[tuple[Day, ...]]("self.size() > 0", "must name a day; leave it out for every day", bool)),
        ]
        | None
    ) = Field(default=None, description="Days on which it begins, Mon to Sun; absent: every day.")
    from_: Clock = Field(alias="from", description="When it begins, as HH:MM on the clock of timeZone.")
    until: ClockOrMidnight = Field(
        description="When it ends, as HH:MM up to 24:00; on the next day where that is not later than its beginning."
    )
    time_zone: ZoneName = Field(
        default="UTC", description="Time zone of the hours, by its name in the IANA database, such as Europe/Berlin."
    )
    min_replicas: Least | None = Field(
        default=None,
        description="In place of each tier's minReplicas, but never above the maxReplicas of the hour; ordered one "
        "start-up before it begins, so that the engines are ready in time. 0 to 1000; absent: the tier's.",
    )
    max_replicas: Most | None = Field(
        default=None, description="In place of each tier's maxReplicas. 1 to 1000; absent: the tier's."
    )

    rules: ClassVar[tuple[Rule[ScheduleEntry], ...]] = (
        Rule(
            "has(self.minReplicas) || has(self.maxReplicas)",
            "needs minReplicas or maxReplicas",
            lambda own: own.min_replicas is not None or own.max_replicas is not None,
            reason="FieldValueRequired",
        ),
        Rule(
            "!has(self.minReplicas) || !has(self.maxReplicas) || self.maxReplicas >= self.minReplicas",
            "maxReplicas must not be below minReplicas",
            lambda own: own.min_replicas is None or own.max_replicas is None or own.max_replicas >= own.min_replicas,
            field=".maxReplicas",
        ),
        Rule(
            "self.from != self.until",
            "until must differ from from; a whole day is from 00:00 until 24:00",
            lambda own: own.from_ != own.until,
            field=".until",
        ),
    )

    def windows(self, now_s: float) -> Iterator[Window]:
        """Its windows that end after now_s and begin within a week, in their order; seconds since the epoch."""
        zone = ZoneInfo(self.time_zone)
        today = datetime.fromtimestamp(now_s, zone).date()
        for ahead in range(-1, DAYS_AHEAD):  # from yesterday: it may pass midnight
            day = today + timedelta(days=ahead)
            if DAYS[day.weekday()] in (self.days or DAYS):
                window = self._window(day, zone)
                if window.until_s > max(now_s, window.from_s):  # the clock may skip a whole window
                    yield window

    def _window(self, day: date, zone: ZoneInfo) -> Window:
        last = day if self.until > self.from_ else day + timedelta(days=1)
        return Window(
            _moment(_local(day, self.from_), zone, first=True),
            _moment(_local(last, self.until), zone, first=False),
            self.min_replicas,
            self.max_replicas,
        )


def windows(schedule: tuple[ScheduleEntry, ...], now_s: float) -> tuple[Window, ...]:
    """The windows of all entries that had not ended at the last full hour; where two overlap, the later entry counts.

    They are made once an hour: a tick of many services has no time for calendars.
    """
    return _windows(schedule, int(now_s // HOUR_S)) if schedule else ()


@functools.lru_cache(maxsize=4096)
def _windows(schedule: tuple[ScheduleEntry, ...], hour: int) -> tuple[Window, ...]:
    return tuple(window for entry in schedule for window in entry.windows(float(hour * HOUR_S)))


def _local(day: date, clock: str) -> datetime:
    hours, minutes = clock.split(":")
    return datetime.combine(day, time()) + timedelta(hours=int(hours), minutes=int(minutes))


def _moment(local: datetime, zone: ZoneInfo, *, first: bool) -> float:
    """When a zone's clocks show a time: the first or the last time that they do, or, of a time skipped, the skip."""
    early, late = (local.replace(tzinfo=zone, fold=fold).timestamp() for fold in (0, 1))
    if early <= late:
        return early if first else late
    moments = range(int(late), int(early) + 1)
    reached = bisect_left(moments, True, key=lambda moment: _shown(moment, zone) >= local)
    return float(moments[reached])


def _shown(moment: int, zone: ZoneInfo) -> datetime:
    return datetime.fromtimestamp(moment, zone).replace(tzinfo=None)
