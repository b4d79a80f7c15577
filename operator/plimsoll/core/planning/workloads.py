"""Workload of a plan: from means, or from the busiest part of a trace.

Problem: plan requests give two means, and sizing by means misses what violates the SLO. Idea: lengths are lognormal
with stated spreads, close to real prompts and outputs, and with exactly these means. A trace is planned by its busiest
minutes, because a fleet sized for the mean of a day is too small every noon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from plimsoll.core.workload import FloatArray, Workload, from_samples

PROMPT_SIGMA: Final = 0.6  # of the logarithm of lengths, by default
OUTPUT_SIGMA: Final = 0.5
BUSIEST_WINDOW_S: Final = 300.0
_ROWS: Final = 256
_GOLDEN_STEP: Final = (math.sqrt(5) - 1) / 2  # its multiples, modulo 1, pair two columns evenly


def lognormal_workload(
    prompt_tokens: float,
    output_tokens: float,
    prompt_sigma: float = PROMPT_SIGMA,
    output_sigma: float = OUTPUT_SIGMA,
    cached_share: float = 0.0,
) -> Workload:
    """Independent prompts and outputs of these means (at least 1); a sigma of 0 gives one length.

    cached_share: share of each prompt, 0 to below 1, found in the prefix cache. Raises a ValueError that names the
    argument.
    """
    for name, value in (("prompt_tokens", prompt_tokens), ("output_tokens", output_tokens)):
        if not (math.isfinite(value) and value >= 1):
            raise ValueError(f"{name} must be finite and at least 1, not {value}")
    for name, value in (("prompt_sigma", prompt_sigma), ("output_sigma", output_sigma)):
        if not 0 <= value <= 3:
            raise ValueError(f"{name} must lie between 0 and 3, not {value}")
    if not 0 <= cached_share < 1:
        raise ValueError(f"cached_share must be 0 or more and below 1, not {cached_share}")
    ranks = np.arange(_ROWS)
    shuffled = np.argsort(np.argsort((ranks + 0.5) * _GOLDEN_STEP % 1.0))
    prompts = _lognormal_lengths(prompt_tokens, prompt_sigma)[ranks]
    outputs = _lognormal_lengths(output_tokens, output_sigma)[shuffled]
    return from_samples(prompts * (1 - cached_share), prompts * cached_share, outputs)


def _lognormal_lengths(mean: float, sigma: float) -> FloatArray:
    """Midpoints of strata of equal weight, scaled to the mean."""
    normal = NormalDist()
    raw = np.exp(sigma * np.array([normal.inv_cdf((k + 0.5) / _ROWS) for k in range(_ROWS)]))
    return np.asarray(mean * raw / raw.mean())


@dataclass(frozen=True)
class BusiestWindow:
    """The busiest window of a trace.

    first, end: indices of its arrivals, as of a slice. arrival_cv2: squared coefficient of variation of their gaps, at
    least 1.
    """

    first: int
    end: int
    rate_per_s: float
    arrival_cv2: float


MIN_TRACE_SPAN_S: Final = 1e-6  # arrivals within a shorter time have no rate


def busiest_window(arrivals_s: ArrayLike, window_s: float = BUSIEST_WINDOW_S) -> BusiestWindow:
    """The window with most arrivals; the whole trace if it is shorter. Raises ValueError.

    arrivals_s: ascending, with at least two different times.
    """
    times_s = np.asarray(arrivals_s, dtype=np.float64)
    if (
        times_s.ndim != 1
        or times_s.size < 2
        or not np.all(np.isfinite(times_s))
        or not times_s[-1] - times_s[0] > MIN_TRACE_SPAN_S
        or np.any(np.diff(times_s) < 0)
    ):
        raise ValueError("arrivals_s must ascend, with two different times at least: one moment has no rate")
    duration_s = times_s[-1] - times_s[0]
    if duration_s <= window_s:  # n arrivals have n - 1 gaps: the first one only starts the window
        return BusiestWindow(0, times_s.size, (times_s.size - 1) / duration_s, _arrival_cv2(times_s))
    ends = np.searchsorted(times_s, times_s + window_s, side="left")
    first = int(np.argmax(ends - np.arange(times_s.size)))
    inside = times_s[first : ends[first]]
    return BusiestWindow(first, int(ends[first]), inside.size / window_s, _arrival_cv2(inside))


def _arrival_cv2(times_s: FloatArray) -> float:
    interarrivals_s = np.diff(times_s)
    mean = float(interarrivals_s.mean()) if interarrivals_s.size else 0.0
    return max(1.0, float((interarrivals_s / mean).var())) if mean > 0 else 1.0
