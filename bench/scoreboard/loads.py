"""Generated loads: arrivals and token counts; the same seed gives the same requests.

Varying rates are Poisson arrivals thinned from the highest rate. Lengths are lognormal and independent of each other
and of the time; sigma is that of their logarithm, and does not change the means.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from plimsoll.sim.attempt import TraceRequest

Floats = NDArray[np.float64]


class LoadGenerator(Protocol):
    """length_s: of the load."""

    @property
    def length_s(self) -> float: ...

    def make(self, seed: int) -> list[TraceRequest]:
        """Its requests in order of time."""
        ...


@dataclass(frozen=True)
class LengthDistribution:
    """Mean tokens in and out of lognormal draws."""

    prompt: float
    output: float
    sigma: float = 0.3

    def draw(self, rng: np.random.Generator, requests: int) -> list[tuple[int, int]]:
        spread = np.exp(self.sigma * rng.standard_normal((requests, 2)) - self.sigma**2 / 2)
        tokens = np.maximum(1, np.rint(spread * (self.prompt, self.output))).astype(int)
        return [(int(prompt), int(output)) for prompt, output in tokens]


@dataclass(frozen=True)
class RatePhase:
    """So many requests a second for so many seconds."""

    seconds: float
    rate: float
    lengths: LengthDistribution


@dataclass(frozen=True)
class PhasedLoad:
    """Poisson arrivals at one rate after another."""

    phases: tuple[RatePhase, ...]

    @property
    def length_s(self) -> float:
        return sum(one.seconds for one in self.phases)

    def make(self, seed: int) -> list[TraceRequest]:
        rng, requests = np.random.default_rng(seed), []
        starts_s = itertools.accumulate((phase.seconds for phase in self.phases), initial=0.0)
        for start_s, phase in zip(starts_s, self.phases, strict=False):
            at_s = _poisson(rng, phase.seconds, phase.rate)
            requests += _to_requests(start_s + at_s, phase.lengths.draw(rng, len(at_s)))
        return requests


@dataclass(frozen=True)
class SineLoad:
    """Poisson arrivals at base + height sin(pi t / seconds): up and down again."""

    base: float
    height: float
    seconds: float
    lengths: LengthDistribution

    @property
    def length_s(self) -> float:
        return self.seconds

    def make(self, seed: int) -> list[TraceRequest]:
        rng = np.random.default_rng(seed)
        peak = self.base + self.height
        at_s = _poisson(rng, self.seconds, peak)
        rates = self.base + self.height * np.sin(math.pi * at_s / self.seconds)
        at_s = at_s[rng.uniform(0.0, peak, len(at_s)) < rates]
        return _to_requests(at_s, self.lengths.draw(rng, len(at_s)))


@dataclass(frozen=True)
class RenewalLoad:
    """A constant rate with gamma gaps of this coefficient of variation; 1 is Poisson."""

    rate: float
    cv: float
    seconds: float
    lengths: LengthDistribution

    @property
    def length_s(self) -> float:
        return self.seconds

    def make(self, seed: int) -> list[TraceRequest]:
        rng, shape = np.random.default_rng(seed), 1.0 / self.cv**2
        max_requests = int(self.rate * self.seconds + 10.0 * self.cv * math.sqrt(self.rate * self.seconds) + 100)
        at_s = np.cumsum(rng.gamma(shape, 1.0 / (shape * self.rate), max_requests))
        assert at_s[-1] > self.seconds  # ten standard deviations
        at_s = at_s[at_s < self.seconds]
        return _to_requests(at_s, self.lengths.draw(rng, len(at_s)))


def _poisson(rng: np.random.Generator, seconds: float, rate: float) -> Floats:
    """Arrival times within [0, seconds); shape (requests,)."""
    return np.sort(rng.uniform(0.0, seconds, rng.poisson(rate * seconds)))


def _to_requests(at_s: Floats, lengths: list[tuple[int, int]]) -> list[TraceRequest]:
    return [TraceRequest(float(at), prompt, output) for at, (prompt, output) in zip(at_s, lengths, strict=True)]
