"""What launcher and middleware tell each other, as marks in a folder.

Problem: they are two processes (with several API servers, more), and the middleware asks on every request.
Idea: a file that exists is a mark, a file's time is a time, and each server keeps how many requests it holds in a file
of its own, which is still there when the server was killed. A few system calls a request, no lock, nothing to restart.
The launcher clears the folder first: it outlives a restart of the container.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

HELD = "held-"  # and the process that holds them
HELD_BYTES = 8


class State:
    """The marks of one engine pod in `folder`."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._draining = str(self._folder / "draining")
        self._stopping = str(self._folder / "stopping")
        self._request = str(self._folder / "request")
        self._held = 0  # by this process
        self._held_file = -1

    def reset(self) -> None:
        """Makes the folder and forgets every mark of an earlier process."""
        self._folder.mkdir(parents=True, exist_ok=True)
        marks = (self._draining, self._stopping, self._request)
        for path in (*map(Path, marks), *self._folder.glob(f"{HELD}*")):
            path.unlink(missing_ok=True)

    def mark_draining(self) -> None:
        """From now on new requests are refused; the engine still takes those that are past that check."""
        Path(self._draining).touch()

    def mark_stopping(self) -> None:
        """From now on the engine takes no request at all."""
        Path(self._stopping).touch()

    def mark_request(self) -> None:
        """A request has come in."""
        try:
            os.utime(self._request)
        except FileNotFoundError:
            Path(self._request).touch()

    def hold(self) -> None:
        """This process has given a request to the engine."""
        self._now_held(self._held + 1)

    def let_go(self) -> None:
        """A request that this process held has its answer, or nobody waits for it any more."""
        self._now_held(self._held - 1)

    def _now_held(self, count: int) -> None:
        self._held = count
        with contextlib.suppress(OSError):  # a full disk fails no request
            if self._held_file < 0:
                own = self._folder / f"{HELD}{os.getpid()}"
                self._held_file = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
            os.pwrite(self._held_file, count.to_bytes(HELD_BYTES), 0)

    @property
    def held(self) -> int:
        """Requests that the processes of this pod hold, or held when they ended."""
        total = 0
        for path in self._folder.glob(f"{HELD}*"):
            with contextlib.suppress(FileNotFoundError):
                total += int.from_bytes(path.read_bytes())
        return total

    @property
    def draining(self) -> bool:
        """Whether new requests are to be refused."""
        return os.path.exists(self._draining)

    @property
    def stopping(self) -> bool:
        """Whether the engine has been told to stop."""
        return os.path.exists(self._stopping)

    def last_request(self) -> float | None:
        """Unix time in seconds of the last request; None where there was none."""
        try:
            return os.stat(self._request).st_mtime
        except FileNotFoundError:
            return None
