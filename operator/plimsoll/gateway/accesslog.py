"""What became of each request: Envoy's access log, read from a FIFO.

Problem: tokens never pass the picker, so nothing tells it when a request ended, how, or when its first byte went out.

Idea: Envoy writes one JSON line per request. The picker opens the FIFO for reading and writing, which never blocks,
lets Envoy open its end, and leaves no end-of-file behind when Envoy restarts. A broken line (cut by a restart) is
skipped.
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
READ_BYTES = 1 << 18


class Outcome(StrEnum):
    """How a request that the picker sent to an engine ended."""

    ANSWERED = "answered"  # the engine's whole answer, a 4xx of its own included
    FAILED = "failed"  # a 5xx, or an answer cut short
    CANCELLED = "cancelled"  # the client left

    __hash__ = str.__hash__  # an enum's own is a call of Python, several times a request


class Record(msgspec.Struct):
    """One line of the log; durations in microseconds, None where it did not come to that.

    All durations begin with the request's first byte: ttft_us ends with the answer's first byte, duration_us with its
    last, received_us with the request's last. sent: bytes of the answer's body.
    """

    ticket: str | None = None
    host: str | None = None
    cluster: str | None = None
    code: int | None = None
    flags: str | None = None
    details: str | None = None
    attempts: int | None = None
    ttft_us: int | None = None
    duration_us: int | None = None
    received_us: int | None = None
    sent: int | None = None
    id: str | None = None

    @property
    def flag_set(self) -> frozenset[str]:
        return frozenset((self.flags or "").split(","))

    @property
    def outcome(self) -> Outcome:
        if self.flags != "-":  # most have none
            flags = self.flag_set
            if flags & _CLIENT_LEFT:
                return Outcome.CANCELLED
            if flags & _CUT:
                return Outcome.FAILED
        if not self.code or self.code >= 500:
            return Outcome.FAILED
        return Outcome.ANSWERED

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the request's receipt to the first byte of its answer; None if it had none that was wanted.

        An engine's own 4xx comes at once, and would let percentiles look well.
        """
        if self.ttft_us is None or (self.code or 0) >= 400 or self.outcome is not Outcome.ANSWERED:
            return None
        return self.ttft_us / 1e6

    @property
    def e2e_s(self) -> float | None:
        """Seconds from the request's receipt to the last byte of its answer; None where it had none that was wanted."""
        return None if self.duration_us is None or self.ttft_s is None else self.duration_us / 1e6

    @property
    def reset_before_first_byte(self) -> bool:
        """The engine took the request and broke the connection without a word."""
        return self.ttft_us is None and "UC" in self.flag_set


_CLIENT_LEFT = frozenset({"DC", "DR"})
_CUT = frozenset({"UC", "UF", "UPE", "UR", "UT", "LR", "SI", "UMSDR"})

_decode = msgspec.json.Decoder(Record, strict=False).decode


class AccessLog:
    """Reads the FIFO while it is open; `bad` counts lines that were none."""

    def __init__(self, fifo: Path, take: Callable[[Record], None]) -> None:
        self._fifo = fifo
        self._take = take
        self._rest = b""
        self._fd = -1
        self.bad = 0

    def open(self) -> None:
        """Start reading in the running loop. Raises OSError if the FIFO is not there."""
        self._fd = os.open(self._fifo, os.O_RDWR | os.O_NONBLOCK)
        with contextlib.suppress(OSError):  # the kernel's limit for unprivileged users may be lower
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
        """Take in a piece of the log, cut anywhere."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line:
                continue
            try:
                record = _decode(line)
            except msgspec.DecodeError:
                self.bad += 1
                continue
            self._take(record)
