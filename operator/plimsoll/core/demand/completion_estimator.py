"""Expected completions: the tokens that an engine should have generated if output lengths are as usual.

Problem: longer outputs show in the generated tokens long before the long responses complete. These tokens belong to
requests that began up to one response time ago. Divided by the requests that begin or complete now, a burst looks like
short outputs while it begins and like long ones after it.

Idea: an engine gives each response one token per step, so its steps are a clock for all responses. This clock shows
when each request began and, for the usual lengths, the progress of the running ones. Of outputs with N tokens, the
tokens up to the x-th are E min(N, x), the restricted mean of a life table. Requests that ran when the engine was first
observed are at any point of their response. Their remainder is the residual of a renewal process in equilibrium (Cox
1962).
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple

import numpy as np

from plimsoll.core.workload import FloatArray, Workload

_MAX_COHORTS: Final = 256  # 20 minutes of readings every five seconds


class OutputLengths:
    """Usual output lengths in tokens: the mean and the maximum."""

    def __init__(self, workload: Workload) -> None:
        order = np.argsort(workload.output_tokens)
        tokens, weights = workload.output_tokens[order], workload.weights[order]
        self._tokens = tokens
        self._cumulative_share = np.concatenate(([0.0], np.cumsum(weights)))
        self._cumulative_tokens = np.concatenate(([0.0], np.cumsum(weights * tokens)))
        self._cumulative_squares = np.concatenate(([0.0], np.cumsum(weights * tokens**2)))
        self.mean_tokens = float(self._cumulative_tokens[-1])
        self.max_tokens = float(tokens[-1])

    def restricted_mean_integral(self, tokens: FloatArray) -> FloatArray:
        """Integral over x from 0 to `tokens` (0 or more) of E min(N, x)."""
        index = np.searchsorted(self._tokens, tokens)
        survival = 1.0 - self._cumulative_share[index]
        return np.asarray(
            tokens * self._cumulative_tokens[index] - self._cumulative_squares[index] / 2.0 + survival * tokens**2 / 2.0
        )


class _Cohort(NamedTuple):
    """Requests that began evenly between two clock values, at least one token apart."""

    start: float
    end: float
    requests: float


class CompletionEstimator:
    """Estimator for one engine since its first reading. The clock counts tokens of one response."""

    def __init__(self, running: float, earlier: float = math.inf) -> None:
        """running: requests that had already begun. earlier: clock since the engine's start, their highest age."""
        self._initial_running = running
        self._initial_age = earlier if running else 0.0
        self._clock = self._previous_clock = 0.0
        self._cohorts: deque[_Cohort] = deque(maxlen=_MAX_COHORTS)

    def advance(self, tokens: float, started: float) -> None:
        """Advance the clock by `tokens`, in which `started` requests began."""
        self._previous_clock, self._clock = self._clock, self._clock + tokens
        self._cohorts.append(_Cohort(min(self._previous_clock, self._clock - 1.0), self._clock, started))

    def expected_completions(self, output_lengths: OutputLengths) -> float:
        """Return the expected tokens over the last interval, as a multiple of the tokens of a whole response.

        The interval runs from the last `advance` but one to the last.
        """
        previous, now, cohorts = self._previous_clock, self._clock, self._cohorts
        while len(cohorts) > 1 and previous - cohorts[0].end >= output_lengths.max_tokens:
            cohorts.popleft()
        *older_cohorts, newest_cohort = cohorts
        ages = np.array(
            [
                (now - cohort.start, now - cohort.end, previous - cohort.start, previous - cohort.end)
                for cohort in older_cohorts
            ]
        )
        edges = 1.0 + ages.reshape(-1, 4)  # a request begins with its first token
        integrals = output_lengths.restricted_mean_integral(edges)
        spans = edges[:, 0] - edges[:, 1]
        counts = np.array([cohort.requests for cohort in older_cohorts])
        expected_tokens = float(
            counts @ ((integrals[:, 0] - integrals[:, 1] - integrals[:, 2] + integrals[:, 3]) / spans)
        )
        expected_tokens += newest_cohort.requests * _mean_tokens_of_new(output_lengths, now - previous)
        if self._initial_running and previous < output_lengths.max_tokens:
            integral_start, integral_end = (
                output_lengths.restricted_mean_integral(np.array((previous, now))) / output_lengths.mean_tokens
            )
            expected_tokens += self._initial_running * (now - previous - float(integral_end - integral_start))
        return expected_tokens / output_lengths.mean_tokens

    @property
    def longest_output(self) -> float:
        """Tokens that no response can exceed yet."""
        return self._initial_age + self._clock


def _mean_tokens_of_new(output_lengths: OutputLengths, tokens: float) -> float:
    """Mean tokens of a response that began at a uniform time within the last `tokens` of the clock."""
    if tokens < 1.0:
        return 1.0
    integral_start, integral_end = output_lengths.restricted_mean_integral(np.array((1.0, 1.0 + tokens)))
    return float(integral_end - integral_start) / tokens
