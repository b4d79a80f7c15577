"""Loads that are drawn: who comes when, with how many tokens; the same seed, the same requests.

Rates that change are Poisson arrivals thinned from the highest rate. Lengths are lognormal and independent of each
other and of the time; sigma is that of their logarithm, and the means are kept whatever it is.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from plimsoll.sim.visit import Asked

Floats = NDArray[np.float64]


class Load(Protocol):
    """length_s: of the load."""

    @property
    def length_s(self) -> float: ...

    def make(self, seed: int) -> list[Asked]:
        """Its requests in order of time."""
        ...


@dataclass(frozen=True)
class Lengths:
    """Mean tokens in and out of lognormal draws."""

    prompt: float
    output: float
    sigma: float = 0.3

    def draw(self, rng: np.random.Generator, requests: int) -> list[tuple[int, int]]:
        spread = np.exp(self.sigma * rng.standard_normal((requests, 2)) - self.sigma**2 / 2)
        tokens = np.maximum(1, np.rint(spread * (self.prompt, self.output))).astype(int)
        return [(int(prompt), int(output)) for prompt, output in tokens]


@dataclass(frozen=True)
class Phase:
    """So many requests a second for so many seconds."""

    seconds: float
    rate: float
    lengths: Lengths


@dataclass(frozen=True)
class Phases:
    """Poisson arrivals at one rate after another."""

    phases: tuple[Phase, ...]

    @property
    def length_s(self) -> float:
        return sum(one.seconds for one in self.phases)

    def make(self, seed: int) -> list[Asked]:
        rng, asked = np.random.default_rng(seed), []
        starts_s = itertools.accumulate((one.seconds for one in self.phases), initial=0.0)
        for start_s, one in zip(starts_s, self.phases, strict=False):
            at_s = _poisson(rng, one.seconds, one.rate)
            asked += _joined(start_s + at_s, one.lengths.draw(rng, len(at_s)))
        return asked


@dataclass(frozen=True)
class Sine:
    """Poisson arrivals at base + height sin(pi t / seconds): up and down again."""

    base: float
    height: float
    seconds: float
    lengths: Lengths

    @property
    def length_s(self) -> float:
        return self.seconds

    def make(self, seed: int) -> list[Asked]:
        rng = np.random.default_rng(seed)
        top = self.base + self.height
        at_s = _poisson(rng, self.seconds, top)
        rates = self.base + self.height * np.sin(math.pi * at_s / self.seconds)
        at_s = at_s[rng.uniform(0.0, top, len(at_s)) < rates]
        return _joined(at_s, self.lengths.draw(rng, len(at_s)))


@dataclass(frozen=True)
class Renewal:
    """A constant rate with gamma gaps of this coefficient of variation; 1 is Poisson."""

    rate: float
    cv: float
    seconds: float
    lengths: Lengths

    @property
    def length_s(self) -> float:
        return self.seconds

    def make(self, seed: int) -> list[Asked]:
        rng, shape = np.random.default_rng(seed), 1.0 / self.cv**2
        most = int(self.rate * self.seconds + 10.0 * self.cv * math.sqrt(self.rate * self.seconds) + 100)
        at_s = np.cumsum(rng.gamma(shape, 1.0 / (shape * self.rate), most))
        assert at_s[-1] > self.seconds  # ten standard deviations
        at_s = at_s[at_s < self.seconds]
        return _joined(at_s, self.lengths.draw(rng, len(at_s)))


def _poisson(rng: np.random.Generator, seconds: float, rate: float) -> Floats:
    """Arrival times within [0, seconds); shape (requests,)."""
    return np.sort(rng.uniform(0.0, seconds, rng.poisson(rate * seconds)))


def _joined(at_s: Floats, lengths: list[tuple[int, int]]) -> list[Asked]:
    return [Asked(float(at), prompt, output) for at, (prompt, output) in zip(at_s, lengths, strict=True)]
