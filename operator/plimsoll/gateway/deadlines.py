"""The deadline of one request, from its headers and the limits of its service.

Problem: a client that has given up keeps its place in the queue and at the engine, if something between it and the
gateway hides that it has left. And the timeouts that clients announce do not mean the same.

Idea: `x-request-timeout` bounds the whole request. The headers of SDKs tell how long the SDK waits for a next byte:
without a stream the whole response must arrive within it, with one only the first token. `maxDuration` bounds both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from plimsoll.api.v1alpha1.request_limits import MAX_DURATION_S
from plimsoll.core.admission.request_limits import RequestLimits
from plimsoll.core.units import format_figure
from plimsoll.gateway.errors import Rejection, RejectionReason

REQUEST_TIMEOUT_HEADER: Final = "x-request-timeout"
# Of the SDKs for Python (openai, anthropic), and for Node.
SDK_TIMEOUT_HEADERS: Final = ("x-stainless-read-timeout", "x-stainless-timeout")
TIMEOUT_HEADERS: Final = (REQUEST_TIMEOUT_HEADER, *SDK_TIMEOUT_HEADERS)

_SECONDS: Final = re.compile(rb"\d{1,15}(\.\d{1,15})?", re.ASCII)
_REQUEST_TIMEOUT: Final = REQUEST_TIMEOUT_HEADER.encode()
_TIMEOUTS: Final = frozenset(name.encode() for name in TIMEOUT_HEADERS)
_SDK_TIMEOUTS: Final = tuple(name.encode() for name in SDK_TIMEOUT_HEADERS)


class RequestDeadline(NamedTuple):
    """When a request must have its first token and its last one, in monotonic seconds. Infinity without a bound.

    `timeout_s` is the time from the arrival to the sooner of the two, and `source` what set it.
    """

    first_token_s: float = math.inf
    complete_s: float = math.inf
    timeout_s: float = math.inf
    source: str = ""

    def __str__(self) -> str:
        return f"{format_figure(self.timeout_s, 6)} s ({self.source})"


NO_DEADLINE: Final = RequestDeadline()


def read_deadline(
    headers: Mapping[bytes, bytes], limits: RequestLimits, *, stream: bool, now: float
) -> RequestDeadline | Rejection:
    """Returns the deadline of a request that arrived `now`, or the rejection of an `x-request-timeout` that is none.

    What an SDK announces by itself and cannot be read counts as nothing.
    """
    if limits.max_duration_s == math.inf and _TIMEOUTS.isdisjoint(headers):
        return NO_DEADLINE
    value = headers.get(_REQUEST_TIMEOUT)
    sdk_s, sdk_header = _sdk_timeout_s(headers)
    if value is None and sdk_s == math.inf == limits.max_duration_s:
        return NO_DEADLINE  # what the SDK announces cannot be read
    complete_s, source = limits.max_duration_s, "requestLimits.maxDuration"
    if value is not None:
        client_s = min(float(value), MAX_DURATION_S) if _SECONDS.fullmatch(value) else 0.0
        if client_s <= 0.0:
            return _invalid_timeout(value)
        if client_s < complete_s:
            complete_s, source = client_s, REQUEST_TIMEOUT_HEADER
    if not stream and sdk_s < complete_s:
        complete_s, source = sdk_s, sdk_header
    if stream and sdk_s < complete_s:
        return RequestDeadline(now + sdk_s, now + complete_s, sdk_s, sdk_header)
    return RequestDeadline(math.inf, now + complete_s, complete_s, source)


def _sdk_timeout_s(headers: Mapping[bytes, bytes]) -> tuple[float, str]:
    """Returns the shortest time that an SDK announces, in seconds, and its header. Infinity for none."""
    found, source = math.inf, ""
    for key, name in zip(_SDK_TIMEOUTS, SDK_TIMEOUT_HEADERS, strict=True):
        value = headers.get(key)
        if value is not None and _SECONDS.fullmatch(value) and 0.0 < (seconds := float(value)) < found:
            found, source = min(seconds, MAX_DURATION_S), name
    return found, source


def _invalid_timeout(value: bytes) -> Rejection:
    shown = value[:40].decode("ascii", "replace")
    message = (
        f"The header '{REQUEST_TIMEOUT_HEADER}' is '{shown}'. Send it once, with a number of seconds above 0, such as"
        " 30 or 2.5."
    )
    return Rejection(RejectionReason.INVALID_TIMEOUT, message)
