"""Lines for standard output that never block the event loop.

Problem: standard output is a pipe to the container runtime. When nobody reads it, a write blocks, and with it every
request.

Idea: the event loop collects lines for `FLUSH_SECONDS`, and a thread writes each batch. Lines that do not fit into
`MAX_PENDING_BYTES` are dropped and counted.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
from queue import SimpleQueue

MAX_PENDING_BYTES = 1 << 20  # some 2,000 lines
FLUSH_SECONDS = 0.1
CLOSE_SECONDS = 2.0  # to write the last batches before the process ends


class LineWriter:
    """Writes lines to a file descriptor. Call its methods in one event loop."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lines: list[bytes] = []
        self._accepted_bytes = 0  # changed by the event loop alone
        self._done_bytes = 0  # changed by the thread alone
        self._refused_lines = 0  # as the first
        self._failed_lines = 0  # as the second
        self._reported_lines = 0
        self._batches: SimpleQueue[bytes | None] = SimpleQueue()
        self._timer: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._run, name="line-writer", daemon=True)
        self._thread.start()

    def take_dropped(self) -> int:
        """Returns how many lines since the last call were not written, because the reader is too slow or gone."""
        dropped = self._refused_lines + self._failed_lines - self._reported_lines
        self._reported_lines += dropped
        return dropped

    def write(self, line: bytes) -> None:
        """Write a line, which ends with a line break, soon. Drops it if too much waits already."""
        if self._accepted_bytes - self._done_bytes + len(line) > MAX_PENDING_BYTES:
            self._refused_lines += 1
            return
        self._accepted_bytes += len(line)
        self._lines.append(line)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_SECONDS, self.flush)

    def flush(self) -> None:
        """Hand all lines to the thread."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines:
            self._batches.put(b"".join(self._lines))
            self._lines.clear()

    def close(self) -> None:
        """Write what is left, for `CLOSE_SECONDS` at most."""
        self.flush()
        self._batches.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            self._write_all(batch)
            self._done_bytes += len(batch)

    def _write_all(self, batch: bytes) -> None:
        left = memoryview(batch)
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:  # another process made the shared pipe non-blocking
                select.select([], [self._fd], [])
            except OSError:  # the reader is gone
                self._failed_lines += bytes(left).count(b"\n")
                return
