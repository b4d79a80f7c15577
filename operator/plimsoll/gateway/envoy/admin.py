"""A client of Envoy's admin interface on its unix socket: endpoint state, statistics, and health for draining.

Each call opens one connection. A missing socket or an invalid response raises `EnvoyUnavailable`. Envoy may start after
the picker and may restart alone.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from plimsoll.core.errors import PlimsollError, cause_of
from plimsoll.gateway.envoy.body_filters import RATE_STAT
from plimsoll.gateway.envoy.listener import MODEL_CLUSTER_PREFIX, PICK_CLUSTER_PREFIX, STAT_PREFIX
from plimsoll.gateway.envoy.overload import HEAP
from plimsoll.gateway.envoy.source_limits import SOURCE_STAT
from plimsoll.gateway.envoy.tracing import TRACES_CLUSTER
from plimsoll.gateway.gateway_limit import GatewayLimit

TIMEOUT_SECONDS = 5.0
STATE_TIMEOUT_SECONDS = 20.0  # 10,000 endpoints are some 30 MB of text
PIECE_BYTES = 1 << 14  # less than 1 ms of parsing
_FAILED_OPEN_STAT = f"http.{STAT_PREFIX}.ext_authz.failure_mode_allowed"
_ACTIVE_STAT = f"http.{STAT_PREFIX}.downstream_rq_active"
_CONNECTIONS_STAT = f"http.{STAT_PREFIX}.downstream_cx_active"
_JWKS_FAILURES_STAT = f"http.{STAT_PREFIX}.jwt_authn.jwks_fetch_failed"
_STATS = (
    rf"^(http\.{STAT_PREFIX}\.|overload\.|listener\.|{RATE_STAT}\.|connection_limit\.{SOURCE_STAT}\."
    rf"|cluster\.{TRACES_CLUSTER}\.upstream_rq_)"
)
_FAILED_EXPORTS = re.compile(
    rf"cluster\.{TRACES_CLUSTER}\.upstream_rq_(4xx|5xx|timeout|rx_reset|pending_(failure_eject|overflow))"
)
_LISTENER = r"listener\.(?!admin)[^_]*_\d+\."
_SILENT = re.compile(rf"{_LISTENER}downstream_pre_cx_active")


class EnvoyUnavailable(PlimsollError):
    """Envoy's admin socket does not respond."""


@dataclass
class EnvoyState:
    """Envoy's endpoints by address, over all clusters.

    `active` has the active requests of each endpoint, and `connect_failures` the failed connections of those that have
    any, which only grow. `unhealthy` are the ejected ones. `parse_seconds` is what it took to parse the state.
    """

    active: dict[str, int] = field(default_factory=dict)
    connect_failures: dict[str, int] = field(default_factory=dict)
    unhealthy: set[str] = field(default_factory=set)
    picker_healthy: bool = False
    parse_seconds: float = 0.0


@dataclass(frozen=True)
class EnvoyStats:
    """Envoy's statistics.

    `failed_open` are requests that bypassed the picker since Envoy's start, `active` those that run, `connections` the
    open ones, also those that have sent nothing yet. `heap_ratio` is the used share of the heap limit. Since Envoy's
    start, `jwks_failures` counts failed fetches of JWT keys, `reached` what each limit refused or ended, and
    `failed_exports` the batches of spans that the collector did not take.
    """

    failed_open: int
    active: int
    connections: int
    heap_ratio: float = 0.0
    jwks_failures: int = 0
    reached: Mapping[GatewayLimit, int] = field(default_factory=dict)
    failed_exports: int = 0


_LIMITS = tuple(
    (limit, re.compile(pattern))
    for limit, pattern in {
        GatewayLimit.BODY_BYTES_WITHOUT_PICKER: rf"{RATE_STAT}\.http_local_rate_limit\.rate_limited",
        GatewayLimit.CONNECTIONS: rf"{_LISTENER}downstream_global_cx_overflow",
        GatewayLimit.SOURCE_CONNECTIONS: rf"connection_limit\.{SOURCE_STAT}\.limited_connections",
        GatewayLimit.FIRST_BYTE_TIME: rf"{_LISTENER}downstream_(pre_cx_timeout|cx_transport_socket_connect_timeout)",
        GatewayLimit.HEADERS_TIME: rf"http\.{STAT_PREFIX}\.downstream_rq_header_timeout",
        GatewayLimit.BODY_TIME: rf"http\.{STAT_PREFIX}\.downstream_rq_timeout",
        GatewayLimit.HEAP_REQUESTS: rf"http\.{STAT_PREFIX}\.downstream_rq_overload_close",
        GatewayLimit.HEAP_CONNECTIONS: rf"{_LISTENER}downstream_cx_overload_reject",
        GatewayLimit.HEAP_STREAMS: r"overload\..*\.reset_high_memory_stream\.count",
    }.items()
)


def parse_stats(text: str) -> EnvoyStats:
    """Parses the response of `/stats`. What is not there is 0."""
    values = {
        name: int(value) for name, _, value in (line.partition(": ") for line in text.splitlines()) if value.isdigit()
    }
    reached = {
        limit: sum(value for name, value in values.items() if pattern.fullmatch(name)) for limit, pattern in _LIMITS
    }
    heap_percent = values.get(f"overload.{HEAP}.pressure", 0)
    failed_open, active, connections = (
        values.get(name, 0) for name in (_FAILED_OPEN_STAT, _ACTIVE_STAT, _CONNECTIONS_STAT)
    )
    connections += sum(value for name, value in values.items() if _SILENT.fullmatch(name))
    jwks_failures = values.get(_JWKS_FAILURES_STAT, 0)
    failed_exports = sum(value for name, value in values.items() if _FAILED_EXPORTS.fullmatch(name))
    return EnvoyStats(failed_open, active, connections, heap_percent / 100, jwks_failures, reached, failed_exports)


class EnvoyAdminClient:
    """Admin calls to one Envoy."""

    def __init__(self, socket: Path) -> None:
        self._socket = str(socket)

    async def state(self) -> EnvoyState:
        """Returns Envoy's state. Reads and parses it in pieces, so that the event loop is never blocked for long."""
        parser = ClustersParser()
        try:
            async with asyncio.timeout(STATE_TIMEOUT_SECONDS):
                async for piece in self._stream("GET", "/clusters"):
                    started_s = time.perf_counter()
                    parser.feed(piece)
                    parser.state.parse_seconds += time.perf_counter() - started_s
                    await asyncio.sleep(0)
        except (OSError, TimeoutError, ValueError, IndexError, asyncio.IncompleteReadError) as error:
            raise EnvoyUnavailable(f"GET /clusters: {cause_of(error)}") from error
        return parser.state

    async def stats(self) -> EnvoyStats:
        return parse_stats((await self._call("GET", f"/stats?usedonly&filter={_STATS}")).decode())

    async def ready(self) -> bool:
        """Whether Envoy runs and listens."""
        try:
            return (await self._call("GET", "/ready")).startswith(b"LIVE")
        except EnvoyUnavailable:
            return False

    async def fail_health(self) -> None:
        """Close the connection after each response (GOAWAY on HTTP/2). Envoy still accepts connections."""
        await self._call("POST", "/healthcheck/fail")

    async def pass_health(self) -> None:
        """Revert `fail_health`: keep connections open again."""
        await self._call("POST", "/healthcheck/ok")

    async def _call(self, method: str, path: str) -> bytes:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                return b"".join([piece async for piece in self._stream(method, path)])
        except (OSError, TimeoutError, ValueError, IndexError, asyncio.IncompleteReadError) as error:
            raise EnvoyUnavailable(f"{method} {path}: {cause_of(error)}") from error

    async def _stream(self, method: str, path: str) -> AsyncIterator[bytes]:
        """Yields the body of the response in pieces of at most `PIECE_BYTES`."""
        reader, writer = await asyncio.open_unix_connection(self._socket, limit=PIECE_BYTES)
        try:
            writer.write(f"{method} {path} HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            status = int(head.split(b" ", 2)[1])
            if status not in (200, 503):  # /ready returns 503 if Envoy is not ready
                raise ValueError(f"status {status}")
            if b"transfer-encoding: chunked" in head:
                async for piece in _read_chunks(reader):
                    yield piece
            else:
                while piece := await reader.read(PIECE_BYTES):
                    yield piece
        finally:
            writer.close()


async def _read_chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while left := int(await reader.readline(), 16):
        while left:
            piece = await reader.read(min(left, PIECE_BYTES))
            if not piece:
                raise asyncio.IncompleteReadError(b"", left)
            left -= len(piece)
            yield piece
        await reader.readexactly(2)


_SERVICE_CLUSTERS = (PICK_CLUSTER_PREFIX.encode(), MODEL_CLUSTER_PREFIX.encode())
# Literal prefixes, which the engine of `re` searches fast: there are some 20 lines for each endpoint and cluster.
_ACTIVE = re.compile(rb"::rq_active::(\d+)")
_FAILURES = re.compile(rb"::cx_connect_fail::([1-9]\d*)")
_UNHEALTHY = re.compile(rb"::health_flags::/")
_PICKER_HEALTH = re.compile(rb"picker::[^\n]*::health_flags::(.*)")


class ClustersParser:
    """Parses the lines of `/clusters`, given in pieces. What is not an endpoint of a service is skipped."""

    def __init__(self) -> None:
        self.state = EnvoyState()
        self._partial_line = b""

    def feed(self, piece: bytes) -> None:
        whole, newline, self._partial_line = (self._partial_line + piece).rpartition(b"\n")
        lines, state = whole + newline, self.state
        active, failures = state.active, state.connect_failures
        for match in _ACTIVE.finditer(lines):
            if (address := _address(lines, match.start())) is not None:
                active[address] = active.get(address, 0) + int(match[1])
        for match in _FAILURES.finditer(lines):
            if (address := _address(lines, match.start())) is not None:
                failures[address] = failures.get(address, 0) + int(match[1])
        for match in _UNHEALTHY.finditer(lines):
            if (address := _address(lines, match.start())) is not None:
                state.unhealthy.add(address)
        for match in _PICKER_HEALTH.finditer(lines):
            if lines[match.start() - 1 : match.start()] in (b"", b"\n"):
                state.picker_healthy = match[1] == b"healthy"


def _address(lines: bytes, end: int) -> str | None:
    """Returns the address in the line whose part CLUSTER::ADDRESS ends at `end`, or None if it is of no service."""
    start = lines.rfind(b"\n", 0, end) + 1
    if not lines.startswith(_SERVICE_CLUSTERS, start):
        return None
    ipv6 = lines.rfind(b"[", start, end)
    return lines[lines.rfind(b"::", start, end) + 2 if ipv6 < 0 else ipv6 : end].decode()
