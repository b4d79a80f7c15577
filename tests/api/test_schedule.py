"""Hours of the week become stretches of time: over midnight, over the clock's two changes a year, and far from home."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

import pytest

from plimsoll.api.v1alpha1 import ScheduleEntry
from plimsoll.api.v1alpha1.schedule import DAYS, upcoming_windows

HOUR_S = 3600.0
WEEK_S = 7 * 24 * HOUR_S


def at(text: str) -> float:
    """Seconds since the epoch of a moment in UTC, such as 2026-03-29 01:00."""
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


def entry(start: str, end: str, *days: str, zone: str = "UTC", **more: Any) -> ScheduleEntry:
    written = {"from": start, "until": end, "timeZone": zone, "minReplicas": 2, **more}
    return ScheduleEntry.model_validate(written | ({"days": list(days)} if days else {}))


def spans(one: ScheduleEntry, now: str, count: int = 1) -> list[tuple[str, str]]:
    """The next windows, in UTC, as `10-25 00:15`."""
    found = list(one.upcoming_windows(at(now)))[:count]
    return [(_format_time(window.from_s), _format_time(window.until_s)) for window in found]


def _format_time(moment_s: float) -> str:
    return datetime.fromtimestamp(moment_s, UTC).strftime("%m-%d %H:%M")


@pytest.mark.parametrize(
    ("one", "now", "expected"),
    [
        (entry("08:00", "20:00"), "2026-06-10 07:59", [("06-10 08:00", "06-10 20:00")]),
        (entry("08:00", "20:00"), "2026-06-10 19:59", [("06-10 08:00", "06-10 20:00")]),
        (entry("08:00", "20:00"), "2026-06-10 20:00", [("06-11 08:00", "06-11 20:00")]),
        (entry("22:00", "06:00"), "2026-06-10 05:59", [("06-09 22:00", "06-10 06:00")]),
        (entry("22:00", "06:00"), "2026-06-10 06:00", [("06-10 22:00", "06-11 06:00")]),
        (entry("00:00", "24:00"), "2026-06-10 23:59", [("06-10 00:00", "06-11 00:00")]),
        (entry("12:00", "11:59"), "2026-06-10 11:58", [("06-09 12:00", "06-10 11:59")]),
        (entry("23:59", "00:00"), "2026-06-10 12:00", [("06-10 23:59", "06-11 00:00")]),
        (entry("22:00", "06:00", "Fri"), "2026-06-13 05:00", [("06-12 22:00", "06-13 06:00")]),
        (entry("22:00", "06:00", "Sat"), "2026-06-13 05:00", [("06-13 22:00", "06-14 06:00")]),
        (entry("08:00", "09:00", "Wed"), "2026-06-10 09:00", [("06-17 08:00", "06-17 09:00")]),
        (entry("08:00", "09:00", zone="Asia/Kathmandu"), "2026-06-10 00:00", [("06-10 02:15", "06-10 03:15")]),
        (entry("08:00", "09:00", "Thu", zone="Pacific/Auckland"), "2026-06-10 00:00", [("06-10 20:00", "06-10 21:00")]),
        (entry("20:00", "21:00", "Wed", zone="Pacific/Honolulu"), "2026-06-11 00:00", [("06-11 06:00", "06-11 07:00")]),
        (entry("00:00", "24:00", zone="Etc/GMT+12"), "2026-06-10 11:59", [("06-09 12:00", "06-10 12:00")]),
        (entry("08:00", "09:00"), "2028-02-29 09:30", [("03-01 08:00", "03-01 09:00")]),
        (entry("22:00", "02:00"), "2026-12-31 23:00", [("12-31 22:00", "01-01 02:00")]),
        (entry("08:00", "09:00"), "1970-01-01 00:00", [("01-01 08:00", "01-01 09:00")]),
    ],
)
def test_schedule_next_windows_are_in_utc(one: ScheduleEntry, now: str, expected: list[tuple[str, str]]) -> None:
    assert spans(one, now) == expected


BERLIN = "Europe/Berlin"  # in 2026 the clock goes on at 01:00 UTC on 29 March, and back at 01:00 UTC on 25 October


@pytest.mark.parametrize(
    ("one", "now", "expected"),
    [
        (entry("08:00", "20:00", zone=BERLIN), "2026-03-28 00:00", ("03-28 07:00", "03-28 19:00")),
        (entry("08:00", "20:00", zone=BERLIN), "2026-03-29 00:00", ("03-29 06:00", "03-29 18:00")),
        (entry("00:00", "24:00", zone=BERLIN), "2026-03-29 00:00", ("03-28 23:00", "03-29 22:00")),  # 23 hours
        (entry("00:00", "24:00", zone=BERLIN), "2026-10-25 00:00", ("10-24 22:00", "10-25 23:00")),  # 25 hours
        (entry("22:00", "06:00", zone=BERLIN), "2026-03-29 00:00", ("03-28 21:00", "03-29 04:00")),  # 7 hours
        (entry("22:00", "06:00", zone=BERLIN), "2026-10-25 00:00", ("10-24 20:00", "10-25 05:00")),  # 9 hours
        # A time that is skipped is at the skip, for a beginning and for an end.
        (entry("02:00", "04:00", zone=BERLIN), "2026-03-29 00:00", ("03-29 01:00", "03-29 02:00")),
        (entry("02:30", "04:00", zone=BERLIN), "2026-03-29 00:00", ("03-29 01:00", "03-29 02:00")),
        (entry("02:30", "03:10", zone=BERLIN), "2026-03-29 00:00", ("03-29 01:00", "03-29 01:10")),
        (entry("01:00", "02:30", zone=BERLIN), "2026-03-29 00:00", ("03-29 00:00", "03-29 01:00")),
        (entry("01:00", "03:00", zone=BERLIN), "2026-03-29 00:00", ("03-29 00:00", "03-29 01:00")),
        # A window that is skipped whole is not there on that day.
        (entry("02:15", "02:45", zone=BERLIN), "2026-03-29 00:00", ("03-30 00:15", "03-30 00:45")),
        # Of a time that comes twice, the first begins and the last ends.
        (entry("02:15", "02:45", zone=BERLIN), "2026-10-25 00:00", ("10-25 00:15", "10-25 01:45")),
        (entry("02:30", "04:00", zone=BERLIN), "2026-10-25 00:00", ("10-25 00:30", "10-25 03:00")),
        (entry("01:00", "02:30", zone=BERLIN), "2026-10-24 23:00", ("10-24 23:00", "10-25 01:30")),
        (entry("03:00", "04:00", zone=BERLIN), "2026-10-25 00:00", ("10-25 02:00", "10-25 03:00")),
        # Half an hour, at the other end of the world; and a day that one island never had.
        (entry("02:10", "05:00", zone="Australia/Lord_Howe"), "2026-10-03 12:00", ("10-03 15:30", "10-03 18:00")),
        (entry("01:40", "01:50", zone="Australia/Lord_Howe"), "2026-04-04 12:00", ("04-04 14:40", "04-04 15:20")),
        (entry("23:00", "01:00", "Thu", zone="Pacific/Apia"), "2011-12-29 12:00", ("12-30 09:00", "12-30 10:00")),
    ],
)
def test_schedule_window_follows_daylight_saving(one: ScheduleEntry, now: str, expected: tuple[str, str]) -> None:
    assert spans(one, now) == [expected]


def test_schedule_skipped_day_has_no_window() -> None:
    one = entry("08:00", "20:00", "Fri", zone="Pacific/Apia")
    assert spans(one, "2011-12-28 00:00") == []
    assert spans(one, "2011-12-31 00:00") == [("01-05 18:00", "01-06 06:00")]


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kolkata", "America/Los_Angeles", "Pacific/Kiritimati", "Etc/GMT+12"])
@pytest.mark.parametrize(
    ("start", "end", "days"),
    [
        ("08:00", "20:00", ()),
        ("22:00", "06:00", ("Fri", "Sun")),
        ("00:00", "24:00", ("Sat",)),
        ("12:00", "11:00", ("Mon", "Tue")),
        ("17:30", "00:00", ("Wed",)),
    ],
)
def test_schedule_window_contains_moment_iff_local_clock_does(
    start: str, end: str, days: Sequence[str], zone: str
) -> None:
    one, begun_s = entry(start, end, *days, zone=zone), at("2026-06-07 03:07")
    found = list(one.upcoming_windows(begun_s))
    for step in range(int(WEEK_S // (17 * 60))):
        moment_s = begun_s + step * 17 * 60
        inside = any(window.from_s <= moment_s < window.until_s for window in found)
        assert inside == _is_inside_by_local_clock(moment_s, start, end, days or DAYS, zone), _format_time(moment_s)


def _is_inside_by_local_clock(moment_s: float, start: str, end: str, days: Sequence[str], zone: str) -> bool:
    local = datetime.fromtimestamp(moment_s, ZoneInfo(zone))
    clock, today = local.strftime("%H:%M"), DAYS[local.weekday()]
    yesterday = DAYS[(local - timedelta(days=1)).weekday()]
    if start < end:
        return today in days and start <= clock < end
    return (today in days and clock >= start) or (yesterday in days and clock < end)


@pytest.mark.parametrize("day", DAYS)
@pytest.mark.parametrize("hour", range(0, 24, 5))
def test_schedule_always_has_next_window(day: str, hour: int) -> None:
    one = entry("22:00", "03:00", day, zone="America/St_Johns")
    for week in range(53):
        now_s = at("2026-01-01 00:00") + week * WEEK_S + hour * HOUR_S
        first, *_ = one.upcoming_windows(now_s)
        assert first.until_s > now_s
        assert first.from_s < now_s + WEEK_S + HOUR_S


def test_schedule_windows_are_ordered_and_carry_bounds() -> None:
    found = list(entry("22:00", "06:00", zone=BERLIN, maxReplicas=7).upcoming_windows(at("2026-10-24 12:00")))
    assert len(found) == 8
    assert {(window.min_replicas, window.max_replicas) for window in found} == {(2, 7)}
    assert all(one.until_s <= other.from_s for one, other in pairwise(found))


def test_schedule_accepts_every_time_zone() -> None:
    for zone in available_timezones() - {"localtime"}:
        assert entry("08:00", "20:00", zone=zone).time_zone == zone


def test_schedule_entries_keep_their_order() -> None:
    early, late = entry("08:00", "20:00", minReplicas=2), entry("07:00", "19:00", minReplicas=9)
    found = upcoming_windows((early, late), at("2026-06-10 12:00"))
    assert [window.min_replicas for window in found] == [2] * 8 + [9] * 8


def test_schedule_windows_are_constant_within_an_hour() -> None:
    one = entry("08:00", "20:30")
    before, after = upcoming_windows((one,), at("2026-06-10 20:00")), upcoming_windows((one,), at("2026-06-10 20:59"))
    assert before == after
    assert before[0].until_s == at("2026-06-10 20:30")
    assert upcoming_windows((one,), at("2026-06-10 21:00")) == before[1:]


def test_schedule_empty_has_no_windows() -> None:
    assert upcoming_windows((), 0.0) == ()
