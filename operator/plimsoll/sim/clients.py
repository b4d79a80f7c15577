"""Retries of rejected clients: which clients retry, when, and how often.

Problem: a rejected request is not gone. SDKs retry automatically, some as `Retry-After` says and some by their own
backoff. Their behaviour decides whether a step in load causes one wave or many.

Idea: one behaviour for all clients, or half of them each. A client that honours the response retries after
`Retry-After`, not at all if it says `x-should-retry: false`, and by an SDK's own backoff if it says neither, as for a
plain proxy. A client that ignores it retries by that backoff in any case. Both make `MAX_ATTEMPTS` attempts. A retry is
the same request: it is marked as a retry, as SDKs do, its body is the same, and no figure of the offered load counts
it.

The backoff is that of openai-python (`_calculate_retry_timeout`: 0.5 s doubled each time, up to a quarter less). An
idle connection is kept for 5 s, as httpx does. A retry within that time goes to the same gateway, a later one to any.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from random import Random
from typing import Final

from plimsoll.core.admission.retry_advice import RetryAdvice
from plimsoll.sim.attempt import Attempt, AttemptOutcome

MAX_ATTEMPTS: Final = 3
IDLE_CONNECTION_S: Final = 5.0  # how long an idle connection is kept
_BACKOFF_S: Final = 0.5
_JITTER: Final = 0.25


class RetryBehavior(StrEnum):
    """How a run's clients react to a rejection."""

    NONE = "none"
    HONOUR = "honour"
    IGNORE = "ignore"
    MIXED = "mixed"


class RetryingClients:
    """Clients of one run."""

    def __init__(self, behavior: RetryBehavior, random: Random) -> None:
        self._behavior, self._random = behavior, random
        self._seed = random.getrandbits(64)

    def _honours_retry_after(self, attempt: Attempt) -> bool:
        """Whether the client follows `Retry-After`. If mixed, half of the clients do, and a client is consistent."""
        if self._behavior is RetryBehavior.MIXED:
            return Random(f"{self._seed}/{attempt.trace_request.client or attempt.id}").random() < 0.5
        return self._behavior is RetryBehavior.HONOUR

    def _retry_after_s(self, advice: RetryAdvice | None) -> int | None:
        """`Retry-After` of a rejection, whole seconds, randomised where the time is unknown; None: no retry."""
        return None if advice is None else advice.draw_retry_after_s(self._random.randint)

    def on_rejection(self, attempt: Attempt, advice: RetryAdvice | None) -> None:
        """Handle a rejection. advice: its retry advice, None without any."""
        attempt.retry_after_s, attempt.honours_retry_after = (
            self._retry_after_s(advice),
            self._honours_retry_after(attempt),
        )
        if attempt.attempt == 1 and advice is not None and advice.retryable:
            attempt.reservation_s = advice.eta_s

    def retry_delay_s(self, attempt: Attempt, advice: RetryAdvice | None) -> float | None:
        """Seconds until the client retries after that rejection; None: never."""
        if self._behavior is RetryBehavior.NONE or attempt.attempt >= MAX_ATTEMPTS:
            return None
        if advice is not None and attempt.honours_retry_after:
            return None if attempt.retry_after_s is None else float(attempt.retry_after_s)
        return _BACKOFF_S * 2.0 ** (attempt.attempt - 1) * (1.0 - _JITTER * self._random.random())


class RetryStats:
    """Outcomes of rejected requests, by first attempt and by the advice of the first rejection.

    A retry reservation is a rejection that gives the time at which there will be capacity.
    """

    def __init__(self) -> None:
        self.recovered = self.retries = 0
        self._rejected = self._reservations = 0
        self._admitted_by_retry = [0, 0]  # of the retry reservations: admitted at the first retry, at the second
        self._by_honoured_wait = {until_s: [0, 0, 0] for until_s in (60, 120)}  # given, and the same two counts

    def record_rejection(self, attempt: Attempt) -> None:
        """Count a first attempt that was rejected for now."""
        self._rejected += 1
        if attempt.reservation_s is not None:
            self._reservations += 1
            for counts in self._matching_counts(attempt):
                counts[0] += 1

    def record_retry(self, attempt: Attempt) -> None:
        """Count a further attempt that has ended."""
        self.retries += 1
        self.recovered += attempt.outcome is AttemptOutcome.OK
        if attempt.reservation_s is not None and attempt.admitted_s is not None:
            retry_index = attempt.attempt - 2
            self._admitted_by_retry[retry_index] += 1
            for counts in self._matching_counts(attempt):
                counts[1 + retry_index] += 1

    def _matching_counts(self, attempt: Attempt) -> Iterator[list[int]]:
        assert attempt.reservation_s is not None
        if attempt.honours_retry_after:
            yield self._by_honoured_wait[60 if attempt.reservation_s <= 60.0 else 120]

    def summary(self) -> dict[str, object]:
        """The counts as JSON values."""
        names = ("given", "first_ok", "second_ok")
        return {
            "refused": self._rejected,
            "given": self._reservations,
            "first_ok": self._admitted_by_retry[0],
            "second_ok": self._admitted_by_retry[1],
            "honoured": {
                f"to_{until_s}_s": dict(zip(names, counts, strict=True))
                for until_s, counts in self._by_honoured_wait.items()
            },
        }
