"""The operator process: wait for the lease, then watch, reconcile and scale until it is lost or the end comes.

A standby serves its probes and is ready, so that a rollout can finish; only the holder of the lease watches and
writes. Losing the lease ends the process: what it knew may be old, and a fresh one starts from the API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp

from plimsoll.adapters import pods
from plimsoll.adapters.kube import (
    CONTROLLERREVISIONS,
    DEPLOYMENTS,
    INFERENCESERVICES,
    NETWORKPOLICIES,
    PODDISRUPTIONBUDGETS,
    PODS,
    SERVICEACCOUNTS,
    SERVICES,
    Kube,
    LeaseTimes,
    Resource,
    WatchEvent,
    lead,
)
from plimsoll.api import labels
from plimsoll.controllers import handlers, probes
from plimsoll.controllers.autoscale import Autoscaler, Sources
from plimsoll.controllers.endings import Endings
from plimsoll.controllers.engines import Engines
from plimsoll.controllers.gateways import Gateways
from plimsoll.controllers.isolation import ObjectErrors, Stage, subject_of, supervise
from plimsoll.controllers.observe import rivals
from plimsoll.controllers.reconcile import Reconciler
from plimsoll.controllers.report import Report
from plimsoll.controllers.secondhand import SecondHand
from plimsoll.controllers.settings import Settings
from plimsoll.controllers.store import Key, Store, key_of, service_of
from plimsoll.controllers.workqueue import WorkQueue
from plimsoll.core.errors import ClusterError, NotFound
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import EngineReading
from plimsoll.telemetry import metrics

if TYPE_CHECKING:
    from plimsoll.adapters.prometheus import Prometheus

log = logging.getLogger(__name__)

LEASE = "plimsoll-operator"
SETTLED_SECONDS = 30.0  # kopf has made its first list
GONE_SECONDS = 300.0  # between two looks at whether a service went unseen
REST_PER_TICK = 3.0  # a tick of a very large fleet takes its time: the watches and the lease must have theirs
WATCHED = (
    (DEPLOYMENTS, labels.MANAGED_BY + "=plimsoll," + labels.SERVICE),
    (SERVICES, labels.MANAGED_BY + "=plimsoll," + labels.SERVICE),
    (SERVICEACCOUNTS, labels.MANAGED_BY + "=plimsoll," + labels.SERVICE),
    (PODDISRUPTIONBUDGETS, labels.MANAGED_BY + "=plimsoll," + labels.SERVICE),
    (NETWORKPOLICIES, labels.MANAGED_BY + "=plimsoll," + labels.SERVICE),
    (CONTROLLERREVISIONS, labels.MANAGED_BY + "=plimsoll," + labels.SERVICE),
    (PODS, labels.ROLE),
)


class _Stopped(Exception):
    """kopf was told to end (it takes over SIGTERM while it runs), so all the rest ends too."""


class Operator:
    """The parts, wired."""

    def __init__(self, kube: Kube, settings: Settings, session: aiohttp.ClientSession) -> None:
        self._kube = kube
        self._settings = settings
        self._namespaces = settings.platform.watch_namespaces
        self._synced: set[tuple[str, str | None]] = set()
        self.queue: WorkQueue[Key] = WorkQueue(self._reconcile)
        self.errors = ObjectErrors(self.queue.add)
        self.store = Store(self.queue.add)
        ask = partial(pods.get, session)
        self.gateways = Gateways(kube, settings.platform.gateway, ask, self._routability_changed, errors=self.errors)
        self.engines = Engines(self.store, ask, self._engine_heard, errors=self.errors)
        self.endings = Endings(self.store, self.errors)
        self.reconciler = Reconciler(
            kube,
            self.store,
            settings.platform,
            lambda: self.gateways.view,
            self._report,
            self.endings,
            settings.identity,
            self.errors,
            self.queue.add_later,
        )
        store = _prometheus(settings.prometheus_url)
        self.second_hand = SecondHand(store, self.engines.unheard, self.engines.take)
        sources = Sources(
            self.gateways.readings,
            self.engines.about,
            self.engines.start,
            self.engines.running,
            self.engines.stir,
            store,
            self.second_hand.tiers,
        )
        tell = self.reconciler.tell
        self.autoscaler = Autoscaler(self.store, kube, sources, tell, self.queue.add, errors=self.errors)

    async def run(self) -> None:
        """Until SIGTERM or cancellation. A part that fails is started again; the others go on meanwhile."""
        await self._list_services()
        try:
            async with asyncio.TaskGroup() as group:
                for name, work in self._parts():
                    group.create_task(supervise(name, work, self.errors))
                group.create_task(self._watch_until_stopped())
        except* _Stopped:
            log.info("told to end")

    async def _list_services(self) -> None:
        """Know every service before the first round: kopf does not say when its own list is complete, and who owns
        a model name depends on all of them."""
        for namespace in self._namespaces or (None,):
            with contextlib.suppress(NotFound):  # the definition may come later
                items, _ = await self._kube.list(INFERENCESERVICES, namespace)
                self.store.replace(labels.KIND, tuple(items), namespace)

    def _parts(self) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """What runs all the time, but for the watch of services, by name."""
        for namespace in self._namespaces or (None,):
            for resource, selector in WATCHED:
                yield f"watch of {resource.plural}", partial(self._follow, resource, selector, namespace)
        yield "list of services", self._forget_gone_for_ever
        yield "gateways", self.gateways.run
        yield "engines", self.engines.run
        yield "metrics store", self.second_hand.run
        yield "work queue", self.queue.run
        yield "scaling", self._tick_for_ever

    async def _watch_until_stopped(self) -> None:
        """kopf takes over SIGTERM, so that its return is the end of the process."""
        watch = partial(handlers.watch_services, self._contained_change, self._namespaces)
        await supervise("watch of services", watch, self.errors)
        raise _Stopped

    def _contained_change(self, obj: dict[str, Any], gone: bool) -> None:
        with self.errors.contained(Stage.WATCH, service_of(obj), subject_of(obj)):
            self._service_changed(obj, gone)

    def _service_changed(self, obj: dict[str, Any], gone: bool) -> None:
        before = self.store.get(labels.KIND, key_of(obj))
        if gone:
            self.store.drop(obj)
        else:
            self.store.put(obj)
        for key in rivals(self.store, before, None if gone else obj):
            self.queue.add(key)

    async def _forget_gone_for_ever(self) -> None:
        pause_s = SETTLED_SECONDS
        while True:
            await asyncio.sleep(pause_s)
            await self.forget_gone()
            pause_s = GONE_SECONDS

    async def forget_gone(self) -> None:
        """Forget services that were deleted before kopf's first list, or between two of its lists: it tells nobody, and
        whatever was made for such a service anew would be removed, and made, for ever."""
        for namespace in self._namespaces or (None,):
            known = [one for one in self.store.all(labels.KIND) if namespace in (None, key_of(one)[0])]
            try:
                items, _ = await self._kube.list(INFERENCESERVICES, namespace)
            except ClusterError as error:
                log.debug("services cannot be listed", extra={"error": str(error)})
                continue
            there = {item["metadata"]["uid"] for item in items}
            for gone in (one for one in known if one["metadata"]["uid"] not in there):
                self._service_changed(gone, gone=True)

    @property
    def synced(self) -> bool:
        """True once every watch has told what there is and the gateways have spoken: before, absent is unknown."""
        return self.gateways.synced and len(self._synced) == len(WATCHED) * max(1, len(self._namespaces))

    async def _follow(self, resource: Resource, selector: str, namespace: str | None) -> None:
        async for event in self._kube.watch(resource, namespace, selector):
            with self.errors.contained(Stage.WATCH, None, subject_of(event.object)):
                self._take(resource, namespace, event)

    def _take(self, resource: Resource, namespace: str | None, event: WatchEvent) -> None:
        match event.type:
            case "SYNC":
                self.store.replace(resource.kind, event.objects, namespace)
                self._synced.add((resource.plural, namespace))
            case "DELETED":
                self.store.drop(event.object)
            case _:
                self.store.put(event.object)
        if resource is PODS:
            self.endings.hear(event)

    async def _reconcile(self, key: Key) -> None:
        if not self.synced:
            self.queue.add_later(key, 0.2)
            return
        await self.reconciler.reconcile(key)

    async def _tick_for_ever(self) -> None:
        """After each round of the gateways: at times of its own a tick would decide by words that are a second old."""
        while True:
            took_s = await self.autoscaler.tick(time.time()) if self.synced else 0.0
            await asyncio.sleep(REST_PER_TICK * took_s)
            await self.gateways.asked()

    def _engine_heard(self, key: Key, role: Role, reading: EngineReading) -> None:
        self.autoscaler.hear_engine(key, role, reading)

    def _report(self, key: Key) -> Report | None:
        return self.autoscaler.report(key)

    def _routability_changed(self, key: Key | None) -> None:
        if key is not None:
            self.queue.add(key)
            return
        for raw in self.store.all(labels.KIND):
            self.queue.add(key_of(raw))


def _prometheus(url: str) -> Prometheus | None:
    """Its library takes memory that most installations need not have: it is loaded where it is used."""
    if not url:
        return None
    from plimsoll.adapters.prometheus import Prometheus

    return Prometheus(url)


async def run(settings: Settings) -> None:
    """The whole process, until SIGTERM or the loss of the lease."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    answers = probes.Answers()
    runner = await probes.serve(settings.probe_port, settings.metrics_port, answers)
    kube = await Kube.connect()
    try:
        async with aiohttp.ClientSession() as session:
            await _until(ended, lambda: _lead(kube, settings, session, answers))
    finally:
        await kube.close()
        await runner.cleanup()


async def _lead(kube: Kube, settings: Settings, session: aiohttp.ClientSession, answers: probes.Answers) -> None:
    async def work() -> None:
        log.info("leading", extra={"identity": settings.identity})
        with metrics.OPERATOR_LEADING.track_inprogress():
            operator = Operator(kube, settings, session)
            answers.explain = operator.autoscaler.explain
            await operator.run()

    await lead(kube, settings.namespace, LEASE, settings.identity, work, LeaseTimes())
    log.warning("no longer leading")


async def _until(ended: asyncio.Event, work: Callable[[], Awaitable[None]]) -> None:
    """Run `work` until it returns or the end is asked for."""
    working = asyncio.ensure_future(work())
    waiting = asyncio.ensure_future(ended.wait())
    await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not working.done():
        working.cancel()
    try:
        await working
    except asyncio.CancelledError:
        log.info("ended")
