"""Values that manifests write as text: durations, percentages, decimal numbers.

A CRD has no floats, and each of these has a form and a range. The form is a rule of its own, so that a wrong unit and a
value out of range are told apart; the range passes over what has the wrong form.
"""

from __future__ import annotations

from typing import Final

from plimsoll.api.v1alpha1.base import Rule, Rules, compiled, matching, quote
from plimsoll.core import units

DURATION_LENGTH: Final = 32
LEAST_S: Final = 1e-9  # the API server counts whole nanoseconds, so that less is zero

IS_DURATION: Final = matching(
    units.DURATION_PATTERN.replace(r"\.", "[.]"),
    "must be a duration with a unit (us, ms, s, m, h), such as 500ms or 1.5s",
)


def duration(least: str, most: str, message: str, *, above: bool = False) -> Rules[str]:
    """Rules of a duration from `least` to `most`; with `above`, `least` itself is too short. message: the range."""
    low_s, high_s = units.parse_duration(least), units.parse_duration(most)
    sign = ">" if above else ">="

    def holds(text: str) -> bool:
        try:
            seconds = units.parse_duration(text)
        except ValueError:
            return True  # said by the rule on its form
        long_enough = seconds >= max(low_s, LEAST_S) if above else seconds >= low_s
        return long_enough and seconds <= high_s

    in_range = f"duration(self) {sign} duration({quote(least)}) && duration(self) <= duration({quote(most)})"
    return Rules(IS_DURATION, Rule[str](f"!({IS_DURATION.cel}) || ({in_range})", message, holds))


def decimal(pattern: str, message: str, *, zero: bool = True) -> Rule[int | str]:
    """A rule on a number that is written whole or as text; `pattern` is its form. zero: whether it may be 0."""
    forms = [pattern] if zero else [pattern, "[1-9]"]
    found = [compiled(form) for form in forms]
    return Rule(
        " && ".join(f"string(self).matches({quote(form)})" for form in forms),
        message,
        lambda value: all(form.search(str(value)) for form in found),
    )
