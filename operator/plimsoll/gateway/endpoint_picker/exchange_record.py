"""What is known of one request of a gateway of another product, as the record that Plimsoll's own Envoy would log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from plimsoll.gateway.endpoint_picker.decision import Dispatch
from plimsoll.gateway.envoy.access_log import AccessRecord
from plimsoll.gateway.envoy.listener import PICK_CLUSTER_PREFIX

_CONNECT_ERROR: Final = b"upstream connect error"  # how Envoy's response begins if the engine closed or refused
_COMPLETE, _CLIENT_GONE, _ENGINE_CLOSED = "-", "DC", "UC"  # flags of Envoy's access log


class ExchangeRecord:
    """The record of one request, from the time on at which its headers are here."""

    def __init__(
        self, request_id: str, headers: Mapping[bytes, bytes], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._started_s = clock()
        self._is_failed = False
        self.is_dispatched = False
        self.is_response_complete = False
        self._record = AccessRecord(
            request_id,
            flags=_COMPLETE,
            client_request_id=_text(headers.get(b"x-request-id", b""), 80) or None,
            method=_text(headers.get(b":method", b""), 20),
            path=_text(headers.get(b":path", b"").partition(b"?")[0], 200),
            sent_bytes=0,
        )

    @property
    def request_id(self) -> str:
        return self._record.request_id or ""

    @property
    def outcome(self) -> str:
        """The outcome of the request: `left` if the client went before it was sent to an engine or answered."""
        if self.is_dispatched:
            return "sent"
        return "left" if self._record.status is None else "answered"

    def on_body(self, received_bytes: int) -> None:
        """The request is complete."""
        self._record.received_bytes, self._record.received_us = received_bytes, self._elapsed_us()

    def on_answer(self, status: int, headers: Mapping[str, str], sent_bytes: int) -> None:
        """The picker answers the client itself."""
        self._record.status, self._record.reason = status, headers.get("x-plimsoll-reason")
        self._record.sent_bytes, self.is_response_complete = sent_bytes, True

    def on_dispatch(self, dispatch: Dispatch) -> None:
        """The request goes to an engine."""
        self.is_dispatched = True
        self._record.upstream, self._record.cluster = dispatch.endpoints[0], PICK_CLUSTER_PREFIX + dispatch.service

    def on_response_headers(self, status: int | None, served: str, reason: str | None) -> None:
        """`served` is the engine that the gateway names, "" if it does not."""
        self._record.status, self._record.reason = status, reason
        self._record.upstream = served or self._record.upstream

    def on_response_body(self, part: bytes) -> AccessRecord | None:
        """A part of the response's body has arrived. Returns the record so far with the first one, else None."""
        is_first = not self._record.sent_bytes and bool(part)
        if is_first:
            self._is_failed = self._record.status == 503 and part.startswith(_CONNECT_ERROR)
            self._record.ttft_us = None if self._is_failed else self._elapsed_us()
        self._record.sent_bytes = (self._record.sent_bytes or 0) + len(part)
        return self._record if is_first else None

    def on_response_end(self) -> None:
        """The response is complete."""
        self._record.duration_us, self.is_response_complete = self._elapsed_us(), True

    def finish(self, *, is_response_seen: bool) -> AccessRecord:
        """Returns the record at the end. `is_response_seen`: the gateway sends the bodies of responses."""
        record = self._record
        if self._is_failed:
            record.flags = _ENGINE_CLOSED
        elif not self.is_response_complete and (is_response_seen or record.status is None):
            record.flags = _CLIENT_GONE
        record.total_ms = self._elapsed_us() // 1000
        return record

    def _elapsed_us(self) -> int:
        return round((self._clock() - self._started_s) * 1e6)


def _text(value: bytes, limit: int) -> str:
    return value[:limit].decode("latin-1")
