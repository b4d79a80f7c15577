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
from collections.abc import Iterable
from functools import lru_cache
from statistics import NormalDist
from typing import Final, NamedTuple

import numpy as np

from plimsoll.core.admission.limits import STRATA, Limits, Need
from plimsoll.core.knee import KV_QUANTILE
from plimsoll.core.workload import FloatArray

PARTS: Final = 32  # of a mean answer, in which time to come is looked at
AGED: Final = 12.0  # steps, or a part if that is more, after which it is reckoned anew how far all have got
# In those parts: close together while most residents are to end, further apart where only the longest are left.
_LOOKS: Final = np.array([*range(0, 32, 2), *range(32, 64, 4), 64, 80, 96, 128, 192, 256])
_FURTHEST: Final = 512  # parts; who is beyond is as far as that
_ENDLESS: Final = 1e12  # tokens
_KEPT: Final = 16  # tables that are kept, of a third of a megabyte each


class Row(NamedTuple):
    """What one request will hold: mean and variance at each look, and at its end, whenever that is."""

    mean: FloatArray
    variance: FloatArray
    end: float
    end_variance: float


class Lengths:
    """How long answers get. tokens: of answers of which each is as likely as any other, ascending.

    Tables by the part in which an answer is, and the look: share is the chance that it is there still.
    """

    def __init__(self, tokens: FloatArray) -> None:
        self.width = max(float(tokens.mean()) / PARTS, 1.0)
        self.later = self.width * _LOOKS
        parts = np.arange(_FURTHEST + 1)
        beyond = tokens.size - np.searchsorted(tokens, self.width * np.arange(parts.size + _LOOKS[-1]))
        here = beyond[: parts.size]
        known = here > 0
        count, first = np.maximum(here, 1), tokens.size - here
        self.share = np.where(known[:, None], beyond[parts[:, None] + _LOOKS] / count[:, None], 1.0)
        self.share[:, 0] = 1.0
        self.chance = self.share * (1.0 - self.share)
        # What is longer than any answer was is at its end until it ends.
        self.more = np.where(known[:, None], self.later, 0.0)
        upwards = np.concatenate((np.cumsum(tokens[::-1])[::-1], [0.0]))
        squares = np.concatenate((np.cumsum(tokens[::-1] ** 2)[::-1], [0.0]))
        self.ends = np.where(known, upwards[first] / count, 0.0)
        self.spread = np.where(known, np.maximum(squares[first] / count - self.ends**2, 0.0), 0.0)
        self._asked: Need | None = None
        self._row: Row | None = None

    def newcomer(self, need: Need) -> Row:
        """Of a request that comes now; asked once for all replicas."""
        if need is not self._asked or self._row is None:
            self._asked, self._row = need, self.row(need, 0.0)
        return self._row

    def row(self, need: Need, got: float) -> Row:
        """Of a request which has made so many tokens of each of its answers."""
        n, most = need.sequences, need.most_tokens
        got = min(got, most)
        part = min(int(got / self.width), _FURTHEST)
        prompt = (need.kv_mean_tokens - need.output_tokens) / n
        held = self.more[part] + (prompt + got)
        if most < math.inf:  # it has to have ended by the look after that
            last = int(np.searchsorted(self.later, most - got)) + 1
            held[last:] = 0.0
            np.minimum(held, prompt + most, out=held)
        mean, variance = self.share[part] * held, self.chance[part] * held * held
        end = min(max(float(self.ends[part]), got), most)
        # Between a and b the variance of a mean u is at most (b - u) (u - a) (Bhatia and Davis 2000).
        spread = min(float(self.spread[part]), (min(most, _ENDLESS) - end) * (end - got))
        return Row(n * mean, n * variance, n * (prompt + end), n * spread)

    def together(self, needs: Iterable[Need], got: FloatArray) -> Row:
        """The sum of the rows of several requests. got: of each, as in `row`."""
        told = np.array([(one.sequences, one.kv_mean_tokens, one.output_tokens, one.most_tokens) for one in needs])
        n, most = told[:, 0], told[:, 3]
        got = np.minimum(got, most)
        part = np.minimum((got / self.width).astype(np.intp), _FURTHEST)
        prompt = (told[:, 1] - told[:, 2]) / n
        held = self.more[part] + (prompt + got)[:, None]
        if np.any(most < math.inf):
            held[:, 1:][self.later[:-1] >= (most - got)[:, None]] = 0.0
            np.minimum(held, (prompt + most)[:, None], out=held)
        end = np.minimum(np.maximum(self.ends[part], got), most)
        spread = np.minimum(self.spread[part], (np.minimum(most, _ENDLESS) - end) * (end - got))
        mean, variance = n @ (self.share[part] * held), n @ (self.chance[part] * held * held)
        return Row(mean, variance, float(n @ (prompt + end)), float(n @ spread))


@lru_cache(_KEPT)
def lengths(answers: tuple[float, ...], mean: float, variance: float) -> Lengths:
    """Of `Limits.answers`; where they are not told, of lognormal answers of that mean and variance."""
    if answers:
        return Lengths(np.array(answers))
    sigma = math.sqrt(math.log1p(variance / (mean * mean))) if mean > 0 else 0.0
    normal = [NormalDist().inv_cdf((k + 0.5) / STRATA) for k in range(STRATA)]
    spread = np.exp(sigma * np.array(normal))
    return Lengths(mean * spread / spread.mean())


class Growth:
    """Of one replica. Steps are whatever its clock counts."""

    __slots__ = ("_aged", "_began", "_got", "_lengths", "_needs", "_sum")

    def __init__(self, limits: Limits) -> None:
        self._lengths = lengths(limits.answers, limits.output_mean, limits.output_variance)
        self._needs: dict[str, Need] = {}
        self._began: dict[str, float] = {}  # the step of the first token
        self._got: dict[str, float] = {}  # tokens, as the sum has it
        self._aged = -math.inf  # the step of the last look at all
        self._sum = _nothing()

    def add(self, id: str, need: Need, began: float, step: float) -> None:
        """One more, whose first token was made at that step, or will be. step: that of now."""
        got = max(0.0, step - began)
        self._needs[id], self._began[id], self._got[id] = need, began, got
        self._take(self._lengths.newcomer(need) if got == 0.0 else self._lengths.row(need, got), 1.0)

    def remove(self, id: str) -> None:
        """It has ended."""
        need, got = self._needs.pop(id), self._got.pop(id)
        del self._began[id]
        if self._needs:
            self._take(self._lengths.row(need, got), -1.0)
        else:  # so that rounding never adds up
            self._sum = _nothing()

    def _take(self, row: Row, sign: float) -> None:
        mean, variance, end, end_variance = self._sum
        mean += sign * row.mean
        variance += sign * row.variance
        self._sum = Row(mean, variance, end + sign * row.end, end_variance + sign * row.end_variance)

    def pass_to(self, step: float) -> None:
        """Reckons anew with how far all have got, where that is worth it."""
        if step - self._aged < max(AGED, self._lengths.width) or not self._needs:
            return
        self._aged = step
        got = np.maximum(step - np.array([*self._began.values()]), 0.0)
        self._got = dict(zip(self._needs, got.tolist(), strict=True))
        self._sum = self._lengths.together(self._needs.values(), got)

    def ends(self, need: Need | None = None) -> float:
        """What is held if all end at once, with one more that comes now: what is seldom exceeded."""
        _, _, end, variance = self._sum
        if need is not None:
            row = self._lengths.newcomer(need)
            end, variance = end + row.end, variance + row.end_variance
        return end + KV_QUANTILE * math.sqrt(max(variance, 0.0))

    def most(self, need: Need) -> float:
        """The most that is held at once from now on if one more comes now: what is seldom exceeded at any time."""
        row, found = self._lengths.newcomer(need), self._sum
        variance = np.maximum(found.variance + row.variance, 0.0)
        return float(np.max(found.mean + row.mean + KV_QUANTILE * np.sqrt(variance)))


def _nothing() -> Row:
    return Row(np.zeros(_LOOKS.size), np.zeros(_LOOKS.size), 0.0, 0.0)
