"""The rule for `Retry-After`."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.core.admission.retry_advice import (
    MAX_RETRY_AFTER_S,
    MAX_RETURN_S,
    NO_RETRY,
    UNKNOWN_TIME,
    RetryAdvice,
    advise_retry,
)


@pytest.mark.parametrize(
    ("eta_s", "is_time_known", "sdk_limit_s", "retry_after_s", "retryable"),
    [
        (0.0, False, 120.0, 1, True),
        (41.2, False, 120.0, 42, True),
        (95.0, False, 120.0, 60, True),  # the first of two steps
        (120.0, True, 120.0, 60, True),
        (120.1, False, 120.0, None, False),  # the end of a backlog
        (120.1, True, 120.0, 121, False),  # the end of a start-up
        (3600.0, True, 120.0, 3600, False),
        (3600.1, True, 120.0, None, False),
        (60.0, True, 60.0, 60, True),  # a quota has no reservation, and no second step
        (61.0, True, 60.0, 61, False),
        (5.0, True, 0.0, 5, False),
        (5.0, False, 0.0, None, False),
        (500.0, False, math.inf, 60, True),
        (math.inf, True, 120.0, None, False),
        (math.nan, True, 120.0, None, False),
    ],
)
def test_advise_retry_says_when_and_to_whom(
    eta_s: float, is_time_known: bool, sdk_limit_s: float, retry_after_s: int | None, retryable: bool
) -> None:
    advice = advise_retry(eta_s, is_time_known=is_time_known, sdk_limit_s=sdk_limit_s)
    assert advice[1:] == (retry_after_s, retryable)


def test_advise_retry_without_time_is_random_unless_forbidden() -> None:
    assert advise_retry(None, is_time_known=True) == UNKNOWN_TIME
    assert advise_retry(None, sdk_limit_s=0.0) == NO_RETRY
    random = Random(1)
    assert {UNKNOWN_TIME.draw_retry_after_s(random.randint) for _ in range(500)} == set(range(10, 31))
    assert NO_RETRY.draw_retry_after_s(random.randint) is None
    assert RetryAdvice(7.0, 7, True).draw_retry_after_s(random.randint) == 7


@given(st.floats(0.0, 1e6), st.booleans(), st.sampled_from([0.0, 60.0, 120.0, math.inf]))
def test_advise_retry_sdk_never_waits_above_a_minute(eta_s: float, is_time_known: bool, sdk_limit_s: float) -> None:
    advice = advise_retry(eta_s, is_time_known=is_time_known, sdk_limit_s=sdk_limit_s)
    if advice.retryable:
        assert advice.retry_after_s is not None
        assert 1 <= advice.retry_after_s <= MAX_RETRY_AFTER_S
    elif advice.retry_after_s is not None:
        assert is_time_known
        assert advice.retry_after_s >= eta_s
        assert eta_s <= MAX_RETURN_S
