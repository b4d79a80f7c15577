"""State shared by launcher and middleware, as files in a folder.

Problem: they are two processes (with several API servers, more), and the middleware reads it for every request. Idea:
an existing file is a flag, a file's time is a time, and each server stores its number of running requests in a file of
its own, which remains when the server is killed. This takes a few system calls per request and no lock. The launcher
clears the folder first, because it outlives a restart of the container.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

IN_FLIGHT_PREFIX = "in-flight-"  # and the process that holds them
IN_FLIGHT_BYTES = 8


class PodState:
    """The flags of one engine pod in `folder`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._draining_path = str(self.folder / "draining")
        self._stopping_path = str(self.folder / "stopping")
        self._request_path = str(self.folder / "request")
        self._needed_path = str(self.folder / "needed")
        self._in_flight = 0  # by this process
        self._in_flight_file = -1

    def reset(self) -> None:
        """Create the folder and delete the flags of an earlier process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        mark_paths = (self._draining_path, self._stopping_path, self._request_path, self._needed_path)
        for path in (*map(Path, mark_paths), *self.folder.glob(f"{IN_FLIGHT_PREFIX}*")):
            path.unlink(missing_ok=True)

    def mark_draining(self) -> None:
        """Reject new requests from now on; the engine still takes those that have passed this check."""
        Path(self._draining_path).touch()

    def mark_stopping(self) -> None:
        """Pass no further request to the engine."""
        Path(self._stopping_path).touch()

    def mark_request(self) -> None:
        """Record the time of a request."""
        try:
            os.utime(self._request_path)
        except FileNotFoundError:
            Path(self._request_path).touch()

    def mark_needed(self) -> None:
        """Record the time at which a gateway said that it has no other engine."""
        Path(self._needed_path).touch()

    def begin_request(self) -> None:
        """Count a request that this process passed to the engine."""
        self._write_in_flight(self._in_flight + 1)

    def end_request(self) -> None:
        """Count the end of a request of this process: it has its response, or its client disconnected."""
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
        """Return the running requests of the pod's processes, or those at their end."""
        total = 0
        for path in self.folder.glob(f"{IN_FLIGHT_PREFIX}*"):
            with contextlib.suppress(FileNotFoundError):
                total += int.from_bytes(path.read_bytes())
        return total

    @property
    def draining(self) -> bool:
        """Whether new requests are to be rejected."""
        return os.path.exists(self._draining_path)

    @property
    def stopping(self) -> bool:
        """Whether the engine is being stopped."""
        return os.path.exists(self._stopping_path)

    def last_request(self) -> float | None:
        """Return the Unix time of the last request, s; None without one."""
        return _modified(self._request_path)

    def last_needed(self) -> float | None:
        """Return the Unix time of the last `mark_needed`, s; None without one."""
        return _modified(self._needed_path)


def _modified(path: str) -> float | None:
    try:
        return os.stat(path).st_mtime
    except FileNotFoundError:
        return None
