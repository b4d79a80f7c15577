"""Envoy's admin interface on its unix socket: what it sees of its endpoints, and the end of its life.

Each call is one connection; a socket that is not there, or an answer that is none, raises `EnvoyAway`: Envoy starts
after the picker as often as before it, and is restarted alone.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from plimsoll.core.errors import PlimsollError
from plimsoll.gateway.listener import STAT_PREFIX
from plimsoll.gateway.xds import MODEL, PICK

TIMEOUT_SECONDS = 5.0
_AUTHZ = f"http.{STAT_PREFIX}.ext_authz.failure_mode_allowed"
_ACTIVE = f"http.{STAT_PREFIX}.downstream_rq_active"


class EnvoyAway(PlimsollError):
    """Envoy's admin socket does not answer."""


@dataclass(frozen=True)
class Host:
    """One endpoint as Envoy sees it, over all clusters that hold it; connect_failures only ever grows."""

    healthy: bool
    active: int
    connect_failures: int


@dataclass(frozen=True)
class View:
    """Envoy's own state: hosts by address for each service key, its clusters, and whether it would ask the picker."""

    hosts: dict[str, dict[str, Host]]
    clusters: frozenset[str]
    picker_healthy: bool


@dataclass(frozen=True)
class Stats:
    """failed_open: requests let through without the picker, since Envoy's start. active: requests in progress."""

    failed_open: int
    active: int


class Admin:
    """Calls to one Envoy."""

    def __init__(self, socket: Path) -> None:
        self._socket = str(socket)

    async def view(self) -> View:
        return parse_clusters(await self._call("GET", "/clusters?format=json"))

    async def stats(self) -> Stats:
        text = (await self._call("GET", "/stats?usedonly=false&filter=^http.gateway.")).decode()
        values = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
        return Stats(int(values.get(_AUTHZ, "0")), int(values.get(_ACTIVE, "0")))

    async def ready(self) -> bool:
        """Is Envoy up and listening?"""
        try:
            return (await self._call("GET", "/ready")).startswith(b"LIVE")
        except EnvoyAway:
            return False

    async def fail_health(self) -> None:
        """From now on every answer closes its connection (or says GOAWAY); new ones are still taken."""
        await self._call("POST", "/healthcheck/fail")

    async def pass_health(self) -> None:
        """The end of `fail_health`: connections are kept again."""
        await self._call("POST", "/healthcheck/ok")

    async def _call(self, method: str, path: str) -> bytes:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                return await self._exchange(method, path)
        except (OSError, TimeoutError, ValueError, IndexError, asyncio.IncompleteReadError) as error:
            raise EnvoyAway(f"{method} {path}: {error or type(error).__name__}") from error

    async def _exchange(self, method: str, path: str) -> bytes:
        reader, writer = await asyncio.open_unix_connection(self._socket, limit=1 << 20)
        try:
            writer.write(f"{method} {path} HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            body = await _unchunked(reader) if b"transfer-encoding: chunked" in head else await reader.read()
        finally:
            writer.close()
        status = int(head.split(b" ", 2)[1])
        if status not in (200, 503):  # 503 is how /ready says that it is not
            raise ValueError(f"status {status}")
        return body


async def _unchunked(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    return bytes(body)


def parse_clusters(document: bytes) -> View:
    """`/clusters?format=json` by service. Raises EnvoyAway for anything else."""
    hosts: dict[str, dict[str, Host]] = {}
    names: set[str] = set()
    picker_healthy = False
    try:
        for cluster in orjson.loads(document).get("cluster_statuses", ()):
            name, service = cluster["name"], cluster.get("eds_service_name")
            names.add(name)
            if name == "picker":
                picker_healthy = all(_healthy(status) for status in cluster.get("host_statuses", ()))
            if service and name.startswith((PICK, MODEL)):
                _merge(hosts.setdefault(service, {}), cluster.get("host_statuses", ()))
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise EnvoyAway(f"unreadable /clusters: {error}") from error
    return View(hosts, frozenset(names), picker_healthy)


def _healthy(status: dict[str, Any]) -> bool:
    health = status.get("health_status", {})
    return not health.get("failed_outlier_check") and not health.get("failed_active_health_check")


def _merge(hosts: dict[str, Host], statuses: list[dict[str, Any]]) -> None:
    for status in statuses:
        where = status["address"]["socket_address"]
        ip, port = where["address"], where["port_value"]
        address = f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
        stats = {stat["name"]: int(stat.get("value", 0)) for stat in status.get("stats", ())}
        before = hosts.get(address, Host(True, 0, 0))
        hosts[address] = Host(
            before.healthy and _healthy(status),
            before.active + stats.get("rq_active", 0),
            before.connect_failures + stats.get("cx_connect_fail", 0),
        )
