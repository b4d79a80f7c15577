"""Update of the posterior by one more window, with detection of outliers and shifts.

Problem: one invalid scrape must not move an estimate that took an hour to learn, and a permanent slow-down of a GPU by
18 % must be followed in minutes, not in half-lives. Both look alike in the first window.

Idea: a residual of more than `OUTLIER_SDS` deviations does not move the estimate. It widens the noise, and it goes into
a two-sided CUSUM (Page, Biometrika 41, 1954) together with all smaller ones. One outlier cannot reach its limit.
Persistent residuals do, and then nearly all learned information is discarded: a permanent change of the prefill speed
by 18 % is in the estimate to 3 % within 16 updates. In addition, all information decays by half-lives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from plimsoll.core import units
from plimsoll.core.engine_model.calibration.counter_window import WindowSums, validity_error
from plimsoll.core.engine_model.calibration.posterior_model import (
    UPPER_TRIANGLE,
    Floats,
    Posterior,
    coefficients,
    factor_moments,
    information_matrix,
    noise_variance,
    regression,
    step_counts,
)
from plimsoll.core.engine_model.calibration.replica_speed import ReplicaSpeeds

OUTLIER_SDS: Final = 4.0  # standard deviations

_CUSUM_SLACK: Final = 0.5  # Page's test, tuned for shifts of one deviation
_CUSUM_CLIP: Final = 3.0
_CUSUM_LIMIT: Final = 10.0  # five outliers in a row reach it from zero, as 4 (clip - slack) = 10
_NOISE_CLIP: Final = 2.5  # deviations; Huber's proposal 2: enough that contradictory windows raise the noise
_WINDOWS_AFTER_SHIFT: Final = 1.0  # weight that remains after a shift, in windows
_FLOOR_TOLERANCE: Final = 0.9  # noise may bring a window a little below it
_MAX_PRIOR_RATIO: Final = 20.0  # times the prior


def update(posterior: Posterior, window: WindowSums) -> Posterior:
    """Return the posterior after one more window of one replica; unchanged if `rejection_reason` has one."""
    return update_all(posterior, (window,))


def update_all(
    posterior: Posterior, windows: Sequence[WindowSums], replica_speeds: ReplicaSpeeds | None = None
) -> Posterior:
    """Return the posterior after one window each of several replicas, in any order.

    All windows are compared with the same posterior, and the CUSUM takes their joint residual, sum / sqrt(n). If time
    goes backwards, nothing is discounted and the new time applies. replica_speeds: speed estimates, updated by these
    windows; None: all replicas are equal.
    """
    usable = [window for window in windows if rejection_reason(posterior, window) is None]
    if not usable:
        return posterior
    before = _decay(posterior, max(window.end_s for window in usable))
    rows, ratios, weights = regression(posterior.prior, usable)
    if replica_speeds is not None:
        names, ends_s = [window.replica for window in usable], [window.end_s for window in usable]
        ratios = replica_speeds.normalize(names, ends_s, ratios, rows @ factor_moments(before)[0], weights)
    residuals = _standardized_residuals(before, rows, ratios, weights)
    joint_residual = float(
        np.clip(np.clip(residuals, -OUTLIER_SDS, OUTLIER_SDS).sum() / math.sqrt(len(usable)), -_CUSUM_CLIP, _CUSUM_CLIP)
    )
    shift_up = max(0.0, before.shift_up + joint_residual - _CUSUM_SLACK)
    shift_down = max(0.0, before.shift_down - joint_residual - _CUSUM_SLACK)
    if max(shift_up, shift_down) > _CUSUM_LIMIT:
        before, shift_up, shift_down = (
            _scale(before, min(1.0, _WINDOWS_AFTER_SHIFT / (_WINDOWS_AFTER_SHIFT + before.weight))),
            0.0,
            0.0,
        )
        residuals = _standardized_residuals(before, rows, ratios, weights)
    return _add_windows(replace(before, shift_up=shift_up, shift_down=shift_down), rows, ratios, weights, residuals)


def rejection_reason(posterior: Posterior, window: WindowSums) -> str | None:
    """Return why a window is not used; None if it is."""
    fault_reason = validity_error(window)
    if fault_reason is not None:
        return fault_reason
    work = step_counts(window)
    expected_s = float(work @ coefficients(posterior.prior))
    if window.busy_s > _MAX_PRIOR_RATIO * expected_s:
        return f"{units.format_seconds(window.busy_s)} for work of {units.format_seconds(expected_s)}"
    floor_s = float(work @ coefficients(posterior.floor))
    if window.busy_s < _FLOOR_TOLERANCE * floor_s:
        return f"{units.format_seconds(window.busy_s)} is faster than the hardware's {units.format_seconds(floor_s)}"
    return None


def _standardized_residuals(posterior: Posterior, rows: Floats, ratios: Floats, weights: Floats) -> Floats:
    """Return the residual of each window in its own standard deviations, shape (n,)."""
    mean, covariance = factor_moments(posterior)
    variance = noise_variance(posterior) / weights + np.einsum("ij,jk,ik->i", rows, covariance, rows)
    residuals: Floats = (ratios - rows @ mean) / np.sqrt(variance)
    return residuals


def _add_windows(before: Posterior, rows: Floats, ratios: Floats, weights: Floats, residuals: Floats) -> Posterior:
    """Add the information of the windows within OUTLIER_SDS, and the clipped residuals of all to the noise."""
    inlier_weights = weights * (np.abs(residuals) <= OUTLIER_SDS)
    information_sum = information_matrix(before) + (rows * inlier_weights[:, None]).T @ rows
    moment = np.array(before.moment) + (inlier_weights * ratios) @ rows
    squares = np.minimum(np.abs(residuals), _NOISE_CLIP) ** 2 * noise_variance(before)
    return replace(
        before,
        information=tuple(information_sum[UPPER_TRIANGLE].tolist()),
        moment=tuple(moment.tolist()),
        weight=before.weight + float(inlier_weights.sum()),
        noise_weight=before.noise_weight + float(weights.sum()),
        noise_sum=before.noise_sum + float(weights @ squares),
    )


def _decay(posterior: Posterior, now_s: float) -> Posterior:
    elapsed_s = 0.0 if posterior.updated_s is None else max(0.0, now_s - posterior.updated_s)
    return replace(_scale(posterior, 0.5 ** (elapsed_s / posterior.half_life_s)), updated_s=now_s)


def _scale(posterior: Posterior, factor: float) -> Posterior:
    return replace(
        posterior,
        information=tuple(factor * value for value in posterior.information),
        moment=tuple(factor * value for value in posterior.moment),
        weight=factor * posterior.weight,
        noise_weight=factor * posterior.noise_weight,
        noise_sum=factor * posterior.noise_sum,
    )
