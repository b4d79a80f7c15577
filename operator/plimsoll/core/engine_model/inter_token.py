"""Inter-token latency (ITL): its distribution, and the load up to which its 99th percentile meets a target.

Problem: a mean over a response hides that every stream stalls during a prefill. Chunk budget and prompt lengths decide
how long it stalls, and load decides how often. More replicas therefore help, but only up to a point.

Idea: an ITL is a step. Prompts arrive at random for a running stream, so the prefill in a step is a compound sum of
chunks that the budget has cut; the rest of the step is the decoding of the batch. Panjer's recursion (1981, "Recursive
evaluation of a family of compound distributions") gives the distribution. While fewer than 1 % of the steps include a
prefill, the percentile is that of a plain step; beyond that, it rises into the steps with prefill.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from plimsoll.core.engine_model.step_time import TierWork, batch_dispersion
from plimsoll.core.workload import FloatArray

ITL_SHARE: Final = 0.99  # the percentile that an ITL target applies to
LIGHT_LOAD: Final = 0.1  # share of a replica's capacity; an SLO that is violated at this load is infeasible
_GRID_CELLS: Final = 160  # cells of the grid for sums of chunks
_HERMITE_NODES, _HERMITE_WEIGHTS = np.polynomial.hermite_e.hermegauss(5)  # normal quadrature
_NODE_MASSES: Final = _HERMITE_WEIGHTS / _HERMITE_WEIGHTS.sum()
_Z_99: Final = 2.326  # normal quantile of 99 %
_MAX_RHO: Final = 0.995  # above this rho there is no steady state
_REL_TOLERANCE: Final = 1e-3  # relative tolerance of a rate or time
_MIN_EXCESS: Final = 1e-6  # of the index of dispersion over 1; a smaller excess counts as Poisson


@dataclass(frozen=True)
class InterTokenLatency:
    """ITL model of one replica of a serve or decode tier.

    token_budget: of its steps; None on a decode tier. There the stalls are the posting of KV reads, undivided, and the
    batch is kept constant at the one that the rate causes.
    """

    work: TierWork
    token_budget: int | None

    def share_above(self, rate_per_s: float, limit_s: float) -> float:
        """Share of ITLs longer than limit_s, at a rate of one replica.

        A step without prefill takes base + rho_d T + V s, where rho_d is the share of time that decoding takes, s the
        time that a sequence adds, and V the batch's variance over its mean: a token sees the others and itself. N
        chunks arrived during an earlier step: their mean is lambda T, their variance is larger by lambda^2 var T, var T
        as in `queueing.step_wait_s`; negative binomial, as if T were a gamma variable.
        """
        work, w = self.work, self.work.workload
        rho = work.rho(rate_per_s)
        if rho >= _MAX_RHO:
            return 1.0
        step_s = float(work.tpot_s(rate_per_s))
        batch = rate_per_s * work.mean_output_tokens * step_s
        dispersion = self._dispersion(rho)
        mean_plain_step_s = work.base_s + rate_per_s * w.mean(work.decode_s) * step_s + work.sequence_s * dispersion
        step_sd_s = work.sequence_s * math.sqrt(batch * dispersion)
        return self._share_above(
            rate_per_s, limit_s, step_s, np.maximum(mean_plain_step_s + step_sd_s * _HERMITE_NODES, work.base_s), batch
        )

    def batch_p99(self, rate_per_s: float) -> float:
        """99th percentile of the running sequences at a rate of one replica; for a constant batch, that batch."""
        batch = rate_per_s * self.work.mean_output_tokens * float(self.work.tpot_s(rate_per_s))
        return batch + _Z_99 * math.sqrt(batch * self._dispersion(self.work.rho(rate_per_s)))

    def _dispersion(self, rho: FloatArray) -> float:
        return 0.0 if self.token_budget is None else float(batch_dispersion(self.work, rho))

    def _share_above(
        self, rate_per_s: float, limit_s: float, step_s: float, plain_steps_s: FloatArray, batch: float
    ) -> float:
        """plain_steps_s: times of steps without prefill."""
        sizes, masses, full_s = self._stall_pieces(batch)
        each, pieces = masses / masses.sum(), rate_per_s * float(masses.sum())
        rho_p = min(pieces * float(each @ sizes), _MAX_RHO)
        variance = pieces * float(each @ sizes**2) * step_s / (1 - rho_p**2)
        piece_count = _PieceCount(pieces * step_s, pieces * variance / step_s)
        prob_none = piece_count.prob_none(1.0)
        room = np.maximum(limit_s - plain_steps_s - self.work.any_stall_s, 0.0)
        prob_within = np.full(room.size, prob_none)
        if np.any(room > 0):
            cell = float(room.max()) / (_GRID_CELLS - 1)
            below = piece_count.compound_cdf(_discretize(sizes, each, cell))
            prob_within = np.where(room > 0, np.interp(room / cell, np.arange(_GRID_CELLS), below), prob_none)
        prob_above = np.array([float(each[sizes > max_pieces].sum()) for max_pieces in room])
        prob_within = np.where(room >= full_s, np.maximum(prob_within, piece_count.prob_none(prob_above)), prob_within)
        return max(
            0.0,
            float(1 - _NODE_MASSES @ (np.where(plain_steps_s <= limit_s, prob_none, 0.0) + prob_within - prob_none)),
        )

    def _stall_pieces(self, batch: float) -> tuple[FloatArray, FloatArray, float]:
        """Times of a prompt's chunks, chunks of each time per request, and the time of a full budget of mean chunks,
        seconds.

        Chunks that take longer together than a full budget are not in one step.
        """
        work, w = self.work, self.work.workload
        if self.token_budget is None:
            return work.stall_s, w.weights, math.inf
        chunk = max(1.0, self.token_budget - batch)
        tokens = np.maximum(w.uncached_tokens, 1e-9)
        per_token = work.stall_s / tokens
        full_chunks = np.floor(tokens / chunk)
        sizes = np.concatenate((per_token * chunk, per_token * (tokens - full_chunks * chunk)))
        masses = np.concatenate((w.weights * full_chunks, w.weights))
        return sizes, masses, chunk * w.mean(work.stall_s) / w.mean(tokens)


def _discretize(sizes: FloatArray, shares: FloatArray, cell: float) -> FloatArray:
    """Shares of sizes in cells, each divided between its two neighbours so that the mean stays.

    Sizes beyond the grid are dropped, because no sum with them fits.
    """
    positions = sizes / cell
    lower = np.floor(positions).astype(np.intp)
    part = positions - lower
    masses = np.zeros(_GRID_CELLS)
    for index, mass in ((lower, shares * (1 - part)), (lower + 1, shares * part)):
        inside = index < _GRID_CELLS
        masses += np.bincount(index[inside], mass[inside], _GRID_CELLS)
    return masses


class _PieceCount:
    """Number of chunks in a step: negative binomial, with a mean and an index of dispersion less 1 (0: Poisson).

    E[z^N] = (1 + beta (1 - z))^-r.
    """

    def __init__(self, mean: float, excess: float) -> None:
        self._beta = max(excess, _MIN_EXCESS)
        self._shape = mean / self._beta

    def prob_none(self, share: FloatArray | float) -> FloatArray:
        """P(no chunk of a kind that is this share of all)."""
        return np.asarray(np.exp(-self._shape * np.log1p(self._beta * np.asarray(share))))

    def compound_cdf(self, severity: FloatArray) -> FloatArray:
        """P(sum of chunks <= cell), by Panjer's recursion, for sizes with these shares in cells."""
        a = self._beta / (1 + self._beta)
        b = (self._shape - 1) * a
        probabilities = np.zeros(_GRID_CELLS)
        probabilities[0] = self.prob_none(1 - severity[0])
        first, second = a * severity, b * severity * np.arange(_GRID_CELLS)
        for cell in range(1, _GRID_CELLS):
            previous = probabilities[cell - 1 :: -1]
            probabilities[cell] = first[1 : cell + 1] @ previous + second[1 : cell + 1] @ previous / cell
            probabilities[cell] /= 1 - first[0]
        return np.minimum(np.cumsum(probabilities), 1.0)


def itl_quantile_s(itl: InterTokenLatency, rate_per_s: float, share: float = ITL_SHARE) -> float:
    """The `share` quantile of ITL at a rate of one replica, seconds; infinite without a steady state."""
    if float(itl.work.rho(rate_per_s)) >= _MAX_RHO:
        return math.inf
    low, high = itl.work.base_s + min(0.0, itl.work.any_stall_s), 2 * itl.work.base_s
    while itl.share_above(rate_per_s, high) > 1 - share:
        low, high = high, 2 * high
    while high > low * (1 + _REL_TOLERANCE):
        middle = (low + high) / 2
        low, high = (middle, high) if itl.share_above(rate_per_s, middle) > 1 - share else (low, middle)
    return high


def max_rate_within_itl(itl: InterTokenLatency, highest_per_s: float, limit_s: float) -> float:
    """The highest rate of one replica with 99 % of its ITLs within limit_s, requests/s.

    Infinity if the limit is met up to highest_per_s, the rate that its other limits allow. 0 if it is violated at a
    tenth of that.
    """
    if itl.share_above(highest_per_s, limit_s) <= 1 - ITL_SHARE:
        return math.inf
    low, high = LIGHT_LOAD * highest_per_s, highest_per_s
    if itl.share_above(low, limit_s) > 1 - ITL_SHARE:
        return 0.0
    while high - low > _REL_TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (middle, high) if itl.share_above(middle, limit_s) <= 1 - ITL_SHARE else (low, middle)
    return low
