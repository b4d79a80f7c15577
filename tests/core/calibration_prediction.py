"""What a calibrated model predicts, which tests compare with recorded runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from plimsoll.core.engine_model.calibration.counter_window import WindowSums
from plimsoll.core.engine_model.calibration.estimates import MODEL_MISFIT_SD
from plimsoll.core.engine_model.calibration.posterior_model import (
    _IDENTIFIED_GAIN,
    Posterior,
    _information_gain,
    coefficients,
    factor_moments,
    information_matrix,
    model_from_factors,
    noise_variance,
    regression,
)
from plimsoll.core.engine_model.calibration.posterior_update import rejection_reason
from plimsoll.core.engine_model.step_time import StepModel


@dataclass(frozen=True, slots=True)
class WindowPrediction:
    """Prediction for one window, s: its busy time, the standard deviation of that, and the part that is work.

    rho = work_s / busy_s of an engine that never idles, and TPOT = base / (1 - rho).
    """

    busy_s: float
    sd_s: float
    work_s: float


def mean_model(posterior: Posterior) -> StepModel:
    """Return the posterior mean, nowhere faster than the floor.

    With assumed context sums, only its base is learned, and the split of its work is still the prior's: use
    `predict_window`.
    """
    mean, _ = factor_moments(posterior)
    return model_from_factors(posterior, mean)


def predict_window(posterior: Posterior, window: WindowSums) -> WindowPrediction:
    """Return the predicted time of a window's work; its own busy_s has no effect.

    With assumed lengths, the prediction and its deviation apply to the learned mix: plain counters do not show that
    another mix reads longer contexts. Raises ValueError for an unusable window.
    """
    rejection = rejection_reason(posterior, window)
    if rejection is not None:
        raise ValueError(f"nothing can be expected of a window: {rejection}")
    rows, ratios, _ = regression(posterior.prior, [window])
    mean, covariance = factor_moments(posterior)
    covariance = covariance + MODEL_MISFIT_SD**2 * np.outer(mean, mean)
    unit_s = window.busy_s / float(ratios[0])  # the prior's time
    busy_s = unit_s * float(rows[0] @ mean)
    base_s = window.steps * float(coefficients(posterior.prior)[0] * mean[0])
    return WindowPrediction(
        busy_s, unit_s * math.sqrt(float(rows[0] @ covariance @ rows[0])), max(0.0, busy_s - base_s)
    )


def count_identified_directions(posterior: Posterior) -> int:
    """Return how many independent combinations of the factors the data determine better than the prior: 0 to 7."""
    gain, _ = _information_gain(information_matrix(posterior) / noise_variance(posterior))
    return int((gain >= _IDENTIFIED_GAIN).sum())
