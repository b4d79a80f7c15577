"""One more window: whether it is believed, and what it changes.

Problem: one garbage scrape must not move an estimate that took an hour to earn, and a GPU that slows down by 18 % for
good must be followed in minutes, not in half-lives. Both look alike in the first window.

Idea: a surprise of more than `GATE` deviations does not move the estimate; it widens the noise, and it feeds a
two-sided CUSUM (Page, Biometrika 41, 1954) together with all smaller ones. One wild window cannot reach its limit;
surprises that persist do, and then nearly all that was learned is thrown away: prefill that has become 18 % slower or
faster for good is in the estimate to 3 % within 16 updates. Besides, everything fades by half-lives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from plimsoll.core.calibration.belief import (
    UPPER,
    Floats,
    Posterior,
    belief,
    coefficients,
    counted,
    information,
    noise_variance,
    regression,
)
from plimsoll.core.calibration.replicas import Replicas
from plimsoll.core.calibration.window import WindowSums, fault

GATE: Final = 4.0  # standard deviations

_CUSUM_SLACK: Final = 0.5  # Page's test, tuned for shifts of one deviation
_CUSUM_CLIP: Final = 3.0
_CUSUM_LIMIT: Final = 10.0  # five wild windows in a row reach it from zero, as 4 (clip - slack) = 10
_NOISE_CLIP: Final = 2.5  # deviations; Huber's proposal 2: enough that contradictory windows raise the noise
_KEPT_WINDOWS: Final = 1.0  # what is left after a shift is worth that many windows
_FASTER_THAN_FLOOR: Final = 0.9  # noise may bring a window a little below it
_ABSURD: Final = 20.0  # times the prior


def update(posterior: Posterior, window: WindowSums) -> Posterior:
    """The posterior after one more window of one replica; the same one if the window cannot be used (`refusal`)."""
    return update_all(posterior, (window,))


def update_all(posterior: Posterior, windows: Sequence[WindowSums], replicas: Replicas | None = None) -> Posterior:
    """The posterior after one window each of several replicas, in whatever order they come.

    All are judged by the same posterior, and the CUSUM takes their joint surprise, sum / sqrt(n). Time that goes
    backwards forgets nothing and is believed from then on. replicas: what is known of each one's speed, which takes
    these windows in; None: all are taken to be alike.
    """
    usable = [window for window in windows if refusal(posterior, window) is None]
    if not usable:
        return posterior
    before = _aged(posterior, max(window.end_s for window in usable))
    rows, ratios, weights = regression(posterior.prior, usable)
    if replicas is not None:
        names, ends_s = [window.replica for window in usable], [window.end_s for window in usable]
        ratios = replicas.evened(names, ends_s, ratios, rows @ belief(before)[0], weights)
    surprises = _surprises(before, rows, ratios, weights)
    together = float(np.clip(np.clip(surprises, -GATE, GATE).sum() / math.sqrt(len(usable)), -_CUSUM_CLIP, _CUSUM_CLIP))
    up = max(0.0, before.shift_up + together - _CUSUM_SLACK)
    down = max(0.0, before.shift_down - together - _CUSUM_SLACK)
    if max(up, down) > _CUSUM_LIMIT:
        before, up, down = _scaled(before, min(1.0, _KEPT_WINDOWS / (_KEPT_WINDOWS + before.weight))), 0.0, 0.0
        surprises = _surprises(before, rows, ratios, weights)
    return _learned(replace(before, shift_up=up, shift_down=down), rows, ratios, weights, surprises)


def refusal(posterior: Posterior, window: WindowSums) -> str | None:
    """Why a window is not used at all, in words; None if it is."""
    wrong = fault(window)
    if wrong is not None:
        return wrong
    work = counted(window)
    expected_s = float(work @ coefficients(posterior.prior))
    if window.busy_s > _ABSURD * expected_s:
        return f"{window.busy_s:.3g} s for work of {expected_s:.3g} s"
    floor_s = float(work @ coefficients(posterior.floor))
    if window.busy_s < _FASTER_THAN_FLOOR * floor_s:
        return f"{window.busy_s:.3g} s is faster than the hardware's {floor_s:.3g} s"
    return None


def _surprises(posterior: Posterior, rows: Floats, ratios: Floats, weights: Floats) -> Floats:
    """Each window's distance from what was expected of it, in its own standard deviations, shape (n,)."""
    mean, covariance = belief(posterior)
    variance = noise_variance(posterior) / weights + np.einsum("ij,jk,ik->i", rows, covariance, rows)
    surprises: Floats = (ratios - rows @ mean) / np.sqrt(variance)
    return surprises


def _learned(before: Posterior, rows: Floats, ratios: Floats, weights: Floats, surprises: Floats) -> Posterior:
    """Information of the windows inside the gate, and everybody's surprise, clipped, for the noise."""
    inside = weights * (np.abs(surprises) <= GATE)
    learned = information(before) + (rows * inside[:, None]).T @ rows
    moment = np.array(before.moment) + (inside * ratios) @ rows
    squares = np.minimum(np.abs(surprises), _NOISE_CLIP) ** 2 * noise_variance(before)
    return replace(
        before,
        information=tuple(learned[UPPER].tolist()),
        moment=tuple(moment.tolist()),
        weight=before.weight + float(inside.sum()),
        noise_weight=before.noise_weight + float(weights.sum()),
        noise_sum=before.noise_sum + float(weights @ squares),
    )


def _aged(posterior: Posterior, now_s: float) -> Posterior:
    elapsed_s = 0.0 if posterior.updated_s is None else max(0.0, now_s - posterior.updated_s)
    return replace(_scaled(posterior, 0.5 ** (elapsed_s / posterior.half_life_s)), updated_s=now_s)


def _scaled(posterior: Posterior, kept: float) -> Posterior:
    return replace(
        posterior,
        information=tuple(kept * value for value in posterior.information),
        moment=tuple(kept * value for value in posterior.moment),
        weight=kept * posterior.weight,
        noise_weight=kept * posterior.noise_weight,
        noise_sum=kept * posterior.noise_sum,
    )
