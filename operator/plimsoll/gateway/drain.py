"""The last phase of a gateway's shutdown: its clients move to another gateway, and its requests end.

Problem: the pod's address is in use for some time after another gateway is ready. Nodes learn of the change late, and
clients keep connections. A request on a connection that Envoy closes at this moment is lost.

Idea: Envoy accepts requests until they stop arriving. Each response closes its connection (HTTP/1.1 `Connection:
close`, HTTP/2 GOAWAY), so that the client's next request goes elsewhere. A connection without requests cannot be closed
safely in HTTP/1.1. It is left open for longer than clients keep idle connections.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from plimsoll.gateway.envoy.admin import EnvoyAdminClient
from plimsoll.gateway.settings import PickerSettings

POLL_SECONDS = 0.2


async def drain(
    admin: EnvoyAdminClient, last_request_s: Callable[[], float], settings: PickerSettings, deadline_s: float
) -> None:
    """Drain Envoy until nothing is left, or until `deadline_s` (monotonic seconds).

    `last_request_s` returns the monotonic time of the last request. The drain ends after `drain_quiet_seconds` without
    an active or a new request, or after `drain_idle_seconds` while connections are open. Raises EnvoyUnavailable.
    """
    await admin.fail_health()
    busy_s = time.monotonic()
    while (now_s := time.monotonic()) < deadline_s:
        stats = await admin.stats()
        busy_s = max(busy_s, last_request_s(), now_s if stats.active else busy_s)
        quiet_s = settings.drain_idle_seconds if stats.connections else settings.drain_quiet_seconds
        if now_s - busy_s >= quiet_s:
            return
        await asyncio.sleep(POLL_SECONDS)
