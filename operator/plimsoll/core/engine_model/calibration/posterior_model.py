"""Posterior of an engine's speed, learned from its counters, and its algebra.

Problem: the coefficients of a table or a roofline are 10 to 40 % off, GPUs slow down when hot, and an engine's counters
are sums over a whole window. A plain fit to them always has a result, even if the load never varied.

Idea: Bayesian linear regression in information form (Gelman et al., Bayesian Data Analysis, 3rd ed., section 14.8) on
the ratio of a window's time to its time by the prior: y = x' theta. theta are factors on the prior's coefficients, and
x the shares of the prior's time that each of them explains, so that x sums to one and every number is near one. Two
things are added:

- Identifiability: in the prior's own metric, a direction with less information in the data than in the prior stays
  at the prior, mean and width. Stock counters at a fixed mix identify two, the base of a step and the work of a
  request.
- Nothing is faster than the floor, the roofline that the caller gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from plimsoll.core.engine_model.calibration.counter_window import WindowSums, step_sums
from plimsoll.core.engine_model.step_time import StepModel

FACTOR_COUNT: Final = (
    7  # base, base of a step with prefill, prefill token, pair, sequence, cached token, assumed lengths
)
TRIANGLE_SIZE: Final = FACTOR_COUNT * (FACTOR_COUNT + 1) // 2
UPPER_TRIANGLE: Final = np.triu_indices(FACTOR_COUNT)

_COMMON_SD: Final = 0.25  # common factor: error of a table's efficiency
_COEFFICIENT_SD: Final = 0.2  # additional error of each coefficient
_PREFILL_BASE_SD: Final = 0.5  # measured -30 % (8B) to +110 % (70B) of the base
_ASSUMED_LENGTHS_SD: Final = 0.7  # contexts differ that much between mixes
_NOISE_SD: Final = 0.03  # of a window of many steps, before any residual was seen
_NOISE_WINDOWS: Final = 10.0  # weight of this prior, in windows
_HALF_WEIGHT_STEPS: Final = 50.0  # steps of a window that counts half, because its ends cut steps
_NO_GAIN: Final = 1.0  # information of the data over the prior's along a direction: below this it stays at the prior,
_FULL_GAIN: Final = 5.0  # above this only the data count
_IDENTIFIED_GAIN: Final = 3.0  # from this on it counts as identified: half of the prior's width

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Posterior:
    """Posterior of one engine build on one accelerator; `initial_posterior` creates it.

    information: upper triangle, by rows, of the weighted sum of x x' (7 x 7); moment: of x y (7). weight: effective
    number of windows. noise_sum: squared residuals in units of y squared, of noise_weight windows. shift_up,
    shift_down: the two CUSUMs. updated_s: time of the newest window, None before the first.
    """

    prior: StepModel
    floor: StepModel
    half_life_s: float
    updated_s: float | None = None
    information: tuple[float, ...] = (0.0,) * TRIANGLE_SIZE
    moment: tuple[float, ...] = (0.0,) * FACTOR_COUNT
    weight: float = 0.0
    noise_weight: float = 0.0
    noise_sum: float = 0.0
    shift_up: float = 0.0
    shift_down: float = 0.0


def initial_posterior(prior: StepModel, floor: StepModel, half_life_s: float = 1800.0) -> Posterior:
    """Return the posterior before any data.

    A coefficient that is zero in the prior is not learned. Raises ValueError for a half-life that is not positive, a
    step with prefill that has no base, and a prior that is faster than its floor in any coefficient.
    """
    if not 0 < half_life_s < math.inf:
        raise ValueError(f"a half-life is a positive number of seconds, not {half_life_s}")
    prior_values, floor_values = coefficients(prior), coefficients(floor)
    if not (np.isfinite(prior_values).all() and (prior_values >= floor_values).all()):
        raise ValueError("a prior is finite and nowhere faster than its floor")
    if prior_values[:2].min() <= 0:
        raise ValueError("a step takes time, with prefill and without")
    return Posterior(prior, floor, half_life_s)


def coefficients(model: StepModel) -> Floats:
    """Return a model's coefficients, shape (6,), s; the second is the whole base of a step with prefill."""
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


def step_counts(window: WindowSums) -> Floats:
    """Return the multipliers of `coefficients`, shape (6,): steps without prefill, steps with any, and
    sums of tokens.
    """
    total = step_sums(window)
    return np.array([total.steps - total.prefill_steps, *total[1:6]], dtype=float)


def regression(prior: StepModel, windows: Sequence[WindowSums]) -> tuple[Floats, Floats, Floats]:
    """Return rows x (n, 7), ratios y (n,) and weights (n,) of n usable windows."""
    times = np.array([step_counts(window) for window in windows]) * coefficients(prior)
    expected_s = times.sum(axis=1)
    assumed = np.array([step_sums(window).assumed for window in windows])
    lengths = np.where(assumed, times[:, 3] + times[:, 5], 0.0)
    rows = np.column_stack([times, lengths]) / expected_s[:, None]
    steps = np.array([window.steps for window in windows])
    ratios = np.array([window.busy_s for window in windows]) / expected_s
    return rows, ratios, steps / (steps + _HALF_WEIGHT_STEPS) * np.array([window.weight for window in windows])


def factor_moments(posterior: Posterior) -> tuple[Floats, Floats]:
    """Return mean (7,), at or above the floor, and covariance (7, 7) of the factors; the last one's
    prior mean is zero.
    """
    variance = noise_variance(posterior)
    scaled_information = information_matrix(posterior) / variance
    gain, directions = _information_gain(scaled_information)
    confidence = np.clip(
        (gain - _NO_GAIN) / (_FULL_GAIN - _NO_GAIN), 0.0, 1.0
    )  # continuous where a direction becomes identified
    pull = np.array(posterior.moment) / variance - scaled_information @ _PRIOR_MEAN
    shift = confidence * (directions.T @ pull) / (1.0 + gain)
    covariance = (directions * (1.0 - confidence * gain / (1.0 + gain))) @ directions.T
    return _above_floor(posterior, _PRIOR_MEAN + directions @ shift, covariance), covariance


def noise_variance(posterior: Posterior) -> float:
    """Return the variance of y of a window of many steps: mean squared residual, the prior counting
    `_NOISE_WINDOWS`.
    """
    total = _NOISE_WINDOWS * _NOISE_SD**2 + posterior.noise_sum
    return total / (_NOISE_WINDOWS + posterior.noise_weight)


def information_matrix(posterior: Posterior) -> Floats:
    """Return the weighted sum of x x', shape (7, 7)."""
    full = np.empty((FACTOR_COUNT, FACTOR_COUNT))
    full[UPPER_TRIANGLE] = posterior.information
    full.T[UPPER_TRIANGLE] = posterior.information
    return full


def model_from_factors(posterior: Posterior, factors: Floats) -> StepModel:
    """Return the step model of these factors (7,), nowhere faster than the floor, rounding included."""
    floor = posterior.floor
    values = np.maximum(factors[:6] * coefficients(posterior.prior), coefficients(floor))
    base, prefill_base, token, pair, sequence, cached = (float(value) for value in values)
    return StepModel(base, prefill_base - base, token, pair, sequence, cached)


def _prior_root() -> Floats:
    """Return the lower Cholesky factor of the prior covariance of the factors, shape (7, 7)."""
    variances_sd = [
        _COEFFICIENT_SD,
        _PREFILL_BASE_SD,
        _COEFFICIENT_SD,
        _COEFFICIENT_SD,
        _COEFFICIENT_SD,
        _COEFFICIENT_SD,
        _ASSUMED_LENGTHS_SD,
    ]
    covariance = np.diag(np.square(variances_sd))
    covariance[:6, :6] += _COMMON_SD**2
    root: Floats = np.linalg.cholesky(covariance)
    return root


_PRIOR_ROOT: Final = _prior_root()
_PRIOR_MEAN: Final = np.array([1.0] * 6 + [0.0])


def _information_gain(scaled_information: Floats) -> tuple[Floats, Floats]:
    """Return the data's information over the prior's (7,), and its directions as columns (7, 7), in factors."""
    values, vectors = np.linalg.eigh(_PRIOR_ROOT.T @ scaled_information @ _PRIOR_ROOT)
    return np.maximum(values, 0.0), _PRIOR_ROOT @ vectors


def _above_floor(posterior: Posterior, mean: Floats, covariance: Floats) -> Floats:
    """Return the mean with each factor below its floor conditioned to be at it, until none is
    (conditional Gaussian).
    """
    prior = coefficients(posterior.prior)
    floor = np.full(FACTOR_COUNT, -1.0)  # assumed contexts may shrink to nothing
    floor[:6] = np.divide(coefficients(posterior.floor), prior, out=np.zeros(6), where=prior > 0)
    at_floor = np.zeros(FACTOR_COUNT, dtype=bool)
    bounded = mean
    while (bounded < floor - 1e-12).any():
        at_floor |= bounded < floor
        gain = covariance[:, at_floor] @ np.linalg.inv(covariance[np.ix_(at_floor, at_floor)])
        bounded = mean + gain @ (floor - mean)[at_floor]
        bounded[at_floor] = floor[at_floor]
    above: Floats = np.maximum(bounded, floor)
    return above
