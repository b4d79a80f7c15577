"""The rule for `Retry-After`: when a rejected client should come back, and whether an SDK may retry by itself.

Problem: SDKs honour a `Retry-After` of at most 60 s. With a longer one they retry within a second. Other clients can
wait for an hour, but only for a time that does not depend on who else is waiting.

Idea: a wait of up to two minutes is announced in two steps of at most 60 s. Beyond it, SDKs must not retry, and
`Retry-After` is the whole time if that is known: the end of a start-up, or the time at which a quota has room. The end
of a backlog is not known, and clients that return at it would return together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

MAX_RETRY_AFTER_S: Final = 60  # what every SDK honours
MAX_RESERVATION_S: Final = 120.0  # announced in two steps of `MAX_RETRY_AFTER_S`
MAX_RETURN_S: Final = 3600.0  # longest `Retry-After`
UNKNOWN_RETRY_RANGE_S: Final = (10, 30)  # random `Retry-After` if the time is unknown


class RetryAdvice(NamedTuple):
    """When a rejected client should retry. `advise_retry` makes it.

    `eta_s` is the estimated time in seconds until it can be served, None if unknown. `retry_after_s` is the value of
    `Retry-After` in whole seconds, None for no such header, or for a random one; see `draw_retry_after_s`. `retryable`
    is False if an SDK must not retry by itself; a `Retry-After` then says when a client may come back.
    """

    eta_s: float | None
    retry_after_s: int | None
    retryable: bool

    def draw_retry_after_s(self, randint: Callable[[int, int], int]) -> int | None:
        """Returns the seconds for `Retry-After`, random if a retry can succeed at an unknown time. None for no header.

        `randint` returns a random integer between its arguments, both included.
        """
        if self.retry_after_s is None and self.retryable:
            return randint(*UNKNOWN_RETRY_RANGE_S)
        return self.retry_after_s


NO_RETRY: Final = RetryAdvice(None, None, False)
UNKNOWN_TIME: Final = RetryAdvice(None, None, True)


def advise_retry(
    eta_s: float | None, *, is_time_known: bool = False, sdk_limit_s: float = MAX_RESERVATION_S
) -> RetryAdvice:
    """Returns the advice for a client that can be served in `eta_s` seconds, None if unknown.

    `is_time_known`: the time does not depend on the requests ahead. `sdk_limit_s`: longest wait that is announced in
    steps that SDKs honour; 0 if SDKs must not retry.
    """
    if eta_s is None:
        return UNKNOWN_TIME if sdk_limit_s > 0.0 else NO_RETRY
    if eta_s <= sdk_limit_s:
        return RetryAdvice(eta_s, min(MAX_RETRY_AFTER_S, max(1, math.ceil(eta_s))), True)
    return RetryAdvice(eta_s, max(1, math.ceil(eta_s)) if is_time_known and eta_s <= MAX_RETURN_S else None, False)
