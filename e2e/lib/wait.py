"""Waiting for a state of the world: the only place where scenarios sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(what: str, look: Callable[[], T | None], timeout_s: float = 60, every_s: float = 0.5) -> T:
    """The first true thing that `look` returns.

    Raises AssertionError, with `what` and the last answer, when there is none within `timeout_s` seconds: in a
    scenario a state that does not come is a finding, not an accident.
    """
    end = time.monotonic() + timeout_s
    while True:
        result = look()
        if result:
            return result
        if time.monotonic() > end:
            raise AssertionError(f"not after {timeout_s:.0f} s: {what} (last seen: {result!r})")
        time.sleep(every_s)


def sleep(seconds: float) -> None:
    """Lets time pass where the scenario is about time passing (a prober's beat, a quiet spell)."""
    time.sleep(seconds)
