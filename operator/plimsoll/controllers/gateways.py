"""What the gateway replicas say: which endpoints they can route to.

A service is ready when a client can reach it, and only a gateway knows that. Every replica is asked once a second;
a replica that does not answer keeps its last word for a few seconds, then counts as silent, never as "no endpoint".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from plimsoll.adapters.kube import PODS, Kube, WatchEvent
from plimsoll.controllers.store import Key
from plimsoll.resources.platform import GatewaySettings

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
TRUST_SECONDS = 5.0
ROUTABLE_ROLES = ("decode", "serve")


@dataclass(frozen=True)
class View:
    """The gateway's replicas together. present: replicas that exist; answering: those whose word is fresh."""

    present: int = 0
    answering: int = 0
    routable: Mapping[Key, int] = field(default_factory=dict)  # service -> endpoints that a replica can route to


@dataclass
class _Replica:
    address: str
    heard: float = float("-inf")
    routable: dict[Key, int] = field(default_factory=dict)


def routable(signals: Mapping[str, Any]) -> dict[Key, int]:
    """Endpoints that answer clients, by service, from one replica's /signals document."""
    found: dict[Key, int] = {}
    for name, service in signals.get("services", {}).items():
        count = sum(e["routable"] and e["role"] in ROUTABLE_ROLES for e in service["endpoints"])
        namespace, _, short = name.partition("/")
        found[namespace, short] = count
    return found


class Gateways:
    """Follows the gateway's pods and asks each of them."""

    def __init__(
        self, kube: Kube, settings: GatewaySettings, client: httpx.AsyncClient, changed: Callable[[Key | None], None]
    ) -> None:
        """changed: called with a service whose routability changed, or with None when any may have."""
        self._kube = kube
        self._settings = settings
        self._client = client
        self._changed = changed
        self._replicas: dict[str, _Replica] = {}
        self._asked = False  # since the pods were first known
        self._listed: float | None = None  # when the pods were first known
        self.view = View()

    @property
    def synced(self) -> bool:
        """True once every replica has spoken or had its time to: before that, silence says nothing."""
        if self._listed is None:
            return False
        heard = self._asked and all(r.heard > float("-inf") for r in self._replicas.values())
        return heard or asyncio.get_running_loop().time() - self._listed > TRUST_SECONDS

    async def run(self) -> None:
        """Follow and ask until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._ask_for_ever())

    async def _follow(self) -> None:
        selector = ",".join(f"{k}={v}" for k, v in sorted(self._settings.pod_selector.items()))
        async for event in self._kube.watch(PODS, self._settings.namespace, selector):
            self.saw(event)

    def saw(self, event: WatchEvent) -> None:
        """Take in one event of the watch of the gateway's pods."""
        if event.type == "SYNC":
            if self._listed is None:
                self._listed = asyncio.get_running_loop().time()
            present = {pod["metadata"]["uid"] for pod in event.objects}
            self._replicas = {uid: r for uid, r in self._replicas.items() if uid in present}
        for pod in event.objects or (event.object,):
            if pod:
                self._note(pod, gone=event.type == "DELETED")

    def _note(self, pod: Mapping[str, Any], *, gone: bool) -> None:
        uid, address = pod["metadata"]["uid"], pod.get("status", {}).get("podIP")
        if gone or pod.get("status", {}).get("phase") in ("Failed", "Succeeded"):
            self._replicas.pop(uid, None)
        elif address and uid not in self._replicas:
            self._replicas[uid] = _Replica(address)

    async def _ask_for_ever(self) -> None:
        while True:
            await self.ask()
            await asyncio.sleep(POLL_SECONDS)

    async def ask(self) -> None:
        """One round: every replica once, then the view and who must be told."""
        known = self._listed is not None
        await asyncio.gather(*(self._ask(replica) for replica in list(self._replicas.values())))
        self._asked = self._asked or known
        now = asyncio.get_running_loop().time()
        fresh = [r for r in self._replicas.values() if now - r.heard < TRUST_SECONDS]
        together: dict[Key, int] = {}
        for replica in fresh:
            for key, count in replica.routable.items():
                together[key] = max(count, together.get(key, 0))
        self._tell(View(len(self._replicas), len(fresh), together))

    def _tell(self, view: View) -> None:
        before, self.view = self.view, view
        if bool(before.answering) != bool(view.answering) or bool(before.present) != bool(view.present):
            self._changed(None)
            return
        for key in before.routable.keys() | view.routable.keys():
            if bool(before.routable.get(key)) != bool(view.routable.get(key)):
                self._changed(key)

    async def _ask(self, replica: _Replica) -> None:
        url = f"http://{replica.address}:{self._settings.picker_port}/signals"
        try:
            answer = await self._client.get(url, timeout=2.0)
            answer.raise_for_status()
            signals = answer.json()
            if not signals["synced"]:
                return
            replica.routable = routable(signals)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            log.debug("gateway replica did not answer", extra={"address": replica.address, "error": str(error)})
            return
        replica.heard = asyncio.get_running_loop().time()
