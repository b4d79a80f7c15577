"""Who comes back, and how long an answer was: what gateways learn beside the gate."""

from __future__ import annotations

import pytest

from plimsoll.core.admission.answers import LEAST_STREAMS, AnswerBytes
from plimsoll.core.admission.returning import BACKOFF_S, KEPT, REPEATS, SECONDS, Refused


def test_who_says_so_is_believed_where_the_first_attempt_was_refused() -> None:
    refused = Refused()
    assert not refused.is_retry(True, 7, 0.0)
    refused.remember(7, 0.0)
    assert refused.is_retry(True, 7, SECONDS - 1)
    assert not refused.is_retry(True, 7, SECONDS + 1)
    for n in range(KEPT):
        refused.remember(100 + n, 2.0)
    assert not refused.is_retry(True, 7, 2.0)


@pytest.mark.parametrize(("told_s", "known_s"), [(None, BACKOFF_S), (30.0, 60.0)])
def test_who_does_not_say_so_is_the_same_client_for_a_while(told_s: float | None, known_s: float) -> None:
    for late_s, again in ((known_s - 0.1, True), (known_s + 0.1, False)):
        refused = Refused()
        refused.remember(7, 0.0, told_s)
        assert refused.is_retry(False, 7, late_s) is again
        assert not refused.is_retry(False, 8, late_s), "another demand"


def test_who_was_failed_by_an_engine_is_known_by_its_word_alone() -> None:
    refused = Refused()
    refused.remember(7, 0.0, 0.0)
    assert not refused.is_retry(False, 7, 0.1)
    assert refused.is_retry(True, 7, 0.1)


def test_as_many_attempts_as_one_client_makes_are_one_demand() -> None:
    refused = Refused()
    told = []
    for _ in range(2 * (REPEATS + 1)):
        told.append(refused.is_retry(False, 7, 0.0))
        refused.remember(7, 0.0)
    assert told == 2 * [False, *([True] * REPEATS)]


def test_what_has_gone_to_an_engine_is_another_demand_when_it_comes_again() -> None:
    refused = Refused()
    refused.remember(7, 0.0)
    refused.forget(7)
    assert not refused.is_retry(False, 7, 0.1)
    assert not refused.is_retry(True, 7, 0.1)


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
