"""Detect requests that are a client's retry of a rejected request at this gateway.

Problem: SDKs retry up to four times with the same body. Retries are no new demand, but not every client marks them:
LiteLLM restarts its count after three attempts and ignores `x-should-retry`. A header alone must not hide demand.

Idea: remember rejections by tenant and body. A request that claims to be a retry is one if its rejection is remembered.
A request without that claim counts as a retry within twice its `Retry-After`, or without `Retry-After` within a
client's own backoff. It counts at most `MAX_REPEATS` times, as one client retries. A retry reservation is recognised
by the controller, with or without the header.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

MAX_REMEMBERED: Final = 10_000
RETRY_WINDOW_S: Final = 300.0  # longer than any SDK waits between two attempts
MAX_CLIENT_BACKOFF_S: Final = 10.0  # longer than the longest backoff of SDKs, 8 s
MAX_REPEATS: Final = 4  # retries of one client: LiteLLM makes five attempts


@dataclass(slots=True)
class _Rejection:
    at_s: float
    retry_until_s: float
    repeats: int = 0


class RecentRejections:
    """Recently rejected demands."""

    def __init__(self) -> None:
        self._rejections: OrderedDict[Hashable, _Rejection] = OrderedDict()

    def record(self, demand: Hashable, now: float, retry_after_s: float | None = None) -> None:
        """Record a rejection.

        `retry_after_s` is its `Retry-After`, None if it says not to retry. With 0, only a request that claims to be a
        retry is recognised.
        """
        retry_until_s = now + (MAX_CLIENT_BACKOFF_S if retry_after_s is None else 2 * retry_after_s)
        rejection = self._rejections.get(demand)
        if rejection is None:
            self._rejections[demand] = _Rejection(now, retry_until_s)
        else:
            rejection.at_s, rejection.retry_until_s = now, retry_until_s
        self._rejections.move_to_end(demand)
        if len(self._rejections) > MAX_REMEMBERED:
            self._rejections.popitem(last=False)

    def discard(self, demand: Hashable) -> None:
        """Forget a demand that is sent to an engine. The same body later is new demand."""
        self._rejections.pop(demand, None)

    def is_retry(self, claims_retry: bool, demand: Hashable, now: float) -> bool:
        """Whether this request is a retry. `claims_retry` says that the client marks it as one."""
        rejection = self._rejections.get(demand)
        if rejection is None or now - rejection.at_s >= RETRY_WINDOW_S:
            return False
        if claims_retry:
            return True
        if now <= rejection.retry_until_s and rejection.repeats < MAX_REPEATS:
            rejection.repeats += 1
            return True
        rejection.repeats = 0  # another client with the same body: new demand
        return False
