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

IN_FLIGHT_PREFIX = "in-flight-"  # and the process that holds them
IN_FLIGHT_BYTES = 8


class PodState:
    """The marks of one engine pod in `folder`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._draining_path = str(self.folder / "draining")
        self._stopping_path = str(self.folder / "stopping")
        self._request_path = str(self.folder / "request")
        self._in_flight = 0  # by this process
        self._in_flight_file = -1

    def reset(self) -> None:
        """Makes the folder and forgets every mark of an earlier process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        mark_paths = (self._draining_path, self._stopping_path, self._request_path)
        for path in (*map(Path, mark_paths), *self.folder.glob(f"{IN_FLIGHT_PREFIX}*")):
            path.unlink(missing_ok=True)

    def mark_draining(self) -> None:
        """From now on new requests are refused; the engine still takes those that are past that check."""
        Path(self._draining_path).touch()

    def mark_stopping(self) -> None:
        """From now on the engine takes no request at all."""
        Path(self._stopping_path).touch()

    def mark_request(self) -> None:
        """A request has come in."""
        try:
            os.utime(self._request_path)
        except FileNotFoundError:
            Path(self._request_path).touch()

    def begin_request(self) -> None:
        """This process has given a request to the engine."""
        self._write_in_flight(self._in_flight + 1)

    def end_request(self) -> None:
        """A request that this process held has its answer, or nobody waits for it any more."""
        self._write_in_flight(self._in_flight - 1)

    def _write_in_flight(self, count: int) -> None:
        self._in_flight = count
        with contextlib.suppress(OSError):  # a full disk fails no request
            if self._in_flight_file < 0:
                path = self.folder / f"{IN_FLIGHT_PREFIX}{os.getpid()}"
                self._in_flight_file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
            os.pwrite(self._in_flight_file, count.to_bytes(IN_FLIGHT_BYTES), 0)

    @property
    def in_flight(self) -> int:
        """Requests that the processes of this pod hold, or held when they ended."""
        total = 0
        for path in self.folder.glob(f"{IN_FLIGHT_PREFIX}*"):
            with contextlib.suppress(FileNotFoundError):
                total += int.from_bytes(path.read_bytes())
        return total

    @property
    def draining(self) -> bool:
        """Whether new requests are to be refused."""
        return os.path.exists(self._draining_path)

    @property
    def stopping(self) -> bool:
        """Whether the engine has been told to stop."""
        return os.path.exists(self._stopping_path)

    def last_request(self) -> float | None:
        """Unix time in seconds of the last request; None where there was none."""
        try:
            return os.stat(self._request_path).st_mtime
        except FileNotFoundError:
            return None
