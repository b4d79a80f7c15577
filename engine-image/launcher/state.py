"""What launcher and middleware tell each other, as marks in a folder.

Problem: they are two processes (with several API servers, more), and the middleware asks on every request.
Idea: a file that exists is a mark, a file's time is a time. One `stat` or `utime` a request, no lock, nothing to
restart. The launcher clears the folder first: it outlives a restart of the container.
"""

from __future__ import annotations

import os
from pathlib import Path


class State:
    """The marks of one engine pod in `folder`."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._draining = str(self._folder / "draining")
        self._stopping = str(self._folder / "stopping")
        self._request = str(self._folder / "request")

    def reset(self) -> None:
        """Makes the folder and forgets every mark of an earlier process."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in (self._draining, self._stopping, self._request):
            Path(path).unlink(missing_ok=True)

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
