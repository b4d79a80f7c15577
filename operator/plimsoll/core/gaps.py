"""How long the gaps between two tokens of an answer are, and the load up to which their 99th percentile keeps a target.

Problem: a mean over an answer hides that every stream stands still while a prompt is read. How long it then stands is
decided by the chunk budget and the prompts; how often, by the load. So replicas do help, but only up to a point.

Idea: a gap is a step. Seen by a running stream prompts arrive at random, so that the prefill in a step is a compound
sum of pieces that the budget has cut, and what is left of the step is the batch's decoding. Its distribution is found
by Panjer's recursion (1981, "Recursive evaluation of a family of compound distributions"). While fewer than 1 % of the
steps have a prompt in them the percentile is that of a plain step; beyond, it climbs into the steps with prompts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from plimsoll.core.latency import TierWork, batch_dispersion
from plimsoll.core.workload import FloatArray

SHARE: Final = 0.99  # of the gaps, that a target bounds
LIGHT_LOAD: Final = 0.1  # of what a replica could carry: a promise that cannot be kept there is not worth offering
_CELLS: Final = 160  # of the grid on which sums of pieces are told apart
_CUTS, _DENSITY = np.polynomial.hermite_e.hermegauss(5)  # normal quadrature
_MASSES: Final = _DENSITY / _DENSITY.sum()
_FULLEST: Final = 2.326  # normal quantile of 99 %
_BUSIEST: Final = 0.995  # rho beyond which no steady state is reached
_CLOSE: Final = 1e-3  # of a rate or time: how near a root is found
_LEAST_EXCESS: Final = 1e-6  # of the variance of a count over its mean: below it is Poisson


@dataclass(frozen=True)
class Gaps:
    """The gaps of one replica of a serve or decode tier. token_budget: of its steps; None on a decode tier, whose
    stalls are the posting of KV reads, whole, and whose batch is held at what the rate makes of it."""

    work: TierWork
    token_budget: int | None

    def longer(self, rate_per_s: float, limit_s: float) -> float:
        """Share of the gaps that are longer than limit_s, at a rate of one replica.

        A step takes base + rho_d T + V s without a prompt, where rho_d is the share of time that decoding takes, s what
        a sequence adds and V the batch's variance over its mean: a token sees the others and itself. N pieces of a
        prompt have come during an earlier step: their mean is lambda T, their variance greater by lambda^2 var T, var T
        as in `queueing.step_wait_s`; negative binomial, as if T were a gamma variable.
        """
        work, w = self.work, self.work.workload
        rho = work.rho(rate_per_s)
        if rho >= _BUSIEST:
            return 1.0
        step = float(work.tpot_s(rate_per_s))
        batch = rate_per_s * work.mean_output_tokens * step
        dispersion = self._dispersion(rho)
        even = work.base_s + rate_per_s * w.mean(work.decode_s) * step + work.sequence_s * dispersion
        spread = work.sequence_s * math.sqrt(batch * dispersion)
        return self._longer(rate_per_s, limit_s, step, np.maximum(even + spread * _CUTS, work.base_s), batch)

    def fullest(self, rate_per_s: float) -> float:
        """Sequences that run at a rate of one replica, 99 % of the time no more; of a held batch, those held."""
        batch = rate_per_s * self.work.mean_output_tokens * float(self.work.tpot_s(rate_per_s))
        return batch + _FULLEST * math.sqrt(batch * self._dispersion(self.work.rho(rate_per_s)))

    def _dispersion(self, rho: FloatArray) -> float:
        return 0.0 if self.token_budget is None else float(batch_dispersion(self.work, rho))

    def _longer(self, rate_per_s: float, limit_s: float, step_s: float, even_s: FloatArray, batch: float) -> float:
        """even_s: steps without a prompt, at each of _CUTS."""
        sizes, masses, full_s = self._pieces(batch)
        each, pieces = masses / masses.sum(), rate_per_s * float(masses.sum())
        rho_p = min(pieces * float(each @ sizes), _BUSIEST)
        variance = pieces * float(each @ sizes**2) * step_s / (1 - rho_p**2)
        number = _Number(pieces * step_s, pieces * variance / step_s)
        none = number.none(1.0)
        room = np.maximum(limit_s - even_s - self.work.any_stall_s, 0.0)
        fits = np.full(room.size, none)
        if np.any(room > 0):
            cell = float(room.max()) / (_CELLS - 1)
            below = number.compound(_cells(sizes, each, cell))
            fits = np.where(room > 0, np.interp(room / cell, np.arange(_CELLS), below), none)
        longer = np.array([float(each[sizes > most].sum()) for most in room])
        fits = np.where(room >= full_s, np.maximum(fits, number.none(longer)), fits)
        return max(0.0, float(1 - _MASSES @ (np.where(even_s <= limit_s, none, 0.0) + fits - none)))

    def _pieces(self, batch: float) -> tuple[FloatArray, FloatArray, float]:
        """Times of a prompt's pieces, how many of each a request brings, and the time of a budget full of mean ones, s:
        several that take longer together are not in one step."""
        work, w = self.work, self.work.workload
        if self.token_budget is None:
            return work.stall_s, w.weights, math.inf
        chunk = max(1.0, self.token_budget - batch)
        tokens = np.maximum(w.uncached_tokens, 1e-9)
        per_token = work.stall_s / tokens
        full = np.floor(tokens / chunk)
        sizes = np.concatenate((per_token * chunk, per_token * (tokens - full * chunk)))
        masses = np.concatenate((w.weights * full, w.weights))
        return sizes, masses, chunk * w.mean(work.stall_s) / w.mean(tokens)


def _cells(sizes: FloatArray, shares: FloatArray, cell: float) -> FloatArray:
    """Shares of sizes in cells, each divided between its two neighbours so that the mean stays; what is larger than the
    grid is left out: no sum with it fits."""
    at = sizes / cell
    low = np.floor(at).astype(np.intp)
    part = at - low
    found = np.zeros(_CELLS)
    for place, mass in ((low, shares * (1 - part)), (low + 1, shares * part)):
        inside = place < _CELLS
        found += np.bincount(place[inside], mass[inside], _CELLS)
    return found


class _Number:
    """How many pieces a step has: negative binomial, of a mean and a variance over mean less 1 (0: Poisson).

    E[z^N] = (1 + beta (1 - z))^-r.
    """

    def __init__(self, mean: float, excess: float) -> None:
        self._beta = max(excess, _LEAST_EXCESS)
        self._r = mean / self._beta

    def none(self, share: FloatArray | float) -> FloatArray:
        """P(no piece of a kind that is such a share of all)."""
        return np.asarray(np.exp(-self._r * np.log1p(self._beta * np.asarray(share))))

    def compound(self, severity: FloatArray) -> FloatArray:
        """P(sum of pieces <= cell), by Panjer's recursion, for sizes with these shares in cells."""
        a = self._beta / (1 + self._beta)
        b = (self._r - 1) * a
        found = np.zeros(_CELLS)
        found[0] = self.none(1 - severity[0])
        first, second = a * severity, b * severity * np.arange(_CELLS)
        for cell in range(1, _CELLS):
            back = found[cell - 1 :: -1]
            found[cell] = first[1 : cell + 1] @ back + second[1 : cell + 1] @ back / cell
            found[cell] /= 1 - first[0]
        return np.minimum(np.cumsum(found), 1.0)


def gap_s(gaps: Gaps, rate_per_s: float, share: float = SHARE) -> float:
    """The `share` quantile of the gaps at a rate of one replica, s; infinite where there is no steady state."""
    if float(gaps.work.rho(rate_per_s)) >= _BUSIEST:
        return math.inf
    low, high = gaps.work.base_s + min(0.0, gaps.work.any_stall_s), 2 * gaps.work.base_s
    while gaps.longer(rate_per_s, high) > 1 - share:
        low, high = high, 2 * high
    while high > low * (1 + _CLOSE):
        middle = (low + high) / 2
        low, high = (middle, high) if gaps.longer(rate_per_s, middle) > 1 - share else (low, middle)
    return high


def rate_within(gaps: Gaps, highest_per_s: float, limit_s: float) -> float:
    """The highest rate of one replica with 99 % of its gaps within limit_s, requests/s.

    Infinity where that holds up to highest_per_s, what else it could carry; 0 where it does not at a tenth of that.
    """
    if gaps.longer(highest_per_s, limit_s) <= 1 - SHARE:
        return math.inf
    low, high = LIGHT_LOAD * highest_per_s, highest_per_s
    if gaps.longer(low, limit_s) > 1 - SHARE:
        return 0.0
    while high - low > _CLOSE * high:
        middle = (low + high) / 2
        low, high = (middle, high) if gaps.longer(middle, limit_s) <= 1 - SHARE else (low, middle)
    return low
