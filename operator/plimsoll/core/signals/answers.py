"""How many requests' worth of tokens an engine should have made, were its answers as long as they usually are.

Problem: that answers grow longer shows in the tokens that are made, long before the long ones end. But these tokens
are of requests that began up to an answer ago. Over those that begin now, or end now, a burst passes for short answers
while it begins and for long ones when it is over.

Idea: an engine gives each of its answers one token a step, so that its steps are the clock of all of them. By that
clock it is known who began when, and how far those are now who are left, if lengths are the usual ones: of answers
with N tokens those up to the x-th are E min(N, x), the restricted mean of a life table. What ran when the engine was
first seen is anywhere in its answer: what is left of it is the residual of a renewal process in equilibrium (Cox 1962).
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

import numpy as np

from plimsoll.core.workload import FloatArray, Workload

_MOST: Final = 256  # cohorts that are kept: 20 minutes of readings every five seconds


class Usual:
    """The usual lengths of answers, in tokens: their mean, and the longest."""

    def __init__(self, workload: Workload) -> None:
        order = np.argsort(workload.output_tokens)
        tokens, weights = workload.output_tokens[order], workload.weights[order]
        self._tokens = tokens
        self._share = np.concatenate(([0.0], np.cumsum(weights)))
        self._sum = np.concatenate(([0.0], np.cumsum(weights * tokens)))
        self._squares = np.concatenate(([0.0], np.cumsum(weights * tokens**2)))
        self.mean = float(self._sum[-1])
        self.longest = float(tokens[-1])

    def area(self, tokens: FloatArray) -> FloatArray:
        """Integral over x from 0 to `tokens` (0 or more) of E min(N, x)."""
        ended = np.searchsorted(self._tokens, tokens)
        left = 1.0 - self._share[ended]
        return np.asarray(tokens * self._sum[ended] - self._squares[ended] / 2.0 + left * tokens**2 / 2.0)


class _Cohort(NamedTuple):
    """Requests that began between two moments of the clock, a token apart at least, evenly."""

    begin: float
    end: float
    number: float


class Answers:
    """Of one engine since it was first seen. The clock is in tokens of any one answer."""

    def __init__(self, running: float) -> None:
        """running: requests that had begun by then."""
        self._running = running
        self._clock = self._before = 0.0
        self._cohorts: deque[_Cohort] = deque(maxlen=_MOST)

    def add(self, tokens: float, begun: float) -> None:
        """Meanwhile the clock went on by so many tokens, and so many requests began."""
        self._before, self._clock = self._clock, self._clock + tokens
        self._cohorts.append(_Cohort(min(self._before, self._clock - 1.0), self._clock, begun))

    def requests(self, usual: Usual) -> float:
        """Tokens that it should have made since the last `add` but one, over those of a whole answer."""
        before, now, cohorts = self._before, self._clock, self._cohorts
        while len(cohorts) > 1 and before - cohorts[0].end >= usual.longest:
            cohorts.popleft()
        *older, newest = cohorts
        ages = np.array([(now - one.begin, now - one.end, before - one.begin, before - one.end) for one in older])
        edges = 1.0 + ages.reshape(-1, 4)  # the first token is there as it begins
        area = usual.area(edges)
        spans = edges[:, 0] - edges[:, 1]
        numbers = np.array([one.number for one in older])
        made = float(numbers @ ((area[:, 0] - area[:, 1] - area[:, 2] + area[:, 3]) / spans))
        made += newest.number * _mean_of_new(usual, now - before)
        if self._running and before < usual.longest:
            first, last = usual.area(np.array((before, now))) / usual.mean
            made += self._running * (now - before - float(last - first))
        return made / usual.mean


def _mean_of_new(usual: Usual, tokens: float) -> float:
    """Tokens of an answer that began at any moment of the last so many of the clock."""
    if tokens < 1.0:
        return 1.0
    first, last = usual.area(np.array((1.0, 1.0 + tokens)))
    return float(last - first) / tokens
