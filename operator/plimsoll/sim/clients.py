"""Clients that were refused: who comes back, when, and how often.

Problem: a refused request is not gone. SDKs come back by themselves, some as they were told and some as they like, and
what they do decides whether a step in the load ends in one wave or in many.

Idea: one manner for all, or half and half. Who honours does what the answer says: back after `Retry-After`, not at all
where it says `x-should-retry: false`, and by an SDK's own backoff where it says neither, as a plain proxy's does. Who
ignores it comes back by that backoff whatever the answer says. Both make `ATTEMPTS` in all. A retry is the same demand:
it says that it is one, as SDKs do, its body is the same, and no figure of what was offered counts it.

The backoff is that of openai-python (`_calculate_retry_timeout`: 0.5 s doubled each time, up to a quarter less). An
idle connection is kept for 5 s, as httpx does: who is back sooner comes to the same gateway, others to any.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from random import Random
from typing import Final

from plimsoll.core.admission import Told
from plimsoll.core.admission.tickets import UNKNOWN_S
from plimsoll.sim.visit import End, Visit

ATTEMPTS: Final = 3
KEPT_S: Final = 5.0  # an idle connection
_BACKOFF_S: Final = 0.5
_JITTER: Final = 0.25


class Manner(StrEnum):
    """How a run's clients take a refusal."""

    NONE = "none"
    HONOUR = "honour"
    IGNORE = "ignore"
    MIXED = "mixed"


class Clients:
    """Of one run."""

    def __init__(self, manner: Manner, random: Random) -> None:
        self._manner, self._random = manner, random
        self._seed = random.getrandbits(64)

    def _honours(self, visit: Visit) -> bool:
        """Whether who sent it does as it is told. Half of them, where they are mixed: the same client always alike."""
        if self._manner is Manner.MIXED:
            return Random(f"{self._seed}/{visit.asked.client or visit.id}").random() < 0.5
        return self._manner is Manner.HONOUR

    def _told_s(self, told: Told | None) -> int | None:
        """`Retry-After` of a refusal, whole seconds, spread where nobody knows the time; None: it says not again."""
        if told is None or not told.again:
            return None
        if told.retry_after_s is None:
            low_s, high_s = UNKNOWN_S
            return self._random.randint(int(low_s), int(high_s))
        return told.retry_after_s

    def tell(self, visit: Visit, told: Told | None) -> None:
        """A refusal has come: what it says, None: nothing about coming back."""
        visit.retry_after_s, visit.honours = self._told_s(told), self._honours(visit)
        if visit.attempt == 1 and told is not None and visit.retry_after_s is not None:
            visit.ticket_s = told.eta_s

    def back_s(self, visit: Visit, told: Told | None) -> float | None:
        """In how many seconds it is there again after that refusal; None: never."""
        if self._manner is Manner.NONE or visit.attempt >= ATTEMPTS:
            return None
        if told is not None and visit.honours:
            return None if visit.retry_after_s is None else float(visit.retry_after_s)
        return _BACKOFF_S * 2.0 ** (visit.attempt - 1) * (1.0 - _JITTER * self._random.random())


class Returns:
    """What became of refused demands: counted over first attempts, by what the first refusal had told them.

    A ticket is a refusal that named the time at which there will be room.
    """

    def __init__(self) -> None:
        self.recovered = self.retries = 0
        self._refused = self._given = 0
        self._ok = [0, 0]  # of the tickets: let in at the first retry, at the second
        self._honoured = {until_s: [0, 0, 0] for until_s in (60, 120)}  # given, and the same two

    def first(self, visit: Visit) -> None:
        """A first attempt was refused for now."""
        self._refused += 1
        if visit.ticket_s is not None:
            self._given += 1
            for counts in self._of(visit):
                counts[0] += 1

    def again(self, visit: Visit) -> None:
        """A further attempt has ended."""
        self.retries += 1
        self.recovered += visit.end is End.OK
        if visit.ticket_s is not None and visit.admitted_s is not None:
            place = visit.attempt - 2
            self._ok[place] += 1
            for counts in self._of(visit):
                counts[1 + place] += 1

    def _of(self, visit: Visit) -> Iterator[list[int]]:
        assert visit.ticket_s is not None
        if visit.honours:
            yield self._honoured[60 if visit.ticket_s <= 60.0 else 120]

    def summary(self) -> dict[str, object]:
        """As JSON."""
        names = ("given", "first_ok", "second_ok")
        return {
            "refused": self._refused,
            "given": self._given,
            "first_ok": self._ok[0],
            "second_ok": self._ok[1],
            "honoured": {
                f"to_{until_s}_s": dict(zip(names, counts, strict=True)) for until_s, counts in self._honoured.items()
            },
        }
