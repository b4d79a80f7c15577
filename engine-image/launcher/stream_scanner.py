"""Scans a stream of generated text for failures that look like success.

Problem: SDKs take `finish_reason: "abort"` and an end without `[DONE]` for success. Chunks may split anywhere. Idea:
the byte patterns of the stream's API (`api_formats`). Each chunk is searched in place; only the seam between two chunks
is copied, some 60 bytes, and the one event that must be classified as a whole.
"""

from __future__ import annotations

from launcher.api_formats import MAX_INSPECTED_BYTES, OPENAI, ApiFormat

EVENT_END = b"\n\n"


class StreamScanner:
    """State of a stream so far: `aborted`, `done` (its end mark), `error` (an error event of the engine).

    `between` is whether the last byte fed ended an event.
    """

    def __init__(self, api: ApiFormat = OPENAI) -> None:
        self.aborted = False
        self.done = False
        self.error = False
        self._api = api
        self._seam_bytes = api.seam_bytes
        self._tail = EVENT_END  # the first event needs no line end before it
        self._inspected_event: bytearray | None = bytearray()  # what is there of it; None where nothing is to be judged

    @property
    def at_event_boundary(self) -> bool:
        """Whether no event is partly sent."""
        return self._tail.endswith(EVENT_END)

    def aborted_event_end(self, chunk: bytes) -> int:
        """Return the index behind the aborted event in the chunk that is fed next, or -1 if it does not end there."""
        if self._tail.endswith(b"\n") and chunk.startswith(b"\n") and not self.at_event_boundary:
            return 1
        marks = [position for mark in self._api.abort_marks if (position := chunk.find(mark)) >= 0]
        position = chunk.find(EVENT_END, min(marks, default=0))
        return position + len(EVENT_END) if position >= 0 else -1

    def feed(self, chunk: bytes) -> None:
        """Scan the next chunk."""
        size, api = self._seam_bytes, self._api
        seam = self._tail + chunk[:size]
        if any(mark in chunk or mark in seam for mark in api.abort_marks) or self._inspected_event:
            self.aborted = self.aborted or api.is_abort_event is None or self._is_abort_event(chunk)
        self.done = self.done or any(mark in chunk or mark in seam for mark in api.done_marks)
        self.error = self.error or api.error_mark in chunk or api.error_mark in seam
        self._tail = chunk[-size:] if len(chunk) >= size else (self._tail + chunk)[-size:]

    def _is_abort_event(self, chunk: bytes) -> bool:
        """Append the chunk to the pending event, and classify the event once it is complete."""
        event, api = self._inspected_event, self._api
        if event is None:
            return False
        if not event:
            text = self._tail + chunk
            event += text[min(position for mark in api.abort_marks if (position := text.find(mark)) >= 0) :]
            searched = 0
        else:
            searched = len(event) - 1
            event += chunk
        is_whole = event.find(EVENT_END, searched) >= 0
        if is_whole or len(event) > MAX_INSPECTED_BYTES:
            self._inspected_event = None
        assert api.is_abort_event is not None
        return is_whole and api.is_abort_event(bytes(event))


def strip_done(chunk: bytes, api: ApiFormat = OPENAI) -> bytes:
    """Return the part of a chunk before the end mark."""
    for mark in api.done_marks:
        if chunk.startswith(mark[1:]):
            return b""
        if (position := chunk.find(mark)) >= 0:
            return chunk[: position + 1]
    return chunk
