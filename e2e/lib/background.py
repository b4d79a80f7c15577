"""A thread that runs during a `with` block."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self


class BackgroundThread:
    """A context manager around `run`, which must return soon after `_stop` is set.

    The end of the block sets `_stop` and waits for the thread, at most `join_timeout_s` if that is not None.
    """

    def __init__(self, run: Callable[[], None], join_timeout_s: float | None = None, name: str | None = None) -> None:
        self._join_timeout_s = join_timeout_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(self._join_timeout_s)
