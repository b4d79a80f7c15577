"""The queueing model of llm-d's Workload Variant Autoscaler: latency of an engine at a rate, and what it learns.

Problem: how many requests a second may an engine get so that mean latencies stay within their targets?

Idea, as it is there: a finite birth-death chain over the requests at an engine. With n of them an iteration takes
T(n) = alpha + n (beta (I + O) / (O + 1) + gamma (I + O / 2)); prefill(n) = T(n) + (beta + gamma) I; a decode step
T(n) + beta + gamma (I + O / 2); n of them leave at n / (prefill(n) + O decode(n)). From the chain come the mean number
in service X, the mean time in service S and the wait W (Little); ITL = (S - prefill(X)) / O and
TTFT = W + prefill(X) + ITL. All latencies are means. Parameters are milliseconds, tokens and tokens squared, rates
requests a second, as there.

The tuner is an extended Kalman filter on (alpha, beta, gamma) that observes mean TTFT and ITL of one engine after the
other; what it expects of TTFT has no ITL in it, as there. Not published with the rest, and chosen here: its first
covariance (half of each parameter) and how a first pair of observations gives beta and gamma once alpha is set to 0.9
of the ITL: by the two equations above at the concurrency that Little's law gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

SIZING_QUEUE: Final = 100
TUNING_QUEUES: Final = 10  # times the batch
START: Final = (5.0, 0.05, 0.00005)
_BISECTIONS: Final = 100
_TOLERANCE: Final = 1e-6
_LOWEST, _HIGHEST = 0.001, 0.999  # of the rates at one request and at a full batch
_GATE: Final = 7.378
_DRIFT: Final = 0.05  # of a parameter, between two observations
_ERROR: Final = 0.05 / 1.96  # of an observation
_FIRST_DOUBT: Final = 0.5
_ALPHA_SHARE: Final = 0.9
_BOUND: Final = 100.0
_NUDGE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Sizes:
    """Mean tokens in and out of a request."""

    prompt: float
    output: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Means at a rate, milliseconds. wait: before the service."""

    wait_ms: float
    prefill_ms: float
    itl_ms: float

    @property
    def ttft_ms(self) -> float:
        return self.wait_ms + self.prefill_ms + self.itl_ms


class Chain:
    """One engine. parameters: alpha, beta, gamma. batch: sequences at once. queue: places behind them."""

    def __init__(self, parameters: tuple[float, float, float], sizes: Sizes, batch: int, queue: int) -> None:
        self._alpha, self._beta, self._gamma = parameters
        self._sizes, self._batch, self._queue = sizes, batch, queue
        busy = np.arange(1.0, batch + 1.0)
        self._each_ms = self._beta * (sizes.prompt + sizes.output) / (sizes.output + 1.0) + self._gamma * self._context
        decode_ms = self._iteration(busy) + self._beta + self._gamma * self._context
        self._leave = busy / (self._prefill(busy) + sizes.output * decode_ms)  # a millisecond
        self._states = np.arange(batch + queue + 1.0)
        self._busy = np.minimum(self._states, batch)
        self._log_leave = np.log(np.concatenate([self._leave, np.full(queue, self._leave[-1])]))

    @property
    def most(self) -> float:
        """The highest rate that it sizes for."""
        return float(1000.0 * _HIGHEST * self._leave[-1])

    @property
    def least(self) -> float:
        return float(1000.0 * _LOWEST * self._leave[0])

    def at(self, rate: float) -> Latency:
        """rate: above 0."""
        arrive = rate / 1000.0
        logs = np.concatenate([[0.0], np.cumsum(np.log(arrive) - self._log_leave)])
        weights = np.exp(logs - logs.max())
        weights /= weights.sum()
        through = arrive * (1.0 - weights[-1])
        inside, busy = float(self._states @ weights), float(self._busy @ weights)
        served_ms = busy / through
        prefill_ms = float(self._prefill(busy))
        return Latency(inside / through - served_ms, prefill_ms, (served_ms - prefill_ms) / self._sizes.output)

    def rate(self, ttft_ms: float | None, itl_ms: float | None) -> float | None:
        """The highest rate that meets both means; None where one is missed without load."""
        found = self.most
        for target_ms, name in ((ttft_ms, "ttft_ms"), (itl_ms, "itl_ms")):
            if target_ms is not None:
                one = self._meeting(name, target_ms)
                if one is None:
                    return None
                found = min(found, one)
        return found

    def _meeting(self, name: str, target_ms: float) -> float | None:
        low, high = self.least, self.most
        if getattr(self.at(low), name) > target_ms:
            return None
        if getattr(self.at(high), name) <= target_ms:
            return high
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2.0
            value = getattr(self.at(middle), name)
            if abs(value - target_ms) <= _TOLERANCE * target_ms:
                return middle
            low, high = (middle, high) if value < target_ms else (low, middle)
        return low

    @property
    def _context(self) -> float:
        return self._sizes.prompt + self._sizes.output / 2.0

    def _iteration(self, busy: NDArray[np.float64] | float) -> NDArray[np.float64] | float:
        return self._alpha + busy * self._each_ms

    def _prefill(self, busy: NDArray[np.float64] | float) -> NDArray[np.float64] | float:
        return self._iteration(busy) + (self._beta + self._gamma) * self._sizes.prompt


@dataclass(frozen=True, slots=True)
class Observed:
    """One engine of late: requests a second, their sizes, mean latencies in milliseconds."""

    rate: float
    sizes: Sizes
    ttft_ms: float
    itl_ms: float


class Tuner:
    """The filter. batch: sequences at once of the engines that it learns of."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._state: NDArray[np.float64] | None = None
        self._doubt: NDArray[np.float64] = np.zeros((3, 3))

    @property
    def parameters(self) -> tuple[float, float, float] | None:
        """alpha, beta, gamma; None before the first observation."""
        return None if self._state is None else (self._state[0], self._state[1], self._state[2])

    def hear(self, seen: Observed) -> bool:
        """Whether the observation was taken in; the gate keeps out what the filter finds incredible."""
        if self._state is None:
            self._state = np.array(first(seen))
            self._doubt = np.diag((_FIRST_DOUBT * self._state) ** 2)
            return True
        state, doubt = self._state, self._doubt + np.diag((_DRIFT * self._state) ** 2)
        told = np.array([seen.ttft_ms, seen.itl_ms])
        expected = self._expected(state, seen)
        if expected is None:
            return False
        slope = self._slope(state, expected, seen)
        if slope is None:
            return False
        spread = slope @ doubt @ slope.T + np.diag((_ERROR * told) ** 2)
        off = told - expected
        if float(off @ np.linalg.solve(spread, off)) >= _GATE:
            return False
        gain = doubt @ slope.T @ np.linalg.inv(spread)
        start = np.array(START)
        self._state = np.clip(state + gain @ off, start / _BOUND, start * _BOUND)
        self._doubt = (np.eye(3) - gain @ slope) @ doubt
        return True

    def _expected(self, state: NDArray[np.float64], seen: Observed) -> NDArray[np.float64] | None:
        """None where the rate is more than such an engine takes."""
        chain = Chain((state[0], state[1], state[2]), seen.sizes, self._batch, TUNING_QUEUES * self._batch)
        if seen.rate > chain.most:
            return None
        found = chain.at(seen.rate)
        return np.array([found.wait_ms + found.prefill_ms, found.itl_ms])

    def _slope(
        self, state: NDArray[np.float64], expected: NDArray[np.float64], seen: Observed
    ) -> NDArray[np.float64] | None:
        columns = []
        for place in range(3):
            moved = state.copy()
            moved[place] *= 1.0 - _NUDGE  # downwards: an engine that is faster takes the rate as well
            found = self._expected(moved, seen)
            if found is None:
                return None
            columns.append((expected - found) / (state[place] * _NUDGE))
        return np.stack(columns, axis=1)


def first(seen: Observed) -> tuple[float, float, float]:
    """Parameters from one observation without a wait; those of `START` where it gives none above 0."""
    prompt, output = seen.sizes.prompt, seen.sizes.output
    alpha = _ALPHA_SHARE * seen.itl_ms
    busy = max(1.0, seen.rate / 1000.0 * (seen.ttft_ms + output * seen.itl_ms))
    by_beta, by_gamma = (prompt + output) / (output + 1.0), prompt + output / 2.0
    rows = np.array(
        [[busy * by_beta + prompt, busy * by_gamma + prompt], [busy * by_beta + 1.0, (busy + 1.0) * by_gamma]]
    )
    beta, gamma = np.linalg.solve(rows, np.array([seen.ttft_ms - alpha, seen.itl_ms - alpha]))
    if not (beta > 0.0 and gamma > 0.0):
        return alpha, START[1], START[2]
    return alpha, float(beta), float(gamma)


def usual_targets(parameters: tuple[float, float, float], sizes: Sizes, times: float) -> tuple[float, float]:
    """TTFT and ITL, milliseconds, where no target is given: iterations that take `times` as long as an empty one."""
    alpha, beta, gamma = parameters
    ttft_ms = times * alpha + (beta + gamma) * sizes.prompt
    return ttft_ms, times * alpha + beta + gamma * (sizes.prompt + (sizes.output + 1.0) / 2.0)
