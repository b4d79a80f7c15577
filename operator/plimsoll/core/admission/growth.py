"""What the residents of a replica hold of its KV cache, now and until they have ended.

Problem: an answer holds all of its tokens only at its end, and those that run are at all stages. Room for the end of
each is room that is hardly ever used: with answers six times as long as their prompts, for two fifths of what fits.
Room for what they hold now is too little: they grow, and those that came together are at their largest together. Nor
are those that run like those that come: where one answer of seven is twenty times as long as the others, four of five
that run are of these.

Idea: what an answer that has got so far will hold at a later step is a chance, its tokens by then if it still runs and
nothing otherwise, and how likely it still runs is told by the answers of before: the share of those that got so far and
got further. Residents end independently of each other, so that means and variances add up over all of them, at each of
some steps to come. They are sums that are kept as residents come and go, and reckoned anew as they get on. Time is
counted in the engine's steps: how fast they are does not matter then.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from plimsoll.core.admission.limits import STRATA, Limits, Need
from plimsoll.core.knee import KV_QUANTILE

FloatArray = npt.NDArray[np.float64]

PARTS: Final = 32  # of a mean answer, in which time to come is looked at
# In those parts: close together while most residents are to end, further apart where only the longest are left.
_LOOKS: Final = np.array([*range(0, 32, 2), *range(32, 64, 4), 64, 80, 96, 128, 192, 256])
_FURTHEST: Final = 1024  # parts; who is beyond is as far as that
_KEPT: Final = 64  # answers' tables that are kept, of as many models


class Row(NamedTuple):
    """What one request will hold: mean and variance at each look, and at its end, whenever that is."""

    mean: FloatArray
    variance: FloatArray
    end: float
    end_variance: float


class Lengths:
    """How long answers get. tokens: of answers of which each is as likely as any other, ascending."""

    def __init__(self, tokens: FloatArray) -> None:
        self.width = max(float(tokens.mean()) / PARTS, 1.0)
        grid = self.width * np.arange(_FURTHEST + _LOOKS[-1] + 1)
        beyond = tokens.size - np.searchsorted(tokens, grid)
        self.still = beyond / tokens.size  # share of answers that get as far as each part
        upwards = np.concatenate((np.cumsum(tokens[::-1])[::-1], [0.0]))
        squares = np.concatenate((np.cumsum(tokens[::-1] ** 2)[::-1], [0.0]))
        first, count = tokens.size - beyond, np.maximum(beyond, 1)
        # Of those that no answer is as long as nothing is known: they are at their ends until they end.
        self.ends = np.where(beyond > 0, upwards[first] / count, grid)
        self.spread = np.where(beyond > 0, np.maximum(squares[first] / count - self.ends**2, 0.0), 0.0)
        self._asked: Need | None = None
        self._row: Row | None = None

    def newcomer(self, need: Need) -> Row:
        """Of a request that comes now; asked once for all replicas."""
        if need is not self._asked or self._row is None:
            self._asked, self._row = need, self.rows([need], np.zeros(1))[0]
        return self._row

    def rows(self, needs: list[Need], got: FloatArray) -> list[Row]:
        """Of each request, which has made so many tokens of each of its answers, one number a request."""
        count = np.array([need.sequences for need in needs], dtype=float)
        most = np.array([need.most_tokens for need in needs])
        prompt = np.array([need.kv_mean_tokens - need.output_tokens for need in needs]) / count
        got = np.minimum(got, most)
        part = np.minimum((got / self.width).astype(np.intp), _FURTHEST)
        here = self.still[part]
        known = here > 0.0
        later = got[:, None] + self.width * _LOOKS
        share = self.still[part[:, None] + _LOOKS] / np.where(known, here, 1.0)[:, None]
        share[:, 0] = 1.0
        share[~known] = 1.0
        share[:, 1:][later[:, :-1] >= most[:, None]] = 0.0  # it has to have ended by the look before
        held = prompt[:, None] + np.minimum(np.where(known[:, None], later, got[:, None]), most[:, None])
        end = prompt + np.minimum(np.maximum(self.ends[part], got), most)
        # Between a and b the variance is at most a quarter of (b - a)^2 (Popoviciu 1935).
        spread = np.minimum(self.spread[part], (most - got) ** 2 / 4.0)
        mean = count[:, None] * share * held
        variance = count[:, None] * share * (1.0 - share) * held * held
        ends, spreads = (count * end).tolist(), (count * spread).tolist()
        return [Row(*row) for row in zip(mean, variance, ends, spreads, strict=True)]


@lru_cache(_KEPT)
def lengths(answers: tuple[float, ...], mean: float, variance: float) -> Lengths:
    """Of `Limits.answers`; where they are not told, of lognormal answers of that mean and variance."""
    if answers:
        return Lengths(np.sort(np.array(answers)))
    sigma = math.sqrt(math.log1p(variance / (mean * mean))) if mean > 0 else 0.0
    normal = [NormalDist().inv_cdf((k + 0.5) / STRATA) for k in range(STRATA)]
    spread = np.exp(sigma * np.array(normal))
    return Lengths(mean * spread / spread.mean())


class Growth:
    """Of one replica. Steps are whatever its clock counts."""

    __slots__ = ("_began", "_due", "_end", "_end_variance", "_lengths", "_mean", "_needs", "_rows", "_variance")

    def __init__(self, limits: Limits) -> None:
        self._lengths = lengths(limits.answers, limits.output_mean, limits.output_variance)
        self._needs: dict[str, Need] = {}
        self._began: dict[str, float] = {}  # the step of the first token
        self._rows: dict[str, Row] = {}
        self._due = -math.inf
        self._clear()

    def _clear(self) -> None:
        self._mean, self._variance = np.zeros(_LOOKS.size), np.zeros(_LOOKS.size)
        self._end = self._end_variance = 0.0

    def add(self, id: str, need: Need, began: float, step: float) -> None:
        """One more, whose first token was made at that step, or will be. step: that of now."""
        self._needs[id], self._began[id] = need, began
        fresh = began >= step
        row = self._lengths.newcomer(need) if fresh else self._lengths.rows([need], np.array([step - began]))[0]
        self._rows[id] = row
        self._mean += row.mean
        self._variance += row.variance
        self._end += row.end
        self._end_variance += row.end_variance

    def remove(self, id: str) -> None:
        """It has ended."""
        del self._needs[id], self._began[id]
        row = self._rows.pop(id)
        if not self._rows:  # so that rounding never adds up
            self._clear()
            return
        self._mean -= row.mean
        self._variance -= row.variance
        self._end -= row.end
        self._end_variance -= row.end_variance

    def pass_to(self, step: float) -> None:
        """Reckons anew with how far all have got, where that is worth it."""
        if step < self._due:
            return
        self._due = step + self._lengths.width
        if not self._needs:
            return
        got = np.maximum(step - np.array([*self._began.values()]), 0.0)
        rows = self._lengths.rows([*self._needs.values()], got)
        self._rows = dict(zip(self._needs, rows, strict=True))
        self._mean = np.sum([row.mean for row in rows], axis=0)
        self._variance = np.sum([row.variance for row in rows], axis=0)
        self._end = math.fsum(row.end for row in rows)
        self._end_variance = math.fsum(row.end_variance for row in rows)

    def ends(self, need: Need | None = None) -> float:
        """What is held if all end at once, with one more that comes now: what is seldom exceeded."""
        end, variance = self._end, self._end_variance
        if need is not None:
            row = self._lengths.newcomer(need)
            end, variance = end + row.end, variance + row.end_variance
        return end + KV_QUANTILE * math.sqrt(max(variance, 0.0))

    def most(self, need: Need) -> float:
        """The most that is held at once from now on if one more comes now: what is seldom exceeded at any time."""
        row = self._lengths.newcomer(need)
        variance = np.maximum(self._variance + row.variance, 0.0)
        return float(np.max(self._mean + row.mean + KV_QUANTILE * np.sqrt(variance)))
