"""Errors of the estimate: of a service's first requests, and after so many that its ratio was learned.

A service has one request a second, and its engine counts each a second later. The first `LEARN` requests teach the
operator's estimator, whose ratios the gateway then has. Sizes of pictures behind URLs are unknown, so that no estimator
has less than `least_errors` there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.prompt_tokens.corpus import CorpusRequest
from plimsoll.core.demand.token_ratios import TokenRatioEstimator
from plimsoll.gateway.picture_tokens import PictureFamily, PictureRule
from plimsoll.gateway.request_parser import ParsedRequest, parse_body

LEARN: Final = 50
_CLOSE_S: Final = 60.0  # until the estimator's window is over
_BISECTIONS: Final = 20
Counted = Callable[[CorpusRequest], int]


@dataclass(frozen=True)
class EstimateErrors:
    """Relative errors: median and 95th percentile."""

    p50: float
    p95: float

    @staticmethod
    def of(errors: Sequence[float]) -> EstimateErrors:
        """The percentiles of these errors."""
        return EstimateErrors(float(np.quantile(errors, 0.5)), float(np.quantile(errors, 0.95)))


def parsed(request: CorpusRequest, family: PictureFamily) -> ParsedRequest:
    """The request as the gateway reads it for a model of this family."""
    found = parse_body(request.body, request.route)
    assert isinstance(found, ParsedRequest), found
    return found.for_model(PictureRule(family))


def learn(requests: Sequence[CorpusRequest], counted: Counted, family: PictureFamily) -> Mapping[str, float]:
    """The ratios after these requests, of which engines counted the tokens."""
    estimator = TokenRatioEstimator()
    for second, request in enumerate(requests):
        read = parsed(request, family)
        media = {kind.value: float(tokens) for kind, tokens in read.media_tokens.items()}
        estimator.on_estimated(float(second), 1.0, float(read.prompt.tokens), media)
        estimator.on_counted(float(second), 1.0, float(counted(request)))
    estimator.on_counted(len(requests) + _CLOSE_S, 0.0, 0.0)
    return estimator.ratios()


def estimate_errors(
    requests: Sequence[CorpusRequest], counted: Counted, ratios: Mapping[str, float], family: PictureFamily
) -> EstimateErrors:
    """Errors of the estimates with these ratios."""
    return EstimateErrors.of(
        [abs(parsed(each, family).corrected_prompt(ratios).tokens / counted(each) - 1.0) for each in requests]
    )


def least_errors(requests: Sequence[CorpusRequest], counted: Counted) -> EstimateErrors:
    """A lower bound of the errors without the sizes: one number for all requests of the same number of pictures.

    Text counts as known exactly, and each number is the best in hindsight: one for the median, one for the percentile.
    """
    groups = [list(group) for _, group in groupby(sorted(requests, key=_pictures), key=_pictures)]
    totals = [np.array([counted(each) for each in group]) for group in groups]
    of_pictures = [
        total - np.array([counted(replace(each, pictures=())) for each in group])
        for total, group in zip(totals, groups, strict=True)
    ]

    def share_within(error: float) -> float:
        pairs = zip(of_pictures, totals, strict=True)
        return sum(_most_covered(tokens - error * total, tokens + error * total) for tokens, total in pairs) / len(
            requests
        )

    def least(share: float) -> float:
        low, high = 0.0, 1.0  # no tokens for a picture: an error below 1
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2.0
            low, high = (low, middle) if share_within(middle) >= share else (middle, high)
        return low

    return EstimateErrors(least(0.5), least(0.95))


def _pictures(request: CorpusRequest) -> int:
    return len(request.pictures)


def _most_covered(low: NDArray[np.float64], high: NDArray[np.float64]) -> int:
    """The most intervals that one number lies in. It may be a lower end."""
    return max(int(np.count_nonzero((low <= point) & (point <= high))) for point in low)
