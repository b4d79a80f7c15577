"""The last engine of a tier leaves only when another one is ready.

Problem: a pod that is deleted, evicted or on a drained node ends long before its replacement is ready, which takes
minutes. With one engine, nobody serves meanwhile.

Idea: a leaving engine stays ready while it gets requests (`launcher.drain`). A gateway without another engine of the
role keeps on using it, and says so every second, so that an engine with few requests stays too. If the replacement
waits for room in the cluster, it may be this engine's: then it is left alone, and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import aiohttp

from plimsoll.api.contract import engine_contract
from plimsoll.core.routing.endpoint import Endpoint
from plimsoll.core.types import Role

PERIOD_SECONDS: Final = 1.0
TIMEOUT_SECONDS: Final = 1.0
MAX_CONNECTIONS: Final = 16


def is_unplaced(pod: Mapping[str, Any]) -> bool:
    """Whether the scheduler has found no node for a pod that is to stay."""
    if pod["metadata"].get("deletionTimestamp"):
        return False
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(one.get("type") == "PodScheduled" and one.get("status") == "False" for one in conditions)


def keep_last(endpoints: Iterable[Endpoint], unplaced_roles: Collection[Role]) -> tuple[Endpoint, ...]:
    """Returns the endpoints of a service; leaving ones that are ready are `last` where no other has their role.

    unplaced_roles: roles whose replacement waits for room.
    """
    known = tuple(endpoints)
    served = {e.role for e in known if e.available} | set(unplaced_roles)
    return tuple(replace(e, last=True) if e.ready and e.terminating and e.role not in served else e for e in known)


class Handover:
    """Tells leaving engines that this gateway has no other."""

    def __init__(self, endpoints: Callable[[], Iterable[Endpoint]]) -> None:
        self._endpoints = endpoints

    async def run(self) -> None:
        """Tell them every second. Never returns."""
        path = engine_contract().paths["handover"]
        connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            while True:
                await asyncio.sleep(PERIOD_SECONDS)
                addresses = [e.address for e in self._endpoints() if e.last]
                await asyncio.gather(*(_tell(session, f"http://{address}{path}") for address in addresses))


async def _tell(session: aiohttp.ClientSession, url: str) -> None:
    """An engine without launcher answers 404, and one that has ended not at all: both need not be told."""
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with session.post(url):
            pass
