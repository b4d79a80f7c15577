"""The workload of a plan: from means, or from the busiest part of a trace.

Problem: a plan is asked for with two means, and sizing by means misses what breaks a promise. Idea: lengths are
lognormal with stated spreads, which real prompts and answers are near to, and their means are kept exactly. A trace is
planned for by its busiest minutes: a fleet sized for the mean of a day is too small every noon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from plimsoll.core.workload import FloatArray, Workload, from_samples

PROMPT_SIGMA: Final = 0.6  # of the logarithm of lengths, where no better is known
OUTPUT_SIGMA: Final = 0.5
WINDOW_S: Final = 300.0
_ROWS: Final = 256
_STEP: Final = (math.sqrt(5) - 1) / 2  # whose multiples, modulo 1, pair two columns evenly


def lognormal(
    prompt_tokens: float,
    output_tokens: float,
    prompt_sigma: float = PROMPT_SIGMA,
    output_sigma: float = OUTPUT_SIGMA,
    cached_share: float = 0.0,
) -> Workload:
    """Prompts and outputs of these means (at least 1), independent; a sigma of 0 gives one length.

    cached_share: of each prompt, 0 to below 1, that is found in the prefix cache. Raises ValueError that names the
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
    others = np.argsort(np.argsort((ranks + 0.5) * _STEP % 1.0))
    prompts = _lengths(prompt_tokens, prompt_sigma)[ranks]
    outputs = _lengths(output_tokens, output_sigma)[others]
    return from_samples(prompts * (1 - cached_share), prompts * cached_share, outputs)


def _lengths(mean: float, sigma: float) -> FloatArray:
    """Middles of strata of equal weight, scaled to the mean."""
    normal = NormalDist()
    raw = np.exp(sigma * np.array([normal.inv_cdf((k + 0.5) / _ROWS) for k in range(_ROWS)]))
    return np.asarray(mean * raw / raw.mean())


@dataclass(frozen=True)
class Busiest:
    """The busiest window of a trace. first, until: places of the arrivals in it, as of a slice. gap_cv2: squared
    coefficient of variation of the gaps between them, at least 1."""

    first: int
    until: int
    rate_per_s: float
    gap_cv2: float


MOMENT_S: Final = 1e-6  # arrivals that all lie within less have no rate


def busiest(arrivals_s: ArrayLike, window_s: float = WINDOW_S) -> Busiest:
    """Of ascending arrivals, at least two at different times: the window with most of them; the whole of a shorter
    trace. Raises ValueError."""
    at = np.asarray(arrivals_s, dtype=np.float64)
    if (
        at.ndim != 1
        or at.size < 2
        or not np.all(np.isfinite(at))
        or not at[-1] - at[0] > MOMENT_S
        or np.any(np.diff(at) < 0)
    ):
        raise ValueError("arrivals_s must ascend, with two different times at least: one moment has no rate")
    length = at[-1] - at[0]
    if length <= window_s:  # n arrivals have n - 1 gaps: the first one only opens the window
        return Busiest(0, at.size, (at.size - 1) / length, _gap_cv2(at))
    until = np.searchsorted(at, at + window_s, side="left")
    first = int(np.argmax(until - np.arange(at.size)))
    inside = at[first : until[first]]
    return Busiest(first, int(until[first]), inside.size / window_s, _gap_cv2(inside))


def _gap_cv2(at: FloatArray) -> float:
    gaps = np.diff(at)
    mean = float(gaps.mean()) if gaps.size else 0.0
    return max(1.0, float((gaps / mean).var())) if mean > 0 else 1.0
