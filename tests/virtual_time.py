"""An event loop whose clock jumps to the next timer when nothing else is ready.

Problem: a test that sleeps for real time is slow, and fails on a busy machine. Idea: the selector of the loop does not
wait; it moves the clock of the loop by the time that it would have waited. Only for code without real I/O.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0 if timeout else timeout)
        if timeout and not ready:
            self.now_s += timeout
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """The loop; its clock starts at 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Make a coroutine function a plain test that runs in virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            runner.run(test(*args, **kwargs))

    return run
