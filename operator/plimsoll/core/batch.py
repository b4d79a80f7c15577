"""How full a replica is kept: the one figure that the gate admits by and that sizing counts on.

Problem: the more run at once, the more leaves a replica, and the slower every stream becomes; a gate that fills it to
another batch than sizing reckons with refuses what was sized for, or leaves room that was paid for.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from plimsoll.core.latency import TierWork
from plimsoll.core.workload import FloatArray

HOPELESS_STEPS: Final = 2.0  # where no batch keeps the TPOT target: run at so many times the empty step
MODEL_ERROR: Final = 0.04  # standard deviation of what is left of the model's error once the pace is measured
_GRID: Final = 33  # points of the search for the fullest batch, which closes in by a factor of 16 each time
_CLOSINGS: Final = 3


def step_budget_s(work: TierWork, target_s: float, tail_scale: float = 1.0) -> float:
    """The mean step, s, at which an always full replica makes most goodput: the peak of rate times share in target.

    target_s: of TPOT, infinity for none. A target that no batch keeps is treated as lost, not as a reason to serve
    nobody.
    """
    if math.isinf(target_s):
        return math.inf
    least = work.step_s(1.0)
    if target_s <= least:
        return HOPELESS_STEPS * least
    low, high = 1.0, work.batch(target_s)
    best, between = 0, np.zeros(1)
    for _ in range(_CLOSINGS):
        between = np.linspace(low, high, _GRID)
        steps = np.array([work.step_s(float(batch)) for batch in between])
        best = int(np.argmax(between / steps * _within(work, steps, between, target_s, tail_scale)))
        low, high = float(between[max(best - 1, 0)]), float(between[min(best + 1, _GRID - 1)])
    return work.step_s(float(between[best]))


def held(work: TierWork, batch: float, target_s: float, tail_scale: float = 1.0) -> float:
    """Share of the requests in the TPOT target on a replica that is always full at this batch, 0 to 1."""
    if math.isinf(target_s):
        return 1.0
    return float(_within(work, np.array([work.step_s(batch)]), np.array([batch]), target_s, tail_scale)[0])


def _within(work: TierWork, steps_s: FloatArray, batches: FloatArray, target_s: float, tail_scale: float) -> FloatArray:
    """Share in target at each of several steady batches and their mean steps.

    A replica that refills each freed place runs a steady batch of n at a mean step T(n) = base + n w / E[O]. In the
    life of a request of O tokens each place is refilled O / E[O] times, a renewal process: the variance of all stalls p
    in it is n O / E[O] (var p + E[p]^2 scv O) (Cox 1962, "Renewal theory"), that of its TPOT 1 / O^2 of it, beside what
    is left of the model's error. Shares are normal, in Page's approximation (1977).
    """
    w = work.workload
    outputs = np.maximum(w.output_tokens, 1.0)
    stall_s, spread = w.mean(work.stall_s), (w.scv(work.stall_s) or 0.0) + (w.scv(w.output_tokens) or 0.0)
    lumps = batches[:, None] * stall_s**2 * spread / (work.mean_output_tokens * outputs[None, :])
    sigma = tail_scale * np.sqrt(lumps + (MODEL_ERROR * steps_s[:, None]) ** 2)
    score = (target_s - steps_s[:, None]) / sigma
    return np.asarray((0.5 + 0.5 * np.tanh(math.sqrt(2 / math.pi) * (score + 0.044715 * score**3))) @ w.weights)
