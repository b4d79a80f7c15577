"""Estimates from the posterior: a mean step model, a pessimistic one for sizing, and the quality of the data.

Problem: a mean does not show how uncertain it is, and a fleet sized by it violates its SLO half of the time.

Idea: size by a quantile of the posterior. It is wide without data and approaches the mean with more data, down to
`MODEL_MISFIT_SD`, which no amount of data removes. `assess_quality` belongs next to every displayed estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np

from plimsoll.core.engine_model.calibration.counter_window import WindowSums
from plimsoll.core.engine_model.calibration.posterior_model import (
    Posterior,
    coefficients,
    factor_moments,
    information_matrix,
    model_from_factors,
    noise_variance,
    regression,
)
from plimsoll.core.engine_model.calibration.posterior_update import rejection_reason
from plimsoll.core.engine_model.step_time import StepModel

MODEL_MISFIT_SD: Final = 0.03  # error of the linear step model on real engines with any amount of data

_MIN_WINDOWS: Final = 10.0
_MAX_NOISE_SD: Final = 0.12  # 2 to 3 % between windows of one engine, 10 % between replicas that differ by +-10 %
_MIN_LOAD_SD: Final = 0.03  # standard deviation of the base's share of a window's time
_MAX_PARAMETER_SD: Final = 0.03


@dataclass(frozen=True, slots=True)
class CalibrationQuality:
    """How well the data determine the estimate. All deviations are relative and exclude `MODEL_MISFIT_SD`.

    message: text for users; begins with "not known" unless `sufficient`. base_sd, work_sd: of the two quantities that
    stock counters determine, the base of a step and its other work, at the observed mix; infinite before any window.
    noise_sd: of one window. load_sd: of the base's share of a window's time, between windows.
    windows: effective number.
    """

    sufficient: bool
    message: str
    base_sd: float
    work_sd: float
    noise_sd: float
    load_sd: float
    windows: float


def quantile_model(posterior: Posterior, quantile: float, window: WindowSums | None = None) -> StepModel:
    """Return a model that is not faster than the truth with probability `quantile`.

    Without `window` each coefficient is at its own quantile, which is safe for any load and costly for most. With it,
    the model is the one on the posterior's ellipsoid that is slowest for the load of that window, so its time for that
    load is at the quantile (support function of an ellipsoid). Both include `MODEL_MISFIT_SD`. Raises ValueError for a
    quantile outside [0.5, 1), and for a window that is unusable or has no context sums: the uncertainty of assumed
    lengths does not fit into a step model.
    """
    if not 0.5 <= quantile < 1:
        raise ValueError(f"a pessimistic quantile is at least 0.5 and below 1, not {quantile}")
    mean, covariance = factor_moments(posterior)
    covariance = covariance + MODEL_MISFIT_SD**2 * np.outer(mean, mean)
    z_score = NormalDist().inv_cdf(quantile)
    if window is None:
        return model_from_factors(posterior, mean + z_score * np.sqrt(np.diag(covariance)))
    rejection = rejection_reason(posterior, window) or (None if window.is_exact else "its context sums are absent")
    if rejection is not None:
        raise ValueError(f"a window cannot be sized at: {rejection}")
    rows, _, _ = regression(posterior.prior, [window])
    direction = covariance @ rows[0]
    return model_from_factors(posterior, mean + z_score * direction / math.sqrt(float(rows[0] @ direction)))


def assess_quality(posterior: Posterior) -> CalibrationQuality:
    """Return whether base and work are known, and if not, why."""
    mean, covariance = factor_moments(posterior)
    base_sd, work_sd, load_sd = math.inf, math.inf, 0.0
    if posterior.weight > 0:
        total = information_matrix(posterior) / posterior.weight
        row = total[:, :6].sum(axis=1)  # shares sum to one, so this is the mean of x
        prior = coefficients(posterior.prior)
        work = row.copy()
        work[0] = -row[1] * prior[0] / prior[1]  # the base of a step with prefill is no work, its excess is
        work_part = float(work @ mean)
        base_sd = math.sqrt(covariance[0, 0]) / float(mean[0])
        work_sd = math.sqrt(float(work @ covariance @ work)) / work_part if work_part > 0 else math.inf
        load_sd = math.sqrt(max(0.0, float(total[0, 0] - row[0] ** 2)))
    noise_sd = math.sqrt(noise_variance(posterior))
    insufficiency = _insufficiency(posterior.weight, noise_sd, load_sd, base_sd, work_sd)
    message = insufficiency or f"base known within {base_sd:.1%}, work at this mix within {work_sd:.1%} (one deviation)"
    return CalibrationQuality(insufficiency is None, message, base_sd, work_sd, noise_sd, load_sd, posterior.weight)


def step_time_ratio(posterior: Posterior) -> float | None:
    """Return measured over predicted time of the observed steps, by the prior; None until there are `_MIN_WINDOWS`."""
    if posterior.weight < _MIN_WINDOWS:
        return None
    return sum(posterior.moment[:6]) / posterior.weight  # the six shares of a row sum to one


def _insufficiency(windows: float, noise_sd: float, load_sd: float, base_sd: float, work_sd: float) -> str | None:
    if noise_sd > _MAX_NOISE_SD:
        return f"not known: the windows disagree by {noise_sd:.0%} with any model"
    if windows < _MIN_WINDOWS:
        return f"not known: {windows:.0f} measured windows, {_MIN_WINDOWS:.0f} are needed"
    if load_sd < _MIN_LOAD_SD:
        return "not known: the load hardly varied, so a step's base and its work look alike"
    if max(base_sd, work_sd) > _MAX_PARAMETER_SD:
        return f"not known: base within {base_sd:.0%}, work within {work_sd:.0%} (one deviation)"
    return None
