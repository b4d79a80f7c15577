"""The constraints on scaling, its schedule, and cost, each broken once or more."""

from __future__ import annotations

from typing import Any

from plimsoll.api.v1alpha1.schedule import DAYS
from tests.api.cases import BAD_DURATIONS, DURATION, TOO_MANY_DIGITS, Case, single_edit, text_cases
from tests.api.manifests import aggregated

SCALING, SCHEDULE, COST = "spec.scaling", "spec.scaling.schedule", "spec.cost"
PERCENTAGE = "must be a whole percentage from 0% to 90%"
BAD_DECIMALS = ("", "-1", "+1", "1e3", ".5", "1.", "1,5", "half", "NaN", "Infinity", " 1", "0x1", "1/2", "1:2", "1\n")


def _digits(texts: str) -> str:
    return f"{len(texts) * '1'}s"


MODES = [
    single_edit(f"{SCALING}.mode", "auto", "must be 'Auto', 'Recommend' or 'Off', not 'auto'", "Unsupported value"),
    single_edit(f"{SCALING}.mode", "", "must be 'Auto', 'Recommend' or 'Off', not ''", "Unsupported value"),
    *text_cases(
        f"{SCALING}.headroom", 8, PERCENTAGE, ("91%", "100%", "10", "0.1", "-1%", "1.5%", "", "010%"), may_be_empty=True
    ),
    single_edit(f"{SCALING}.sloMissCost", -1, "must be at least 0", "greater than or equal to 0"),
    single_edit(f"{SCALING}.sloMissCost", 100_001, "must be at most 100000", "less than or equal to 100000"),
    single_edit(f"{SCALING}.warmReplicas", -1, "must be at least 0", "greater than or equal to 0"),
    single_edit(f"{SCALING}.warmReplicas", 1001, "must be at most 1000", "less than or equal to 1000"),
    *[single_edit(f"{SCALING}.horizon", value, DURATION) for value in BAD_DURATIONS],
    *[
        single_edit(f"{SCALING}.horizon", value, "must be from one second to two hours")
        for value in ("0s", "999ms", "2h1ns", "121m", "7201s")
    ],
    *text_cases(f"{SCALING}.horizon", 32, may_be_empty=True, build=_digits),
]


def _rates(name: str) -> list[Case]:
    at = f"{SCALING}.{name}"

    def limit(path: str, replicas: int, per: str, says: str, server: str = "") -> Case:
        return single_edit(at, {"replicas": replicas, "per": per}, says, server, at=f"{at}.{path}")

    return [
        single_edit(at, {"per": "1m"}, "is required", "Required value", at=f"{at}.replicas"),
        single_edit(at, {"replicas": 1}, "is required", "Required value", at=f"{at}.per"),
        limit("replicas", 0, "1m", "must be at least 1", "greater than or equal to 1"),
        limit("replicas", 1001, "1m", "must be at most 1000", "less than or equal to 1000"),
        *[limit("per", 1, per, DURATION) for per in BAD_DURATIONS],
        *[limit("per", 1, per, "must be longer than zero and at most 24 hours") for per in ("0s", "24h1ns", "1441m")],
        limit("per", 1, TOO_MANY_DIGITS, "must have at most 32 characters", "Too long"),
    ]


RATES = [case for name in ("scaleUp", "scaleDown") for case in _rates(name)]


def _ratio(bounds: dict[str, Any], field: str, says: str, server: str = "") -> Case:
    return single_edit(f"{SCALING}.prefillPerDecode", bounds, says, server, at=f"{SCALING}.prefillPerDecode{field}")


RATIOS = [
    _ratio({}, "", "needs min or max"),
    *[
        _ratio({"min": value}, ".min", "must be from 0 to 1000 with at most 3 decimals")
        for value in (-1, 1001, "1000.1", "0.0001", "1000.000", *BAD_DECIMALS)
    ],
    *[
        _ratio({"max": value}, ".max", "must be above 0 and at most 1000 with at most 3 decimals")
        for value in (0, "0", "0.000", -1, 1001, *BAD_DECIMALS)
    ],
    *[
        _ratio(
            {"min": least, "max": most}, ".max", f"max {most} must not be below min {least}: raise max, or lower min"
        )
        for least, most in ((2, 1), ("0.5", "0.499"), (1, "0.9"), ("9", "8.999"), ("10", "9"), (1000, 999))
    ],
    _ratio({"min": "1" * 9}, ".min", "must have at most 8 characters", "Too long"),
    _ratio({"max": "1" * 9}, ".max", "must have at most 8 characters", "Too long"),
    single_edit(
        f"{SCALING}.prefillPerDecode",
        {"min": 1},
        "prefillPerDecode is allowed only with prefill and decode tiers, not with serve",
        base=aggregated,
    ),
    single_edit(
        "spec.whenPrefillUnavailable",
        "Reject",
        "Reject is allowed only with prefill and decode tiers: other engines compute each prompt themselves",
        base=aggregated,
    ),
    single_edit("spec.whenPrefillUnavailable", "reject", "be 'Serve' or 'Reject'", "Unsupported value"),
]

_ENTRY = {"from": "08:00", "until": "20:00", "minReplicas": 2}
_HOURS = {"from": "08:00", "until": "20:00"}


def _entry(edits: dict[str, Any], field: str, says: str, server: str = "", **more: Any) -> Case:
    """An entry with other fields; a field that is None is left out."""
    entry = {name: value for name, value in {**_ENTRY, **edits}.items() if value is not None}
    return single_edit(SCHEDULE, [entry], says, server, at=f"{SCHEDULE}[0]{field}", **more)


def _twice(**edits: Any) -> Case:
    entry = {**_ENTRY, **edits}
    other = {**entry, "minReplicas": 3}
    if "days" in entry:
        other["days"] = entry["days"][::-1]
    return single_edit(
        SCHEDULE, [entry, {**_ENTRY, "until": "21:00"}, other], "two entries have the same days, from, until"
    )


_BAD_HOURS = ("8:00", "24:01", "25:00", "12:60", "8", "", "1200", "8 am", "-1:00", "08:00\n")

SCHEDULES = [
    single_edit(
        SCHEDULE, [{**_ENTRY, "until": f"21:{i}"} for i in range(10, 27)], "must have at most 16 entries", "Too many"
    ),
    _entry({"from": None}, ".from", "is required", "Required value"),
    _entry({"until": None}, ".until", "is required", "Required value"),
    _entry({"minReplicas": None}, "", "needs minReplicas or maxReplicas"),
    *[
        case
        for name, least in (("minReplicas", 0), ("maxReplicas", 1))
        for case in (
            _entry({name: least - 1}, f".{name}", f"must be at least {least}", f"greater than or equal to {least}"),
            _entry({name: 1001}, f".{name}", "must be at most 1000", "less than or equal to 1000"),
        )
    ],
    _entry(
        {"minReplicas": 3, "maxReplicas": 2}, ".maxReplicas", "maxReplicas 2 must not be below minReplicas 3: raise"
    ),
    *[
        _entry({"from": hour}, ".from", "must be a time of day from 00:00 to 23:59")
        for hour in (*_BAD_HOURS[:4], "24:00")
    ],
    *[_entry({"until": hour}, ".until", "must be a time of day from 00:00 to 24:00") for hour in _BAD_HOURS[:4]],
    *[_entry({"from": hour}, ".from", "must be a time of day") for hour in _BAD_HOURS[4:] if len(hour) < 6],
    _entry({"from": "08:00\n"}, ".from", "must have at most 5 characters", "Too long"),
    _entry({"until": "08:00:00"}, ".until", "must have at most 5 characters", "Too long"),
    _entry({"until": "08:00"}, ".until", "until must differ from from; use 00:00 and 24:00 for a whole day"),
    _entry({"days": []}, ".days", "must have at least one day; omit the field for every day"),
    _entry(
        {"days": [*DAYS, "Mon"]},
        ".days",
        "must have at most 7 entries",
        "Too many",
        typed=(f"{SCHEDULE}[0].days", "duplicate entries"),
    ),
    *[
        _entry(
            {"days": ["Mon", day]},
            ".days[1]",
            "must be 'Mon', 'Tue', 'Wed', 'Thu', 'Fri', 'Sat' or 'Sun'",
            "Unsupported value",
        )
        for day in ("mon", "Monday", "", "Mon-Fri")
    ],
    _entry(
        {"days": ["Mon", "Tue", "Mon"]},
        ".days[2]",
        "Mon is listed twice",
        "Duplicate value",
        typed=(f"{SCHEDULE}[0].days", "duplicate entries"),
    ),
    *[
        _entry({"timeZone": zone}, ".timeZone", "must be the name of a time zone, such as UTC or Europe/Berlin")
        for zone in (
            "",
            "+02:00",
            "02:00",
            "utc",
            "Europe/",
            "/Berlin",
            "Europe Berlin",
            "../UTC",
            "Europe/../UTC",
            "UTC\n",
        )
    ],
    *[
        _entry({"timeZone": zone}, ".timeZone", "must be in the time zone database, such as UTC or Europe/Berlin")
        for zone in ("Europe/Atlantis", "Europe", "Local", "Berlin", "CEST")
    ],
    _entry({"timeZone": "A" * 65}, ".timeZone", "must have at most 64 characters", "Too long"),
    _twice(),
    _twice(days=["Mon", "Tue"]),
    _twice(timeZone="Europe/Berlin"),
]


def _price(cost: dict[str, Any], field: str, says: str, server: str = "") -> Case:
    return single_edit(COST, cost, says, server, at=f"{COST}.{field}")


COSTS = [
    _price({}, "gpuHour", "is required", "Required value"),
    *[
        _price({"gpuHour": value}, "gpuHour", "must be above 0 and below a billion with at most 6 decimals")
        for value in (0, "0", "0.000000", -1, 1_000_000_000, "1000000000", "0.0000001", "$2", "2.50 USD", *BAD_DECIMALS)
    ],
    _price(
        {"gpuHour": 2.5},
        "gpuHour",
        'must be an integer or a string in quotes, such as 3 or "2.50"',
        "must be of type integer,string",
    ),
    _price({"gpuHour": "1" * 17}, "gpuHour", "must have at most 16 characters", "Too long"),
    *[
        _price(
            {"gpuHour": 1, "currency": value},
            "currency",
            "must be an ISO 4217 currency code of three capital letters, such as USD",
        )
        for value in ("", "usd", "US", "EURO", "$", "€", "US1", "USD\n")
    ],
    _price({"gpuHour": 1, "currency": "DOLLARSUS"}, "currency", "must have at most 8 characters", "Too long"),
]

SCALING_CASES = [*MODES, *RATES, *RATIOS, *SCHEDULES, *COSTS]
