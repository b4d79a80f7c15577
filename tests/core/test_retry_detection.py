"""Who comes back, and how long an answer was: what gateways learn beside the gate."""

from __future__ import annotations

import pytest

from plimsoll.core.admission.retry_detection import (
    MAX_CLIENT_BACKOFF_S,
    MAX_REMEMBERED,
    MAX_REPEATS,
    RETRY_WINDOW_S,
    RecentRejections,
)
from plimsoll.core.admission.token_estimator import MIN_STREAMS, TokenEstimator


def test_retry_header_counts_only_after_rejection() -> None:
    refused = RecentRejections()
    assert not refused.is_retry(True, 7, 0.0)
    refused.record(7, 0.0)
    assert refused.is_retry(True, 7, RETRY_WINDOW_S - 1)
    assert not refused.is_retry(True, 7, RETRY_WINDOW_S + 1)
    for n in range(MAX_REMEMBERED):
        refused.record(100 + n, 2.0)
    assert not refused.is_retry(True, 7, 2.0)


@pytest.mark.parametrize(("retry_after_s", "known_s"), [(None, MAX_CLIENT_BACKOFF_S), (30.0, 60.0)])
def test_retry_same_body_is_detected_for_a_while(retry_after_s: float | None, known_s: float) -> None:
    for late_s, again in ((known_s - 0.1, True), (known_s + 0.1, False)):
        refused = RecentRejections()
        refused.record(7, 0.0, retry_after_s)
        assert refused.is_retry(False, 7, late_s) is again
        assert not refused.is_retry(False, 8, late_s), "another demand"


def test_retry_after_engine_failure_needs_header() -> None:
    refused = RecentRejections()
    refused.record(7, 0.0, 0.0)
    assert not refused.is_retry(False, 7, 0.1)
    assert refused.is_retry(True, 7, 0.1)


def test_retry_repeats_above_limit_are_a_new_request() -> None:
    refused = RecentRejections()
    reported = []
    for _ in range(2 * (MAX_REPEATS + 1)):
        reported.append(refused.is_retry(False, 7, 0.0))
        refused.record(7, 0.0)
    assert reported == 2 * [False, *([True] * MAX_REPEATS)]


def test_retry_after_dispatch_is_a_new_request() -> None:
    refused = RecentRejections()
    refused.record(7, 0.0)
    refused.discard(7)
    assert not refused.is_retry(False, 7, 0.1)
    assert not refused.is_retry(True, 7, 0.1)


def test_token_estimator_needs_enough_responses() -> None:
    answers = TokenEstimator()
    for _ in range(MIN_STREAMS - 1):
        assert answers.estimate(1000, 1, 50.0) is None
    assert answers.estimate(1000, 1, 50.0) == 50
    assert answers.estimate(500, 1, 50.0) in (25, 26)
    assert answers.estimate(2000, 2, 50.0) in (100, 101, 102)
    assert answers.estimate(0, 1, 50.0) is None


def test_token_estimator_learns_before_mean_is_known() -> None:
    answers = TokenEstimator()
    for _ in range(MIN_STREAMS):
        assert answers.estimate(1000, 1, None) is None
    assert answers.estimate(1000, 1, 50.0) == 50
