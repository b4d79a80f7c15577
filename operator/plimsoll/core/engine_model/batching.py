"""Batch size of a replica: the one figure that admission control fills to and that sizing assumes.

Problem: a larger batch completes more requests, but slows every stream. If admission control filled a replica to
another batch than sizing assumes, it would reject planned load, or leave paid capacity unused.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from plimsoll.core.engine_model.step_time import TierWork
from plimsoll.core.workload import FloatArray

INFEASIBLE_TPOT_STEPS: Final = 2.0  # step time, in empty steps, where no batch meets the TPOT target
MODEL_ERROR_SD: Final = 0.04  # standard deviation of the model error that remains after the step-time ratio is measured
_GRID_POINTS: Final = 33  # points of the grid search, which narrows by a factor of 16 in each round
_REFINEMENTS: Final = 3


def step_time_budget_s(work: TierWork, target_s: float, tail_scale: float = 1.0) -> float:
    """Mean step time, seconds, at which an always full replica has the most goodput: the peak of rate times share in
    target.

    target_s: of TPOT, infinity for none. If no batch meets the target, the target is dropped, so that requests are
    still served.
    """
    if math.isinf(target_s):
        return math.inf
    min_step_s = work.step_s(1.0)
    if target_s <= min_step_s:
        return INFEASIBLE_TPOT_STEPS * min_step_s
    low, high = 1.0, work.batch(target_s)
    best_index, batches = 0, np.zeros(1)
    for _ in range(_REFINEMENTS):
        batches = np.linspace(low, high, _GRID_POINTS)
        steps_s = np.array([work.step_s(float(batch)) for batch in batches])
        best_index = int(
            np.argmax(batches / steps_s * _shares_within_tpot(work, steps_s, batches, target_s, tail_scale))
        )
        low, high = float(batches[max(best_index - 1, 0)]), float(batches[min(best_index + 1, _GRID_POINTS - 1)])
    return work.step_s(float(batches[best_index]))


def share_within_tpot(work: TierWork, batch: float, target_s: float, tail_scale: float = 1.0) -> float:
    """Share of requests within the TPOT target on a replica that is always full at this batch, 0 to 1."""
    if math.isinf(target_s):
        return 1.0
    return float(_shares_within_tpot(work, np.array([work.step_s(batch)]), np.array([batch]), target_s, tail_scale)[0])


def _shares_within_tpot(
    work: TierWork, steps_s: FloatArray, batches: FloatArray, target_s: float, tail_scale: float
) -> FloatArray:
    """Return the share within the target for each of several steady batches and their mean steps.

    A replica that refills each free slot runs a steady batch of n at a mean step T(n) = base + n w / E[O]. During a
    request of O tokens each slot is refilled O / E[O] times, a renewal process: the variance of all stalls p in it is n
    O / E[O] (var p + E[p]^2 scv O) (Cox 1962, "Renewal theory"). The variance of its TPOT is 1 / O^2 of that, plus the
    remaining model error. Shares are normal, in Page's approximation (1977).
    """
    w = work.workload
    outputs = np.maximum(w.output_tokens, 1.0)
    stall_s, spread = w.mean(work.stall_s), (w.scv(work.stall_s) or 0.0) + (w.scv(w.output_tokens) or 0.0)
    stall_variance = batches[:, None] * stall_s**2 * spread / (work.mean_output_tokens * outputs[None, :])
    sigma = tail_scale * np.sqrt(stall_variance + (MODEL_ERROR_SD * steps_s[:, None]) ** 2)
    score = (target_s - steps_s[:, None]) / sigma
    return np.asarray((0.5 + 0.5 * np.tanh(math.sqrt(2 / math.pi) * (score + 0.044715 * score**3))) @ w.weights)
