"""Watches a stream of completions for the ends that look well and are not.

Problem: SDKs take `finish_reason: "abort"` and an end without `[DONE]` for success. Chunks may split anywhere.
Idea: three byte patterns that cannot occur inside a JSON string, because there quotes and line ends are escaped. Each
chunk is searched as it is; only the seam between two chunks is copied, some 60 bytes.
"""

from __future__ import annotations

ABORT = b'"finish_reason":"abort"'
DONE = b"\ndata: [DONE]"
ERROR = b'\ndata: {"error"'
FIRST_ERROR = ERROR[1:]  # where it begins a chunk
EVENT_END = b"\n\n"
SEAM = max(len(ABORT), len(DONE), len(ERROR)) - 1


class StreamWatch:
    """What a stream has shown so far: `aborted`, `done` (its end mark), `error` (an error event of the engine).

    `between` is whether the last byte fed ended an event.
    """

    def __init__(self) -> None:
        self.aborted = False
        self.done = False
        self.error = False
        self._tail = EVENT_END  # the first event needs no line end before it

    @property
    def between(self) -> bool:
        """Whether no event is half sent."""
        return self._tail.endswith(EVENT_END)

    def abort_ends(self, chunk: bytes) -> int:
        """Where the aborted event ends in the chunk that is fed next: the place behind it, or -1 if not in there."""
        if self._tail.endswith(b"\n") and chunk.startswith(b"\n") and not self.between:
            return 1
        place = chunk.find(EVENT_END, max(0, chunk.find(ABORT)))
        return place + len(EVENT_END) if place >= 0 else -1

    def feed(self, chunk: bytes) -> None:
        """Looks at the next chunk."""
        seam = self._tail + chunk[:SEAM]
        self.aborted = self.aborted or ABORT in chunk or ABORT in seam
        self.done = self.done or DONE in chunk or DONE in seam
        self.error = self.error or ERROR in chunk or ERROR in seam
        self._tail = chunk[-SEAM:] if len(chunk) >= SEAM else (self._tail + chunk)[-SEAM:]


def before_done(chunk: bytes) -> bytes:
    """The part of a chunk before the end mark."""
    if chunk.startswith(DONE[1:]):
        return b""
    place = chunk.find(DONE)
    return chunk if place < 0 else chunk[: place + 1]
