"""What the gateway replicas say: which endpoints they can route to, and what they counted.

A service is ready when a client can reach it, and only a gateway knows that; how much is asked of it, too. Every
replica is asked once a second; one that does not answer, or answers what cannot be, keeps its last word for a few
seconds, then counts as silent, never as "no endpoint" or "no demand". One that is slow is not waited for: what the
others say would be old by then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plimsoll.adapters.kube import PODS, Kube, WatchEvent
from plimsoll.adapters.signals import Heard, parse
from plimsoll.controllers.isolation import ObjectErrors, Stage, subject_of
from plimsoll.controllers.store import Key
from plimsoll.core.errors import Unavailable
from plimsoll.core.ports import GatewayReading
from plimsoll.resources.platform import GatewaySettings

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
PATIENCE_SECONDS = 0.5  # of a round, with those who are slow
TRUST_SECONDS = 5.0
MOST_WORDS = 300

_GARBLED = "what it says cannot be read (are operator and gateways of one release?)"
_UNSYNCED = (
    "it has not got the API server's objects yet: may it list and watch inferenceservices and pods"
    " (kubectl auth can-i)?"
)

Ask = Callable[[str, int, str], Awaitable[bytes]]  # a pod's address, port and path


@dataclass(frozen=True)
class View:
    """The gateway's replicas together. present: replicas that exist; answering: those whose word is fresh; why: what is
    wrong with what they say where none of them counts, "" where they say nothing. models: the names of a service that
    each of them answers to; a service is missing where none of them tells."""

    present: int = 0
    answering: int = 0
    routable: Mapping[Key, int] = field(default_factory=dict)  # service -> endpoints that a replica can route to
    why: str = ""
    models: Mapping[Key, frozenset[str]] = field(default_factory=dict)


@dataclass
class _Replica:
    """A pod and its last word. heard: when it came, by the monotonic clock. why: what came since was none, and why."""

    name: str
    address: str
    said: Heard | None = None
    heard: float = float("-inf")
    why: str = ""

    def fresh(self, now: float) -> Heard | None:
        return self.said if now - self.heard < TRUST_SECONDS else None


class Gateways:
    """Follows the gateway's pods and asks each of them."""

    def __init__(
        self,
        kube: Kube,
        settings: GatewaySettings,
        ask: Ask,
        changed: Callable[[Key | None], None],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        patience_s: float = PATIENCE_SECONDS,
        errors: ObjectErrors | None = None,
    ) -> None:
        """ask: what a pod answers, or Unavailable. changed: called with a service whose routability changed, or with
        None when any may have. clock: seconds since the epoch, for the readings; `monotonic` tells what is fresh."""
        self._errors = errors or ObjectErrors()
        self._kube = kube
        self._settings = settings
        self._page = ask
        self._changed = changed
        self._clock = clock
        self._monotonic = monotonic
        self._patience_s = patience_s
        self._replicas: dict[str, _Replica] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}  # by uid: those who have not answered yet
        self._round = asyncio.Event()  # set when the present round is over
        self._asked = False  # since the pods were first known
        self._listed: float | None = None  # when the pods were first known
        self.view = View()

    @property
    def synced(self) -> bool:
        """True once every replica has spoken or had its time to: before that, silence says nothing."""
        if self._listed is None:
            return False
        heard = self._asked and all(r.said for r in self._replicas.values())
        return heard or self._monotonic() - self._listed > TRUST_SECONDS

    def readings(self) -> tuple[tuple[GatewayReading, ...], tuple[str, ...]]:
        """What the replicas whose word is fresh counted, and the names of all replicas that exist."""
        now = self._monotonic()
        replicas = sorted(self._replicas.values(), key=lambda r: r.name)
        fresh = (replica.fresh(now) for replica in replicas)
        return tuple(said.reading for said in fresh if said), tuple(replica.name for replica in replicas)

    async def asked(self) -> None:
        """Wait for the end of a round: what the replicas say is then as new as it gets."""
        await self._round.wait()

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
                self._listed = self._monotonic()
            present = {pod["metadata"]["uid"] for pod in event.objects}
            self._replicas = {uid: r for uid, r in self._replicas.items() if uid in present}
        for pod in event.objects or (event.object,):
            if pod:
                with self._errors.contained(Stage.GATEWAY, None, subject_of(pod)):
                    self._note(pod, gone=event.type == "DELETED")

    def _note(self, pod: Mapping[str, Any], *, gone: bool) -> None:
        uid, address = pod["metadata"]["uid"], pod.get("status", {}).get("podIP")
        if gone or pod.get("status", {}).get("phase") in ("Failed", "Succeeded"):
            self._replicas.pop(uid, None)
        elif address:
            replica = self._replicas.setdefault(uid, _Replica(pod["metadata"]["name"], address))
            replica.address = address  # a pod whose sandbox died gets another one

    async def _ask_for_ever(self) -> None:
        try:
            while True:
                await self.ask()
                await asyncio.sleep(POLL_SECONDS)
        finally:
            for job in self._asking.values():
                job.cancel()
            self._asking.clear()

    async def ask(self) -> None:
        """One round: every replica that is not still being asked, then the view and who must be told."""
        known = self._listed is not None
        due = [(uid, replica) for uid, replica in self._replicas.items() if uid not in self._asking]
        jobs = {uid: asyncio.create_task(self._ask_contained(replica)) for uid, replica in due}
        self._asking |= jobs
        if jobs:
            await asyncio.wait(jobs.values(), timeout=self._patience_s)
        for uid in [uid for uid, job in self._asking.items() if job.done()]:
            del self._asking[uid]
        self._asked = self._asked or known
        now = self._monotonic()
        fresh = [said for r in self._replicas.values() if (said := r.fresh(now))]
        together: dict[Key, int] = {}
        for said in fresh:
            for key, count in said.routable.items():
                together[key] = max(count, together.get(key, 0))
        why = "" if fresh else next((r.why for r in self._replicas.values() if r.why), "")
        self._tell(View(len(self._replicas), len(fresh), together, why, _common([said.models for said in fresh])))
        over, self._round = self._round, asyncio.Event()
        over.set()

    def _tell(self, view: View) -> None:
        before, self.view = self.view, view
        now, then = ((bool(one.answering), bool(one.present), one.why) for one in (view, before))
        if now != then:
            self._changed(None)
            return
        for key in before.routable.keys() | view.routable.keys():
            was, is_now = (bool(one.routable.get(key)) for one in (before, view))
            if was != is_now or before.models.get(key) != view.models.get(key):
                self._changed(key)

    async def _ask_contained(self, replica: _Replica) -> None:
        with self._errors.contained(Stage.GATEWAY, None, f"Pod {self._settings.namespace}/{replica.name}"):
            await self._ask(replica)

    async def _ask(self, replica: _Replica) -> None:
        about = {"gateway": replica.name, "address": replica.address}
        try:
            document = await self._page(replica.address, self._settings.picker_port, "/signals")
            said = parse(document, replica.name, self._clock())
        except Unavailable as error:
            log.debug("gateway does not answer", extra={**about, "error": str(error)})
            replica.why = ""
            return
        except ValueError as error:
            log.log(
                logging.DEBUG if replica.why.startswith(_GARBLED) else logging.WARNING,
                "what a gateway says of its signals cannot be read",
                extra={**about, "error": str(error)},
            )
            replica.why = f"{_GARBLED}: {error}"[:MOST_WORDS]
            return
        replica.why = "" if said.synced else _UNSYNCED
        if said.synced:
            replica.said, replica.heard = said, self._monotonic()


def _common(told: list[Mapping[Key, frozenset[str]]]) -> dict[Key, frozenset[str]]:
    """The names of each service that all replicas answer to which tell of it; one that lacks the service has none."""
    tells = [models for models in told if models]
    keys = {key for models in tells for key in models}
    return {key: frozenset.intersection(*(models.get(key, frozenset()) for models in tells)) for key in keys}
