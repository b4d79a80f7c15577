"""Watches a stream of completions for the ends that look well and are not.

Problem: SDKs take `finish_reason: "abort"` and an end without `[DONE]` for success. Chunks may split anywhere.
Idea: three byte patterns that cannot occur inside a JSON string, because there quotes and line ends are escaped. Each
chunk is searched as it is; only the seam between two chunks is copied, some 60 bytes.
"""

from __future__ import annotations

ABORT_MARK = b'"finish_reason":"abort"'
DONE_MARK = b"\ndata: [DONE]"
ERROR_MARK = b'\ndata: {"error"'
LEADING_ERROR_MARK = ERROR_MARK[1:]  # where it begins a chunk
EVENT_END = b"\n\n"
SEAM_BYTES = max(len(ABORT_MARK), len(DONE_MARK), len(ERROR_MARK)) - 1


class StreamScanner:
    """What a stream has shown so far: `aborted`, `done` (its end mark), `error` (an error event of the engine).

    `between` is whether the last byte fed ended an event.
    """

    def __init__(self) -> None:
        self.aborted = False
        self.done = False
        self.error = False
        self._tail = EVENT_END  # the first event needs no line end before it

    @property
    def at_event_boundary(self) -> bool:
        """Whether no event is half sent."""
        return self._tail.endswith(EVENT_END)

    def aborted_event_end(self, chunk: bytes) -> int:
        """Where the aborted event ends in the chunk that is fed next: the place behind it, or -1 if not in there."""
        if self._tail.endswith(b"\n") and chunk.startswith(b"\n") and not self.at_event_boundary:
            return 1
        position = chunk.find(EVENT_END, max(0, chunk.find(ABORT_MARK)))
        return position + len(EVENT_END) if position >= 0 else -1

    def feed(self, chunk: bytes) -> None:
        """Looks at the next chunk."""
        seam = self._tail + chunk[:SEAM_BYTES]
        self.aborted = self.aborted or ABORT_MARK in chunk or ABORT_MARK in seam
        self.done = self.done or DONE_MARK in chunk or DONE_MARK in seam
        self.error = self.error or ERROR_MARK in chunk or ERROR_MARK in seam
        self._tail = chunk[-SEAM_BYTES:] if len(chunk) >= SEAM_BYTES else (self._tail + chunk)[-SEAM_BYTES:]


def strip_done(chunk: bytes) -> bytes:
    """The part of a chunk before the end mark."""
    if chunk.startswith(DONE_MARK[1:]):
        return b""
    position = chunk.find(DONE_MARK)
    return chunk if position < 0 else chunk[: position + 1]
