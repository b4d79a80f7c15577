"""Envoy's access log, read from a FIFO: the outcome and timing of each request.

Problem: responses do not pass the picker, so it does not see when a request ends, how, or when its first byte is sent.

Idea: Envoy writes one JSON line for each request that ends, and a short one for a response that has run for a while
(`access_log_config`). The picker opens the FIFO for reading and writing. That never blocks, and there is no end-of-file
when Envoy restarts. A line that a restart cut is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import msgspec

PIPE_BYTES = 1 << 20
READ_BYTES = 1 << 13  # some 30 lines: what else there is waits for the next turn of the event loop


class RequestOutcome(StrEnum):
    """How a request that the picker sent to an engine ended."""

    SUCCEEDED = "succeeded"  # a complete response of the engine
    REJECTED = "rejected"  # a 4xx of the engine, which served nothing
    FAILED = "failed"  # a 5xx or an incomplete response
    CANCELLED = "cancelled"  # the client disconnected
    DEADLINE_EXCEEDED = "deadline_exceeded"  # Envoy ended it at its deadline
    IDLE_TIMEOUT = "idle_timeout"  # Envoy ended it because the engine sent no byte

    __hash__ = str.__hash__  # Enum.__hash__ is slow Python code


class AccessRecord(msgspec.Struct):
    """One line of the log. Durations are in microseconds, None if that point was not reached.

    All durations start at the first byte of the request. `ttft_us` ends at the first byte of the response,
    `duration_us` at its last byte, and `received_us` at the last byte of the request. `sent_bytes` is the size of the
    response body. `cluster`, `attempts` and the fields after `client_request_id` are None unless the gateway writes an
    access log. `path` has no query, `reason` is the header `x-plimsoll-reason` of the response, `total_ms` the time to
    the end in any case, and `output_tokens` what a complete response reports in `usage`.
    """

    request_id: str | None = None
    upstream: str | None = None
    cluster: str | None = None
    status: int | None = None
    flags: str | None = None
    details: str | None = None
    attempts: int | None = None
    ttft_us: int | None = None
    duration_us: int | None = None
    received_us: int | None = None
    sent_bytes: int | None = None
    client_request_id: str | None = None
    method: str | None = None
    path: str | None = None
    reason: str | None = None
    received_bytes: int | None = None
    trace_id: str | None = None
    total_ms: int | None = None
    output_tokens: int | None = None
    is_running: bool = False  # the response has not ended: only its engine, status and TTFT are known

    @property
    def flag_set(self) -> frozenset[str]:
        return frozenset((self.flags or "").split(","))

    @property
    def outcome(self) -> RequestOutcome:
        if self.flags == "-" and self.status == 200:  # most records
            return RequestOutcome.SUCCEEDED
        if self.flags != "-":
            flags = self.flag_set
            if flags & _CLIENT_DISCONNECT_FLAGS:
                return RequestOutcome.CANCELLED
            if "UMSDR" in flags:
                return RequestOutcome.DEADLINE_EXCEEDED
            if "SI" in flags:
                return RequestOutcome.IDLE_TIMEOUT
            if flags & _UPSTREAM_FAILURE_FLAGS:
                return RequestOutcome.FAILED
        if not self.status or self.status >= 500:
            return RequestOutcome.FAILED
        return RequestOutcome.REJECTED if self.status >= 400 else RequestOutcome.SUCCEEDED

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the request's first byte to the response's first byte. None unless the request succeeded.

        An engine's 4xx is excluded, because it is immediate and would improve the percentiles.
        """
        if self.ttft_us is None or self.outcome is not RequestOutcome.SUCCEEDED:
            return None
        return self.ttft_us / 1e6

    @property
    def e2e_s(self) -> float | None:
        """Seconds from the request's first byte to the response's last byte. None unless the request succeeded."""
        if self.duration_us is None or self.ttft_us is None or self.outcome is not RequestOutcome.SUCCEEDED:
            return None
        return self.duration_us / 1e6

    @property
    def rejected_by_engine(self) -> bool:
        """Whether the engine rejected the request itself, for a reason that no capacity would cure."""
        is_rejected = self.outcome is RequestOutcome.REJECTED and bool(self.upstream)
        return is_rejected and self.status not in _RETRYABLE_CLIENT_ERRORS

    @property
    def reset_before_first_byte(self) -> bool:
        """Whether the engine accepted the request and closed the connection without a response."""
        return self.ttft_us is None and "UC" in self.flag_set


_CLIENT_DISCONNECT_FLAGS = frozenset({"DC", "DR"})
_UPSTREAM_FAILURE_FLAGS = frozenset({"UC", "UF", "UPE", "UR", "UT", "LR"})

_RETRYABLE_CLIENT_ERRORS = frozenset({408, 429})

_decode = msgspec.json.Decoder(AccessRecord, strict=False).decode


class AccessLogReader:
    """Reads the FIFO while it is open. `invalid_lines` counts lines that cannot be parsed."""

    def __init__(self, fifo: Path, on_record: Callable[[AccessRecord], None]) -> None:
        self._fifo = fifo
        self._on_record = on_record
        self._partial_line = b""
        self._fd = -1
        self.invalid_lines = 0

    def open(self) -> None:
        """Start reading in the running event loop. Raises OSError if the FIFO does not exist."""
        self._fd = os.open(self._fifo, os.O_RDWR | os.O_NONBLOCK)
        with contextlib.suppress(OSError):  # the kernel limit for unprivileged users may be lower
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def close(self) -> None:
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> None:
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return
        self.feed(data)

    def feed(self, data: bytes) -> None:
        """Parse a chunk of the log, which may end inside a line."""
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        for line in lines:
            if not line:
                continue
            try:
                record = _decode(line)
            except msgspec.DecodeError:
                self.invalid_lines += 1
                continue
            self._on_record(record)
