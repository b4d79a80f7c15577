"""The speed of an engine as far as its counters have told it: the posterior, and the algebra in it.

Problem: a table's or a roofline's coefficients are 10 to 40 % off, GPUs slow down when hot, and an engine's counters
name only sums of a whole window. A plain fit to them always answers, also where the load never varied.

Idea: Bayesian linear regression in information form (Gelman et al., Bayesian Data Analysis, 3rd ed., section 14.8) on
the ratio of a window's time to what the prior says that it should take: y = x' theta. theta are factors on the prior's
coefficients, and x the shares of the prior's time that each of them explains, so that x sums to one and every number
is near one. Two things are added:

- Identifiability: in the prior's own metric, a direction of which the data know less than the prior stays at the
  prior, mean and width. Stock counters at a fixed mix excite two, the base of a step and the work of a request, and
  no more.
- Nothing is faster than the floor, the roofline that the caller gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from plimsoll.core.calibration.window import WindowSums, sums
from plimsoll.core.latency import StepModel

FACTORS: Final = 7  # base, base of a step with prefill, prefill token, pair, sequence, cached token, assumed lengths
TRIANGLE: Final = FACTORS * (FACTORS + 1) // 2
UPPER: Final = np.triu_indices(FACTORS)

_COMMON_SD: Final = 0.25  # one factor on everything: a table's efficiency is off
_OWN_SD: Final = 0.2  # each coefficient beside that
_PREFILL_BASE_SD: Final = 0.5  # measured -30 % (8B) to +110 % (70B) of the base
_ASSUMED_SD: Final = 0.7  # contexts differ that much between mixes
_NOISE_SD: Final = 0.03  # of a window of many steps, before any residual was seen
_NOISE_WINDOWS: Final = 10.0  # windows that this is worth
_STEPS_HALF: Final = 50.0  # a window of so many steps counts half: its ends cut steps
_SILENT: Final = 1.0  # information of the data over the prior's along a direction: below this it stays at the prior,
_CLEAR: Final = 5.0  # above this the data have their whole say
_EXCITED: Final = 3.0  # where it counts as told: half of the prior's width

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Posterior:
    """What is believed of one engine build on one accelerator; `unknown` makes the first.

    information: upper triangle, by rows, of the weighted sum of x x' (7 x 7); moment: of x y (7). weight: windows in
    force. noise_sum: squared surprises in units of y squared, of noise_weight windows. shift_*: the two CUSUMs.
    updated_s: time of the newest window, None before the first.
    """

    prior: StepModel
    floor: StepModel
    half_life_s: float
    updated_s: float | None = None
    information: tuple[float, ...] = (0.0,) * TRIANGLE
    moment: tuple[float, ...] = (0.0,) * FACTORS
    weight: float = 0.0
    noise_weight: float = 0.0
    noise_sum: float = 0.0
    shift_up: float = 0.0
    shift_down: float = 0.0


def unknown(prior: StepModel, floor: StepModel, half_life_s: float = 1800.0) -> Posterior:
    """The posterior before any data.

    A coefficient that is zero in the prior is not learned. Raises ValueError for a half-life that is not positive, a
    step with prefill that has no base, and a prior that is faster than its floor in any coefficient.
    """
    if not 0 < half_life_s < math.inf:
        raise ValueError(f"a half-life is a positive number of seconds, not {half_life_s}")
    mine, least = coefficients(prior), coefficients(floor)
    if not (np.isfinite(mine).all() and (mine >= least).all()):
        raise ValueError("a prior is finite and nowhere faster than its floor")
    if mine[:2].min() <= 0:
        raise ValueError("a step takes time, with prefill and without")
    return Posterior(prior, floor, half_life_s)


def coefficients(model: StepModel) -> Floats:
    """A model's coefficients, shape (6,), in seconds; the second is the whole base of a step with prefill."""
    return np.array(
        [
            model.base_s,
            model.base_s + model.any_prefill_s,
            model.prefill_token_s,
            model.prefill_pair_s,
            model.sequence_s,
            model.cached_token_s,
        ]
    )


def counted(window: WindowSums) -> Floats:
    """What `coefficients` multiply, shape (6,): steps without prefill, steps with any, and the sums of tokens."""
    total = sums(window)
    return np.array([total.steps - total.prefill_steps, *total[1:6]], dtype=float)


def regression(prior: StepModel, windows: Sequence[WindowSums]) -> tuple[Floats, Floats, Floats]:
    """Rows x (n, 7), ratios y (n,) and weights (n,) of n usable windows."""
    times = np.array([counted(window) for window in windows]) * coefficients(prior)
    expected_s = times.sum(axis=1)
    assumed = np.array([sums(window).assumed for window in windows])
    lengths = np.where(assumed, times[:, 3] + times[:, 5], 0.0)
    rows = np.column_stack([times, lengths]) / expected_s[:, None]
    steps = np.array([window.steps for window in windows])
    ratios = np.array([window.busy_s for window in windows]) / expected_s
    return rows, ratios, steps / (steps + _STEPS_HALF)


def belief(posterior: Posterior) -> tuple[Floats, Floats]:
    """Mean (7,), at or above the floor, and covariance (7, 7) of the factors; the last one's prior mean is zero."""
    variance = noise_variance(posterior)
    weighed = information(posterior) / variance
    gain, directions = _excitement(weighed)
    say = np.clip((gain - _SILENT) / (_CLEAR - _SILENT), 0.0, 1.0)  # no jump where a direction comes or goes
    pull = np.array(posterior.moment) / variance - weighed @ _PRIOR_MEAN
    moved = say * (directions.T @ pull) / (1.0 + gain)
    covariance = (directions * (1.0 - say * gain / (1.0 + gain))) @ directions.T
    return _above_floor(posterior, _PRIOR_MEAN + directions @ moved, covariance), covariance


def excited_directions(posterior: Posterior) -> int:
    """How many independent combinations of the factors the data tell better than the prior did: 0 to 7."""
    gain, _ = _excitement(information(posterior) / noise_variance(posterior))
    return int((gain >= _EXCITED).sum())


def noise_variance(posterior: Posterior) -> float:
    """Variance of y of a window of many steps: mean squared surprise, with the prior worth `_NOISE_WINDOWS`."""
    total = _NOISE_WINDOWS * _NOISE_SD**2 + posterior.noise_sum
    return total / (_NOISE_WINDOWS + posterior.noise_weight)


def information(posterior: Posterior) -> Floats:
    """The weighted sum of x x', shape (7, 7)."""
    full = np.empty((FACTORS, FACTORS))
    full[UPPER] = posterior.information
    full.T[UPPER] = posterior.information
    return full


def model_of(posterior: Posterior, factors: Floats) -> StepModel:
    """The step model of some factors (7,), nowhere faster than the floor; rounding included."""
    floor = posterior.floor
    values = np.maximum(factors[:6] * coefficients(posterior.prior), coefficients(floor))
    base, prefill_base, token, pair, sequence, cached = (float(value) for value in values)
    return StepModel(base, prefill_base - base, token, pair, sequence, cached)


def _prior_root() -> Floats:
    """Lower Cholesky factor of the prior covariance of the factors, shape (7, 7)."""
    own = [_OWN_SD, _PREFILL_BASE_SD, _OWN_SD, _OWN_SD, _OWN_SD, _OWN_SD, _ASSUMED_SD]
    covariance = np.diag(np.square(own))
    covariance[:6, :6] += _COMMON_SD**2
    root: Floats = np.linalg.cholesky(covariance)
    return root


_ROOT: Final = _prior_root()
_PRIOR_MEAN: Final = np.array([1.0] * 6 + [0.0])


def _excitement(weighed: Floats) -> tuple[Floats, Floats]:
    """Information of the data over that of the prior (7,), and its directions as columns (7, 7), in factors."""
    values, vectors = np.linalg.eigh(_ROOT.T @ weighed @ _ROOT)
    return np.maximum(values, 0.0), _ROOT @ vectors


def _above_floor(posterior: Posterior, mean: Floats, covariance: Floats) -> Floats:
    """The mean given that every factor found below its floor is at it, until none is (conditional Gaussian)."""
    prior = coefficients(posterior.prior)
    floor = np.full(FACTORS, -1.0)  # assumed contexts may shrink to nothing
    floor[:6] = np.divide(coefficients(posterior.floor), prior, out=np.zeros(6), where=prior > 0)
    at_floor = np.zeros(FACTORS, dtype=bool)
    bounded = mean
    while (bounded < floor - 1e-12).any():
        at_floor |= bounded < floor
        given = covariance[:, at_floor] @ np.linalg.inv(covariance[np.ix_(at_floor, at_floor)])
        bounded = mean + given @ (floor - mean)[at_floor]
        bounded[at_floor] = floor[at_floor]
    above: Floats = np.maximum(bounded, floor)
    return above
