"""What the posterior answers: a mean model, a pessimistic one to size on, and whether anything is known at all.

Problem: a mean hides how little it may rest on, and a fleet sized on it breaks its promise half of the time.

Idea: size on a quantile of the posterior. It is wide until the data have spoken and closes in on the mean as they do,
down to `MISFIT`, which no amount of data removes. Whoever shows the estimate shows `knowledge` beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np

from plimsoll.core.calibration.belief import (
    Posterior,
    belief,
    coefficients,
    excited_directions,
    information,
    model_of,
    noise_variance,
    regression,
)
from plimsoll.core.calibration.update import refusal
from plimsoll.core.calibration.window import WindowSums
from plimsoll.core.latency import StepModel

MISFIT: Final = 0.03  # what the linear step misses on real engines, whatever the amount of data

_KNOWN_WINDOWS: Final = 10.0
_KNOWN_NOISE: Final = 0.12  # windows of one engine agree to 2 or 3 %, of replicas that differ by +-10 % to 10 %
_KNOWN_LOAD: Final = 0.03  # standard deviation of the base's share of a window's time
_KNOWN_SD: Final = 0.03


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What the estimate rests on. All deviations are relative and without `MISFIT`.

    words: for people; begins with "not known" unless `known`. base_sd, work_sd: of the two that stock counters can
    tell, a step's base and the work beside it, at the mix seen; infinite before any window. noise_sd: of one window.
    load_sd: of the base's share of a window's time, between windows. directions: combinations of coefficients that
    the data tell, 2 for stock counters at a fixed mix. windows: in force.
    """

    known: bool
    words: str
    base_sd: float
    work_sd: float
    noise_sd: float
    load_sd: float
    directions: int
    windows: float


@dataclass(frozen=True, slots=True)
class Expectation:
    """Of one window, in seconds: its busy time, the standard deviation of that, and the part that is work.

    rho = work_s / busy_s of an engine that never idles, and TPOT = base / (1 - rho).
    """

    busy_s: float
    deviation_s: float
    work_s: float


def estimate(posterior: Posterior) -> StepModel:
    """The mean of what is believed, nowhere faster than the floor. Size on `pessimistic`, not on this.

    Where context sums were assumed, its base is told and the split of its work is still the prior's: ask `expectation`.
    """
    mean, _ = belief(posterior)
    return model_of(posterior, mean)


def pessimistic(posterior: Posterior, quantile: float, at: WindowSums | None = None) -> StepModel:
    """A model that with probability `quantile` is not faster than the truth.

    Without `at` each coefficient is at its own quantile, which is safe for any load and dear for most. With `at` the
    model is the one on the posterior's ellipsoid that is slowest for the load of that window, so its time for that
    load is at the quantile (support function of an ellipsoid). Both contain `MISFIT`.
    Raises ValueError for a quantile outside [0.5, 1), and for a window that is unusable or whose context sums are
    absent: the doubt about assumed lengths cannot be put into a step model.
    """
    if not 0.5 <= quantile < 1:
        raise ValueError(f"a pessimistic quantile is at least 0.5 and below 1, not {quantile}")
    mean, covariance = belief(posterior)
    covariance = covariance + MISFIT**2 * np.outer(mean, mean)
    deviations = NormalDist().inv_cdf(quantile)
    if at is None:
        return model_of(posterior, mean + deviations * np.sqrt(np.diag(covariance)))
    wrong = refusal(posterior, at) or (None if at.exact else "its context sums are absent")
    if wrong is not None:
        raise ValueError(f"a window cannot be sized at: {wrong}")
    rows, _, _ = regression(posterior.prior, [at])
    toward = covariance @ rows[0]
    return model_of(posterior, mean + deviations * toward / math.sqrt(float(rows[0] @ toward)))


def expectation(posterior: Posterior, window: WindowSums) -> Expectation:
    """How long a window's work should take; its own busy_s plays no part.

    Where lengths have to be assumed, this and its deviation hold for the mix that was learned: bare counters cannot
    tell that another mix reads longer contexts. Raises ValueError for a window that cannot be used.
    """
    wrong = refusal(posterior, window)
    if wrong is not None:
        raise ValueError(f"nothing can be expected of a window: {wrong}")
    rows, ratios, _ = regression(posterior.prior, [window])
    mean, covariance = belief(posterior)
    covariance = covariance + MISFIT**2 * np.outer(mean, mean)
    unit_s = window.busy_s / float(ratios[0])  # the prior's time
    busy_s = unit_s * float(rows[0] @ mean)
    base_s = window.steps * float(coefficients(posterior.prior)[0] * mean[0])
    return Expectation(busy_s, unit_s * math.sqrt(float(rows[0] @ covariance @ rows[0])), max(0.0, busy_s - base_s))


def knowledge(posterior: Posterior) -> Knowledge:
    """Whether base and work are known, and why not, in words."""
    mean, covariance = belief(posterior)
    base_sd, work_sd, load_sd = math.inf, math.inf, 0.0
    if posterior.weight > 0:
        total = information(posterior) / posterior.weight
        row = total[:, :6].sum(axis=1)  # shares sum to one, so this is the mean of x
        prior = coefficients(posterior.prior)
        work = row.copy()
        work[0] = -row[1] * prior[0] / prior[1]  # the base of a step with prefill is no work, what it has beside is
        work_part = float(work @ mean)
        base_sd = math.sqrt(covariance[0, 0]) / float(mean[0])
        work_sd = math.sqrt(float(work @ covariance @ work)) / work_part if work_part > 0 else math.inf
        load_sd = math.sqrt(max(0.0, float(total[0, 0] - row[0] ** 2)))
    noise_sd = math.sqrt(noise_variance(posterior))
    why_not = _doubt(posterior.weight, noise_sd, load_sd, base_sd, work_sd)
    words = why_not or f"base known within {base_sd:.1%}, work at this mix within {work_sd:.1%} (one deviation)"
    directions = excited_directions(posterior)
    return Knowledge(why_not is None, words, base_sd, work_sd, noise_sd, load_sd, directions, posterior.weight)


def _doubt(windows: float, noise_sd: float, load_sd: float, base_sd: float, work_sd: float) -> str | None:
    if noise_sd > _KNOWN_NOISE:
        return f"not known: the windows disagree by {noise_sd:.0%} with any model"
    if windows < _KNOWN_WINDOWS:
        return f"not known: {windows:.0f} windows in force, {_KNOWN_WINDOWS:.0f} are needed"
    if load_sd < _KNOWN_LOAD:
        return "not known: the load hardly varied, so a step's base and its work look alike"
    if max(base_sd, work_sd) > _KNOWN_SD:
        return f"not known: base within {base_sd:.0%}, work within {work_sd:.0%} (one deviation)"
    return None
