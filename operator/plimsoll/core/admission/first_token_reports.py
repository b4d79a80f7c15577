"""When a gateway learns that a response has begun, while it still runs.

Problem: a response lasts seconds after its first token. Admission control that learns of late first tokens at the end
of responses admits too much for that long.

Idea: the proxy reports each running response a few times, at ages that double. Most responses need one or two reports,
and the longest need ten.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

REPORT_INTERVAL_S: Final = 1.0  # age of a response at its first report
MAX_REPORT_AGE_S: Final = 600.0
LATE_S: Final = 0.5  # by which a first token may be later than predicted


def report_ages_s() -> Iterator[float]:
    """Yield the ages of a response at its reports, in seconds since its request arrived."""
    age_s = REPORT_INTERVAL_S
    while age_s <= MAX_REPORT_AGE_S:
        yield age_s
        age_s *= 2.0


def report_age_s(ttft_s: float) -> float | None:
    """Return the age of a response at the first report with its first token, None if there is no such report."""
    return next((age_s for age_s in report_ages_s() if age_s >= ttft_s), None)


def reported_at_s(arrived_s: float, first_token_s: float) -> float:
    """Return when a first token that is due at `first_token_s` has been reported, infinity if none is reported."""
    age_s = report_age_s(first_token_s - arrived_s + LATE_S)
    return math.inf if age_s is None else arrived_s + age_s
