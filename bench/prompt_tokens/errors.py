"""Errors of the estimate: of a service's first requests, and after so many that its ratio was learned.

A service has one request a second, and its engine counts each a second later. The first `LEARN` requests teach the
operator's estimator, whose ratios the gateway then has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from bench.prompt_tokens.corpus import CorpusRequest
from plimsoll.core.demand.token_ratios import TokenRatioEstimator
from plimsoll.gateway.picture_tokens import PictureFamily
from plimsoll.gateway.request_parser import ParsedRequest, parse_body

LEARN: Final = 50
_CLOSE_S: Final = 60.0  # until the estimator's window is over
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
    return found.for_family(family)


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
