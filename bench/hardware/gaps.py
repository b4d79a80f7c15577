"""Gaps between the tokens of streams, counted: by the second of its trace at which a stream was asked for, and length.

Problem: a run has hundreds of thousands of gaps, and which of them count, after a warm-up, is for the reader to say.
Idea: lengths by ratio, so that any quantile is 1 % off at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

_RATIO: Final = 1.02
_LEAST_S: Final = 1e-5  # shorter ones are alike


def counted(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Of rows with `at_s` and all their `gaps_s`; keys are text, as JSON has them."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        counts = found.setdefault(str(int(row["at_s"])), {})
        for gap_s in row["gaps_s"]:
            place = str(round(math.log(max(gap_s, _LEAST_S) / _LEAST_S) / math.log(_RATIO)))
            counts[place] = counts.get(place, 0) + 1
    return found


def quantile_s(counts: Mapping[str, Mapping[str, int]], share: float, from_s: float, until_s: float) -> float | None:
    """Of the streams asked for from one whole second to before another; None of nothing."""
    places: dict[int, int] = {}
    for second, lengths in counts.items():
        if from_s <= int(second) < until_s:
            for place, times in lengths.items():
                places[int(place)] = places.get(int(place), 0) + times
    left = share * sum(places.values())
    for place in sorted(places):
        left -= places[place]
        if left <= 0:
            return _LEAST_S * _RATIO**place
    return None
