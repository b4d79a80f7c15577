"""The queueing model of llm-d's Workload Variant Autoscaler: latency of an engine at a rate, and its parameter tuner.

Problem: how many requests per second may an engine get so that mean latencies stay within their targets?

Idea, as in the controller: a finite birth-death chain over the requests at an engine. With n of them an iteration takes
T(n) = alpha + n (beta (I + O) / (O + 1) + gamma (I + O / 2)); prefill(n) = T(n) + (beta + gamma) I; a decode step T(n)
+ beta + gamma (I + O / 2); n of them leave at n / (prefill(n) + O decode(n)). From the chain come the mean number in
service X, the mean time in service S and the wait W (Little); ITL = (S - prefill(X)) / O and TTFT = W + prefill(X) +
ITL. All latencies are means. Parameters are milliseconds, tokens and tokens squared, rates requests per second, as
there.

The tuner is an extended Kalman filter on (alpha, beta, gamma) that observes mean TTFT and ITL of one engine after the
other; its expected TTFT excludes ITL, as there. Two things are not published, and chosen here: its first covariance
(half of each parameter), and the first beta and gamma from a pair of observations with alpha at 0.9 of the ITL (the two
equations above at the concurrency of Little's law).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

SIZING_QUEUE: Final = 100
TUNING_QUEUES: Final = 10  # times the batch
INITIAL_PARAMETERS: Final = (5.0, 0.05, 0.00005)
_BISECTIONS: Final = 100
_TOLERANCE: Final = 1e-6
_MIN_RATE_SHARE, _MAX_RATE_SHARE = 0.001, 0.999  # of the rates at one request and at a full batch
_CHI2_GATE: Final = 7.378
_PROCESS_NOISE: Final = 0.05  # of a parameter, between two observations
_MEASUREMENT_NOISE: Final = 0.05 / 1.96  # of an observation
_INITIAL_STD_SHARE: Final = 0.5
_ALPHA_SHARE: Final = 0.9
_PARAMETER_BOUND: Final = 100.0
_DERIVATIVE_STEP: Final = 1e-3


@dataclass(frozen=True, slots=True)
class RequestSizes:
    """Mean tokens in and out of a request."""

    prompt: float
    output: float


@dataclass(frozen=True, slots=True)
class MeanLatency:
    """Mean latencies at a rate, ms. wait_ms: before the prefill."""

    wait_ms: float
    prefill_ms: float
    itl_ms: float

    @property
    def ttft_ms(self) -> float:
        return self.wait_ms + self.prefill_ms + self.itl_ms


class BirthDeathChain:
    """One engine. parameters: alpha, beta, gamma. batch: running sequences at most. queue: waiting places."""

    def __init__(self, parameters: tuple[float, float, float], sizes: RequestSizes, batch: int, queue: int) -> None:
        self._alpha, self._beta, self._gamma = parameters
        self._sizes, self._batch, self._queue = sizes, batch, queue
        busy = np.arange(1.0, batch + 1.0)
        self._per_request_ms = (
            self._beta * (sizes.prompt + sizes.output) / (sizes.output + 1.0) + self._gamma * self._context
        )
        decode_ms = self._iteration(busy) + self._beta + self._gamma * self._context
        self._departure_rates = busy / (self._prefill(busy) + sizes.output * decode_ms)  # a millisecond
        self._states = np.arange(batch + queue + 1.0)
        self._busy = np.minimum(self._states, batch)
        self._log_departure_rates = np.log(
            np.concatenate([self._departure_rates, np.full(queue, self._departure_rates[-1])])
        )

    @property
    def max_rate(self) -> float:
        """The highest rate that it sizes for."""
        return float(1000.0 * _MAX_RATE_SHARE * self._departure_rates[-1])

    @property
    def min_rate(self) -> float:
        return float(1000.0 * _MIN_RATE_SHARE * self._departure_rates[0])

    def latency_at(self, rate: float) -> MeanLatency:
        """rate: above 0."""
        arrivals_per_ms = rate / 1000.0
        logs = np.concatenate([[0.0], np.cumsum(np.log(arrivals_per_ms) - self._log_departure_rates)])
        weights = np.exp(logs - logs.max())
        weights /= weights.sum()
        throughput = arrivals_per_ms * (1.0 - weights[-1])
        mean_in_system, busy = float(self._states @ weights), float(self._busy @ weights)
        service_ms = busy / throughput
        prefill_ms = float(self._prefill(busy))
        return MeanLatency(
            mean_in_system / throughput - service_ms, prefill_ms, (service_ms - prefill_ms) / self._sizes.output
        )

    def max_rate_within(self, ttft_ms: float | None, itl_ms: float | None) -> float | None:
        """Return the highest rate that meets both means; None if one is missed without load."""
        rate = self.max_rate
        for target_ms, name in ((ttft_ms, "ttft_ms"), (itl_ms, "itl_ms")):
            if target_ms is not None:
                rate_for_target = self._max_rate_for(name, target_ms)
                if rate_for_target is None:
                    return None
                rate = min(rate, rate_for_target)
        return rate

    def _max_rate_for(self, name: str, target_ms: float) -> float | None:
        low, high = self.min_rate, self.max_rate
        if getattr(self.latency_at(low), name) > target_ms:
            return None
        if getattr(self.latency_at(high), name) <= target_ms:
            return high
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2.0
            value = getattr(self.latency_at(middle), name)
            if abs(value - target_ms) <= _TOLERANCE * target_ms:
                return middle
            low, high = (middle, high) if value < target_ms else (low, middle)
        return low

    @property
    def _context(self) -> float:
        return self._sizes.prompt + self._sizes.output / 2.0

    def _iteration(self, busy: NDArray[np.float64] | float) -> NDArray[np.float64] | float:
        return self._alpha + busy * self._per_request_ms

    def _prefill(self, busy: NDArray[np.float64] | float) -> NDArray[np.float64] | float:
        return self._iteration(busy) + (self._beta + self._gamma) * self._sizes.prompt


@dataclass(frozen=True, slots=True)
class TunerSample:
    """One engine's recent metrics: requests per second, their sizes, mean latencies in milliseconds."""

    rate: float
    sizes: RequestSizes
    ttft_ms: float
    itl_ms: float


class WvaTuner:
    """The filter. batch: running sequences at most on the observed engines."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._state: NDArray[np.float64] | None = None
        self._covariance: NDArray[np.float64] = np.zeros((3, 3))

    @property
    def parameters(self) -> tuple[float, float, float] | None:
        """alpha, beta, gamma; None before the first observation."""
        return None if self._state is None else (self._state[0], self._state[1], self._state[2])

    def update(self, sample: TunerSample) -> bool:
        """Process an observation. Returns False if the filter rejects it as an outlier."""
        if self._state is None:
            self._state = np.array(initial_parameters(sample))
            self._covariance = np.diag((_INITIAL_STD_SHARE * self._state) ** 2)
            return True
        state, covariance = self._state, self._covariance + np.diag((_PROCESS_NOISE * self._state) ** 2)
        measured = np.array([sample.ttft_ms, sample.itl_ms])
        expected = self._expected(state, sample)
        if expected is None:
            return False
        jacobian = self._jacobian(state, expected, sample)
        if jacobian is None:
            return False
        innovation_covariance = jacobian @ covariance @ jacobian.T + np.diag((_MEASUREMENT_NOISE * measured) ** 2)
        innovation = measured - expected
        if float(innovation @ np.linalg.solve(innovation_covariance, innovation)) >= _CHI2_GATE:
            return False
        gain = covariance @ jacobian.T @ np.linalg.inv(innovation_covariance)
        initial = np.array(INITIAL_PARAMETERS)
        self._state = np.clip(state + gain @ innovation, initial / _PARAMETER_BOUND, initial * _PARAMETER_BOUND)
        self._covariance = (np.eye(3) - gain @ jacobian) @ covariance
        return True

    def _expected(self, state: NDArray[np.float64], sample: TunerSample) -> NDArray[np.float64] | None:
        """Return the expected latencies; None if the rate exceeds the engine's capacity."""
        chain = BirthDeathChain((state[0], state[1], state[2]), sample.sizes, self._batch, TUNING_QUEUES * self._batch)
        if sample.rate > chain.max_rate:
            return None
        latency = chain.latency_at(sample.rate)
        return np.array([latency.wait_ms + latency.prefill_ms, latency.itl_ms])

    def _jacobian(
        self, state: NDArray[np.float64], expected: NDArray[np.float64], sample: TunerSample
    ) -> NDArray[np.float64] | None:
        columns = []
        for place in range(3):
            moved = state.copy()
            moved[place] *= 1.0 - _DERIVATIVE_STEP  # downwards: an engine that is faster takes the rate as well
            expected_moved = self._expected(moved, sample)
            if expected_moved is None:
                return None
            columns.append((expected - expected_moved) / (state[place] * _DERIVATIVE_STEP))
        return np.stack(columns, axis=1)


def initial_parameters(sample: TunerSample) -> tuple[float, float, float]:
    """Parameters from one observation without a wait; `INITIAL_PARAMETERS` where it gives none above 0."""
    prompt, output = sample.sizes.prompt, sample.sizes.output
    alpha = _ALPHA_SHARE * sample.itl_ms
    busy = max(1.0, sample.rate / 1000.0 * (sample.ttft_ms + output * sample.itl_ms))
    by_beta, by_gamma = (prompt + output) / (output + 1.0), prompt + output / 2.0
    rows = np.array(
        [[busy * by_beta + prompt, busy * by_gamma + prompt], [busy * by_beta + 1.0, (busy + 1.0) * by_gamma]]
    )
    beta, gamma = np.linalg.solve(rows, np.array([sample.ttft_ms - alpha, sample.itl_ms - alpha]))
    if not (beta > 0.0 and gamma > 0.0):
        return alpha, INITIAL_PARAMETERS[1], INITIAL_PARAMETERS[2]
    return alpha, float(beta), float(gamma)


def default_targets(
    parameters: tuple[float, float, float], sizes: RequestSizes, multiple: float
) -> tuple[float, float]:
    """Return TTFT and ITL targets, ms, without given ones: iterations take `multiple` times as long as an empty one."""
    alpha, beta, gamma = parameters
    ttft_ms = multiple * alpha + (beta + gamma) * sizes.prompt
    return ttft_ms, multiple * alpha + beta + gamma * (sizes.prompt + (sizes.output + 1.0) / 2.0)
