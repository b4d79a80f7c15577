"""Go-style durations to numbers and back, and Kubernetes quantities to numbers.

Problem: manifests say `500ms` and `64Gi`; the code computes with seconds and exact numbers. Python's standard library
has neither grammar, and a parser that accepts more than the API server accepts what the cluster later rejects.

Idea: the two grammars as two anchored regular expressions, exact arithmetic in `Decimal`, and canonical durations, so
that parse(format(x)) == x. Every error is a ValueError that shows the input and what is accepted.
"""

import math
import re
import string
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Final

DURATION_PATTERN: Final = r"^([0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h))+$"
QUANTITY_PATTERN: Final = (
    r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+|[KMGTPE]i|[numkMGTPE])?$"  # apimachinery, resource.Quantity
)

_SECONDS: Final = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
}
_DECIMAL: Final = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    "": Decimal(1),
    "k": Decimal(10**3),
    "M": Decimal(10**6),
    "G": Decimal(10**9),
    "T": Decimal(10**12),
    "P": Decimal(10**15),
    "E": Decimal(10**18),
}
_BINARY: Final = {f"{letter}i": Decimal(1024**power) for power, letter in enumerate("KMGTPE", start=1)}

_DURATION = re.compile(DURATION_PATTERN, re.ASCII)
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ns|us|µs|ms|s|m|h)", re.ASCII)
_QUANTITY = re.compile(QUANTITY_PATTERN, re.ASCII)
_QUANTITY_PARTS = re.compile(r"([+-]?[0-9.]+)([eE][+-]?[0-9]+|[A-Za-z]*)", re.ASCII)
_PERCENT = re.compile(r"^([0-9]{1,2}|100)%$", re.ASCII)

MINUTE_S: Final = 60.0
FIGURE_DIGITS: Final = 3  # significant digits of a figure in a message
_MIN_FIGURE: Final = Decimal("1e-12")
_MAX_FIGURE: Final = Decimal("1e15")
_TIME_UNITS: Final = (("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9), ("ps", 1e12))


def parse_duration(text: str) -> float:
    """Seconds in a Go-style duration such as `500ms` or `1m30s`.

    No sign and no bare number are accepted. Raises ValueError.
    """
    if not _DURATION.fullmatch(text):
        raise ValueError(f"{text!r} is not a duration: write a number with a unit (ns, us, ms, s, m, h), such as 500ms")
    return float(sum(Decimal(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text)))


def format_duration(seconds: float) -> str:
    """A Go-style duration for a non-negative number of seconds, rounded to the nanosecond: `1h30m`, `1.5s`, `500ms`."""
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"a duration is a finite number of seconds, zero or more, not {seconds}")
    nanos = round(Decimal(seconds).scaleb(9))
    if nanos < 10**9:
        return _format_below_second(nanos)
    hours, rest = divmod(nanos, 3600 * 10**9)
    minutes, rest = divmod(rest, 60 * 10**9)
    parts = [f"{hours}h" if hours else "", f"{minutes}m" if minutes else ""]
    if rest:
        parts.append(_format_plain(Decimal(rest).scaleb(-9)) + "s")
    return "".join(parts)


def _format_below_second(nanos: int) -> str:
    if nanos == 0:
        return "0s"
    for unit, digits in (("ms", 6), ("us", 3)):
        if nanos >= 10**digits:
            return _format_plain(Decimal(nanos).scaleb(-digits)) + unit
    return f"{nanos}ns"


def parse_quantity(value: str | int) -> Decimal:
    """Return the exact number of a Kubernetes quantity: `64Gi` -> 68719476736, `500m` -> 0.5. Raises ValueError."""
    text = str(value)
    if isinstance(value, bool) or not _QUANTITY.fullmatch(text):
        raise ValueError(f"{text!r} is not a quantity: write a number with an optional suffix, such as 500m, 4 or 64Gi")
    match = _QUANTITY_PARTS.fullmatch(text)
    assert match is not None  # the pattern above is the stricter one
    number, suffix = match.groups()
    scale = _DECIMAL.get(suffix) or _BINARY.get(suffix)
    return Decimal(number) * scale if scale is not None else Decimal(f"{number}{suffix}")


def parse_percent(text: str) -> int:
    """The whole number in a percentage from `0%` to `100%`. Raises ValueError."""
    match = _PERCENT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a percentage: write 0% to 100%")
    return int(match[1])


def _format_plain(number: Decimal) -> str:
    """A Decimal without exponent and without trailing zeros."""
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


# ---------------------------------------------------------------- figures in messages


def round_significant(value: float, digits: int) -> float:
    """Return the finite number rounded to this many significant digits, for documents that programs read."""
    return float(f"{value:.{digits}g}")


def format_figure(value: float, digits: int = FIGURE_DIGITS) -> str:
    """Return a number for people, to `digits` significant digits and without an exponent: 120, 9.1, 0.0031.

    Numbers nearer to zero than 10^-12 are 0. Those beyond 10^15 and those that are not finite are words.
    """
    text = f"{value:.{digits}g}"
    if "e" not in text and "n" not in text:
        return "0" if text == "-0" else text
    if math.isnan(value):
        return "not a number"
    sign = "-" if value < 0 else ""
    if math.isinf(value):
        return f"{sign}infinite"
    rounded = abs(Decimal(text))
    if rounded < _MIN_FIGURE:
        return "0"
    if rounded > _MAX_FIGURE:
        return "below -10^15" if sign else "over 10^15"
    return sign + _format_plain(rounded)


def format_number(value: float) -> str:
    """Return a number from a spec, an option or a constant, to six significant digits.

    An implausible number (1e-300, inf) is returned as it was given, so that its error message shows it.
    """
    is_readable = value == 0.0 or float(_MIN_FIGURE) <= abs(value) <= float(_MAX_FIGURE)
    return format_figure(value, 6) if is_readable else str(value)


def format_rate(per_s: float, digits: int = FIGURE_DIGITS) -> str:
    """A rate of requests: `120 req/s`."""
    return f"{format_figure(per_s, digits)} req/s"


def format_seconds(seconds: float, digits: int = FIGURE_DIGITS) -> str:
    """A measured or computed time as sentences write it: `95 s`, `2.7 s`, `350 ms`, `12 us`.

    It is in whole seconds from 10 s on. Specs have `format_duration`.
    """
    if not math.isfinite(seconds):
        return f"{format_figure(seconds)} s"
    if abs(seconds) >= 10.0:
        return f"{format_figure(round(seconds), 15)} s"
    size = round_significant(abs(seconds), digits)
    for unit, per_second in _TIME_UNITS:
        if size * per_second >= 1.0:
            return f"{format_figure(math.copysign(size, seconds) * per_second, digits)} {unit}"
    return "0 s"


def format_wait(seconds: float) -> str:
    """A time between two events as sentences write it: an age, a window or a remaining time, such as 24 s.

    It is in whole seconds from 3 s on, and 0 below 1 ms: `24 s`, `1.5 s`, `300 ms`, `0 s`.
    """
    if abs(seconds) < 1e-3:
        return "0 s"
    if math.isfinite(seconds) and abs(seconds) >= 3.0:
        return f"{format_figure(round(seconds), 15)} s"
    return format_seconds(seconds, 2)


def format_rounded_duration(seconds: float, digits: int = 2) -> str:
    """A Go-style duration with few digits and one unit, for values that go into a spec or a table: 5.1ms, 1.2s, 95s.

    Raises ValueError for a negative or infinite number of seconds.
    """
    if seconds < 1e-6:
        return format_duration(0.0) if seconds >= 0.0 else format_duration(seconds)
    rounded = round_significant(seconds, digits)
    return format_duration(rounded) if rounded < 1.0 else f"{format_figure(rounded, 15)}s"


MESSAGE_FORMATS: Final[dict[str, Callable[[float], str]]] = {
    "figure": format_figure,
    "rate": format_rate,
    "seconds": format_seconds,
    "wait": format_wait,
}


class _MessageFormatter(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        named = MESSAGE_FORMATS.get(format_spec)
        text: str = named(value) if named is not None else super().format_field(value, format_spec)
        return text


_MESSAGE_FORMATTER: Final = _MessageFormatter()


def format_message(template: str, values: Sequence[object]) -> str:
    """Fill a template as `str.format` does; named formats such as `{:rate}` format with the functions above."""
    return _MESSAGE_FORMATTER.vformat(template, values, {})
