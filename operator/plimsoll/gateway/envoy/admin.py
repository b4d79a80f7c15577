"""A client of Envoy's admin interface on its unix socket: endpoint state, statistics, and health for draining.

Each call opens one connection. A missing socket or an invalid response raises `EnvoyUnavailable`. Envoy may start after
the picker and may restart alone.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from plimsoll.core.errors import PlimsollError
from plimsoll.gateway.envoy.listener import STAT_PREFIX
from plimsoll.gateway.envoy.xds import MODEL_CLUSTER_PREFIX, PICK_CLUSTER_PREFIX

TIMEOUT_SECONDS = 5.0
_FAILED_OPEN_STAT = f"http.{STAT_PREFIX}.ext_authz.failure_mode_allowed"
_ACTIVE_STAT = f"http.{STAT_PREFIX}.downstream_rq_active"
_CONNECTIONS_STAT = f"http.{STAT_PREFIX}.downstream_cx_active"


class EnvoyUnavailable(PlimsollError):
    """Envoy's admin socket does not respond."""


@dataclass(frozen=True)
class EnvoyHost:
    """One endpoint as Envoy reports it, over all its clusters. `connect_failures` only grows."""

    healthy: bool
    active: int
    connect_failures: int


@dataclass(frozen=True)
class EnvoyState:
    """Envoy's state: hosts by address for each service key, cluster names, and whether the picker is healthy."""

    hosts: dict[str, dict[str, EnvoyHost]]
    clusters: frozenset[str]
    picker_healthy: bool


@dataclass(frozen=True)
class EnvoyStats:
    """Envoy's counters: requests that bypassed the picker since Envoy's start, active requests, open connections."""

    failed_open: int
    active: int
    connections: int


class EnvoyAdminClient:
    """Admin calls to one Envoy."""

    def __init__(self, socket: Path) -> None:
        self._socket = str(socket)

    async def state(self) -> EnvoyState:
        return parse_clusters(await self._call("GET", "/clusters?format=json"))

    async def stats(self) -> EnvoyStats:
        text = (await self._call("GET", "/stats?usedonly=false&filter=^http.gateway.")).decode()
        values = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
        names = (_FAILED_OPEN_STAT, _ACTIVE_STAT, _CONNECTIONS_STAT)
        return EnvoyStats(*(int(values.get(name, "0")) for name in names))

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
                return await self._send(method, path)
        except (OSError, TimeoutError, ValueError, IndexError, asyncio.IncompleteReadError) as error:
            raise EnvoyUnavailable(f"{method} {path}: {error or type(error).__name__}") from error

    async def _send(self, method: str, path: str) -> bytes:
        reader, writer = await asyncio.open_unix_connection(self._socket, limit=1 << 20)
        try:
            writer.write(f"{method} {path} HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            body = await _read_chunked(reader) if b"transfer-encoding: chunked" in head else await reader.read()
        finally:
            writer.close()
        status = int(head.split(b" ", 2)[1])
        if status not in (200, 503):  # /ready returns 503 if Envoy is not ready
            raise ValueError(f"status {status}")
        return body


async def _read_chunked(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    return bytes(body)


def parse_clusters(document: bytes) -> EnvoyState:
    """Parses the response of `/clusters?format=json`. Raises EnvoyUnavailable for anything else."""
    hosts: dict[str, dict[str, EnvoyHost]] = {}
    names: set[str] = set()
    picker_healthy = False
    try:
        for cluster in orjson.loads(document).get("cluster_statuses", ()):
            name, service = cluster["name"], cluster.get("eds_service_name")
            names.add(name)
            if name == "picker":
                picker_healthy = all(_healthy(status) for status in cluster.get("host_statuses", ()))
            if service and name.startswith((PICK_CLUSTER_PREFIX, MODEL_CLUSTER_PREFIX)):
                _merge(hosts.setdefault(service, {}), cluster.get("host_statuses", ()))
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise EnvoyUnavailable(f"cannot parse the response of /clusters: {error}") from error
    return EnvoyState(hosts, frozenset(names), picker_healthy)


def _healthy(status: dict[str, Any]) -> bool:
    health = status.get("health_status", {})
    return not health.get("failed_outlier_check") and not health.get("failed_active_health_check")


def _merge(hosts: dict[str, EnvoyHost], statuses: list[dict[str, Any]]) -> None:
    for status in statuses:
        socket_address = status["address"]["socket_address"]
        ip, port = socket_address["address"], socket_address["port_value"]
        address = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
        stats = {stat["name"]: int(stat.get("value", 0)) for stat in status.get("stats", ())}
        previous = hosts.get(address, EnvoyHost(True, 0, 0))
        hosts[address] = EnvoyHost(
            previous.healthy and _healthy(status),
            previous.active + stats.get("rq_active", 0),
            previous.connect_failures + stats.get("cx_connect_fail", 0),
        )
