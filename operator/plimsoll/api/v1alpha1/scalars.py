"""Validation rules for durations and decimal numbers that manifests write as strings.

A CRD has no floats, so each such value has a form and a range. The form is a separate rule, so that the messages for a
wrong unit and for a value out of range differ. The range rule ignores a value of the wrong form.
"""

from __future__ import annotations

from typing import Final

from plimsoll.api.v1alpha1.api_model import ValidationRule, ValidationRules, compile_re2, matching, quote
from plimsoll.core import units

MAX_DURATION_CHARS: Final = 32
MIN_POSITIVE_S: Final = 1e-9  # the API server counts whole nanoseconds; a shorter duration is zero

IS_DURATION: Final = matching(
    units.DURATION_PATTERN.replace(r"\.", "[.]"),
    "must be a duration with a unit (us, ms, s, m, h), such as 500ms or 1.5s",
)


def duration_rules(minimum: str, maximum: str, message: str, *, exclusive: bool = False) -> ValidationRules[str]:
    """Return rules for a duration from `minimum` to `maximum`, with `exclusive` longer than `minimum`.

    message: error message of the range rule.
    """
    min_s, max_s = units.parse_duration(minimum), units.parse_duration(maximum)
    sign = ">" if exclusive else ">="

    def holds(text: str) -> bool:
        try:
            seconds = units.parse_duration(text)
        except ValueError:
            return True  # the rule on the form reports it
        is_long_enough = seconds >= max(min_s, MIN_POSITIVE_S) if exclusive else seconds >= min_s
        return is_long_enough and seconds <= max_s

    in_range = f"duration(self) {sign} duration({quote(minimum)}) && duration(self) <= duration({quote(maximum)})"
    return ValidationRules(IS_DURATION, ValidationRule[str](f"!({IS_DURATION.cel}) || ({in_range})", message, holds))


def decimal_rule(pattern: str, message: str, *, allow_zero: bool = True) -> ValidationRule[int | str]:
    """Return a rule that a number, written as an integer or a string, matches `pattern`."""
    patterns = [pattern] if allow_zero else [pattern, "[1-9]"]
    regexes = [compile_re2(form) for form in patterns]
    return ValidationRule(
        " && ".join(f"string(self).matches({quote(form)})" for form in patterns),
        message,
        lambda value: all(form.search(str(value)) for form in regexes),
    )
