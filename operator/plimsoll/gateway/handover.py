"""The last engine of a tier leaves only when another one is ready.

Problem: a pod that is deleted, evicted or on a drained node ends long before its replacement is ready, which takes
minutes. With one engine, nobody serves meanwhile.

Idea: the launcher of a leaving engine takes requests until it is quiet (`launcher.drain`). A gateway without another
engine of the role keeps on using it, and says so twice a second, so that an engine with few requests stays too. An
engine that refuses, as one of an earlier image does, is used no more. If the replacement waits for room in the
cluster, it may be this engine's: then it is left alone, and ends. So is an engine of several pods, whose replacement
has its name and starts only afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import aiohttp

from plimsoll.adapters.normalize import value_at
from plimsoll.api.contract import engine_contract
from plimsoll.core.routing.endpoint import Endpoint, Leaving
from plimsoll.core.types import Role

PERIOD_SECONDS: Final = 0.5
TIMEOUT_SECONDS: Final = 2.0

log = logging.getLogger(__name__)

Object = Mapping[str, Any]


def wanted_roles(service: Object) -> Callable[[Role], bool]:
    """Whether a role is to have replicas, by the operator's status; true if it does not say so."""
    tiers = value_at(service, "status", "tiers")
    return lambda role: not str(value_at(tiers, role, "summary") or "").endswith("/0")


def keep_last(
    endpoints: Iterable[Endpoint], unplaced: Collection[Role], is_wanted: Callable[[Role], bool] = lambda role: True
) -> tuple[Endpoint, ...]:
    """Returns the endpoints of a service; leaving ones that are ready are `last` where no other has their role.

    unplaced: roles whose replacement waits for room. A prefill engine is kept only for a decode engine of its revision.
    """
    known = tuple(endpoints)
    served = {_place(e.role) for e in known if e.available}
    waiting = {_place(role) for role in unplaced}

    def is_last(endpoint: Endpoint) -> bool:
        place = _place(endpoint.role)
        if not (endpoint.ready and endpoint.leaving.hands_over) or place in served or not is_wanted(endpoint.role):
            return False
        return place not in waiting or endpoint.leaving is Leaving.HANDS_OVER_ON_DRAINED_NODE

    marked = tuple(replace(e, last=True) if is_last(e) else e for e in known)
    revisions = {e.revision for e in marked if e.available and e.role is Role.DECODE}
    return tuple(
        replace(e, last=False) if e.last and e.role is Role.PREFILL and e.revision not in revisions else e
        for e in marked
    )


def _place(role: Role) -> Role:
    """Roles that take the same requests: those of clients, or those of decode engines."""
    return Role.PREFILL if role is Role.PREFILL else Role.SERVE


class Handover:
    """Tells leaving engines that this gateway has no other, each in a task of its own."""

    def __init__(
        self,
        endpoints: Callable[[], Iterable[Endpoint]],
        on_refused: Callable[[str], None],
        tls_context: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        """on_refused: called with the address of an engine that takes no requests any more.

        tls_context: of a client that engines with TLS accept.
        """
        self._tls_context = tls_context
        self._endpoints = endpoints
        self._on_refused = on_refused
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by address; as many as there are last engines

    async def run(self) -> None:
        """Tell them twice a second. Never returns."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            try:
                while True:
                    for last in [e for e in self._endpoints() if e.last and e.address not in self._tasks]:
                        self._tasks[last.address] = asyncio.create_task(self._tell(session, last))
                    await asyncio.sleep(PERIOD_SECONDS)
            finally:
                for task in self._tasks.values():
                    task.cancel()

    async def _tell(self, session: aiohttp.ClientSession, endpoint: Endpoint) -> None:
        """Tell one engine, whatever it answers."""
        address, tls = endpoint.address, dict[str, Any]()
        if endpoint.tls_name and (context := self._tls_context()) is not None:
            tls = {"ssl": context, "server_hostname": endpoint.tls_name}
        try:
            url = f"{'https' if tls else 'http'}://{address}{engine_contract().paths['handover']}"
            async with session.post(url, allow_redirects=False, **tls) as response:
                if response.status != 200:
                    self._on_refused(address)
        except (aiohttp.ClientError, TimeoutError):
            pass  # it may be busy, or gone: requests and the watch of slices tell
        except Exception:  # the boundary to an engine: it ends no gateway
            log.exception("cannot tell an engine that it is the last")
        finally:
            del self._tasks[address]
