"""Who comes back, and how long an answer was: what gateways learn beside the gate."""

from __future__ import annotations

from plimsoll.core.admission.answers import LEAST_STREAMS, AnswerBytes
from plimsoll.core.admission.returning import KEPT, SECONDS, Refused


def test_retries_count_where_the_first_attempt_was_refused() -> None:
    refused = Refused()
    assert not refused.is_retry(True, 7, 0.0)
    refused.remember(7, 0.0)
    assert refused.is_retry(True, 7, 1.0)
    assert not refused.is_retry(False, 7, 1.0)
    assert not refused.is_retry(True, 7, SECONDS + 1)
    for n in range(KEPT):
        refused.remember(100 + n, 2.0)
    assert not refused.is_retry(True, 7, 2.0)


def test_tokens_are_guessed_from_bytes_once_there_are_enough_answers() -> None:
    answers = AnswerBytes()
    for _ in range(LEAST_STREAMS - 1):
        assert answers.tokens(1000, 1, 50.0) is None
    assert answers.tokens(1000, 1, 50.0) == 50
    assert answers.tokens(500, 1, 50.0) in (25, 26)
    assert answers.tokens(2000, 2, 50.0) in (100, 101, 102)
    assert answers.tokens(0, 1, 50.0) is None


def test_answers_are_learned_from_before_anybody_knows_their_mean() -> None:
    answers = AnswerBytes()
    for _ in range(LEAST_STREAMS):
        assert answers.tokens(1000, 1, None) is None
    assert answers.tokens(1000, 1, 50.0) == 50
