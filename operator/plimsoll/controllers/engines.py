"""What the engines say: their metrics every few seconds, and what they are.

Problem: hundreds of pods come, start, idle and go. Asking all of them at once is a spike, asking an idle fleet often is
waste, and asking a busy one seldom leaves a scaling decision without its eyes.

Idea: every pod has a time of its own at which it is asked next, spread over the interval. A tier in which something
runs is asked often, an idle one seldom, yet so that one missed answer does not make its last word too old to be
trusted (`signals.intervals.GAP_S`). A pod that does not answer is asked once more at once, then at its usual time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import zlib
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from plimsoll.adapters import about as launcher
from plimsoll.adapters.about import Start
from plimsoll.adapters.scrape import Ask, fetch
from plimsoll.api import labels
from plimsoll.api.contract import contract
from plimsoll.controllers import starts
from plimsoll.controllers.isolation import ObjectErrors, Stage, subject_of
from plimsoll.controllers.store import Key, Store, service_of
from plimsoll.core.errors import Unavailable
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import About, EngineReading

log = logging.getLogger(__name__)

Object = dict[str, Any]
Heard = Callable[[Key, Role, EngineReading], None]
Parse = Callable[[bytes], tuple[About, Start]]

BUSY_S: Final = 5.0
IDLE_S: Final = 10.0
RETRY_S: Final = 1.0
ABOUT_S: Final = 5.0
SELDOM_S: Final = 60.0  # a ready engine that says nothing of itself, as a foreign one, is asked again so often
AT_ONCE: Final = 32
_LOOK_S: Final = 1.0  # between two looks at which pods there are
_SHORTEST_S: Final = 0.05
_ROLES: Final = frozenset(Role)


@dataclass(eq=False)
class _Pod:
    """One engine pod. metrics_s, about_s: when it is asked for them next, by the monotonic clock; never, if inf."""

    uid: str
    name: str
    key: Key
    role: Role
    address: str
    ready: bool
    metrics_s: float = math.inf
    about_s: float = math.inf
    steps: float | None = None
    running: float | None = None  # and waiting, when it last told
    failures: int = 0  # in a row, of its metrics
    scraped_s: float = -math.inf  # of the last word of it that came from somebody else
    silences: int = 0  # in a row, of what it is
    about: About | None = None
    start: Start | None = None


class Engines:
    """Asks every engine pod of the store."""

    def __init__(
        self,
        store: Store,
        ask: Ask,
        heard: Heard,
        parse: Parse = launcher.parse,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        errors: ObjectErrors | None = None,
    ) -> None:
        """ask: what a pod answers at an address, a port and a path, or Unavailable. heard: called with every reading,
        its service and tier. parse: reads /about, or raises ValueError. clock: seconds since the epoch, for the
        readings; who is asked when goes by `monotonic`."""
        self._errors = errors or ObjectErrors()
        self._store = store
        self._ask_pod = ask
        self._heard = heard
        self._parse = parse
        self._clock = clock
        self._monotonic = monotonic
        self._pods: dict[str, _Pod] = {}  # by uid
        self._names: dict[str, _Pod] = {}
        self._busy: defaultdict[tuple[Key, Role], set[str]] = defaultdict(set)  # pods that had something to do
        self._stirred: dict[Key, float] = {}
        self._looked_s = -math.inf
        self._slots = asyncio.Semaphore(AT_ONCE)

    def about(self, pod: str) -> About | None:
        """What the engine in a pod is, by the pod's name; None until it has said so."""
        known = self._names.get(pod)
        return None if known is None else known.about

    def start(self, pod: str) -> Start | None:
        """How far the engine's start had come when it last said so."""
        known = self._names.get(pod)
        return None if known is None else known.start

    def running(self, pod: str) -> float | None:
        """Requests that the engine in a pod last told of, waiting ones included."""
        known = self._names.get(pod)
        return None if known is None else known.running

    def unheard(self) -> dict[str, tuple[Key, Role]]:
        """Ready engines that have not answered twice, by their pods' names: their service and tier."""
        return {pod.name: (pod.key, pod.role) for pod in self._pods.values() if pod.ready and pod.failures > 1}

    def take(self, reading: EngineReading) -> None:
        """Somebody else's word of an engine that is not heard: as good as its own, where it is news."""
        pod = self._names.get(reading.pod)
        if pod is None or not pod.ready or pod.failures < 2 or reading.at_s <= pod.scraped_s:
            return
        pod.scraped_s = reading.at_s
        self._note(pod, reading, self._monotonic())
        self._heard(pod.key, pod.role, reading)

    def stir(self, service: Key) -> None:
        """Requests arrive for a service: its engines are soon busy, even if none was when last asked."""
        now_s = self._monotonic()
        if self._stirred.get(service, -math.inf) <= now_s:
            self._hurry(now_s, [pod for pod in self._pods.values() if pod.key == service])
        self._stirred[service] = now_s + IDLE_S

    async def run(self) -> None:
        """Ask until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self.ask())
                await asyncio.sleep(0.0)  # so that whoever is asked now is not due any more
                await asyncio.sleep(self._pause_s())

    async def ask(self) -> None:
        """Ask everybody whose time has come, and wait for the answers."""
        now_s = self._monotonic()
        if now_s - self._looked_s >= _LOOK_S:
            self._look(now_s)
        jobs = []
        for pod in self._pods.values():
            if pod.metrics_s <= now_s:
                pod.metrics_s = math.inf
                jobs.append(self._contained(Stage.ENGINE_METRICS, pod, self._ask_metrics(pod)))
            if pod.about_s <= now_s:
                pod.about_s = math.inf
                jobs.append(self._contained(Stage.ENGINE_ABOUT, pod, self._ask_about(pod)))
        await asyncio.gather(*jobs)

    async def _contained(self, stage: Stage, pod: _Pod, asking: Awaitable[None]) -> None:
        """Ask one pod. After an error it is asked again, like one that says nothing."""
        with self._errors.contained(stage, pod.key, _subject(pod)):
            await asking
            return
        due_s = self._monotonic() + SELDOM_S
        if stage is Stage.ENGINE_ABOUT:
            pod.about_s = min(pod.about_s, due_s)
        elif pod.ready:
            pod.metrics_s = min(pod.metrics_s, due_s)

    def _pause_s(self) -> float:
        due_s = min((min(pod.metrics_s, pod.about_s) for pod in self._pods.values()), default=math.inf)
        return min(max(due_s - self._monotonic(), _SHORTEST_S), _LOOK_S)

    def _look(self, now_s: float) -> None:
        """Meet new pods, follow the known ones, forget those that are gone."""
        self._looked_s = now_s
        present = self._present()
        for uid in self._pods.keys() - present.keys():
            gone = self._pods.pop(uid)
            self._calm(gone)
        for uid, pod in present.items():
            self._follow(self._pods.setdefault(uid, pod), pod, now_s)
        self._names = {pod.name: pod for pod in self._pods.values()}
        self._stirred = {key: until_s for key, until_s in self._stirred.items() if until_s > now_s}

    def _present(self) -> dict[str, _Pod]:
        """The engine pods that can be asked, by uid. One that cannot be read now stays as it was."""
        found: dict[str, _Pod] = {}
        every = list(self._store.all("Pod"))
        for obj in every:
            uid = obj["metadata"]["uid"]
            known = self._pods.get(uid)
            pod = None if known is None else replace(known)
            with self._errors.contained(Stage.ENGINE_LIST, service_of(obj), subject_of(obj)):
                pod = _pod(obj)
            if pod is not None:
                found[uid] = pod
        if self._errors.present:
            subjects = {subject_of(obj) for obj in every}
            for stage in (Stage.ENGINE_LIST, Stage.ENGINE_METRICS, Stage.ENGINE_ABOUT):
                self._errors.retain(stage, subjects)
        return found

    def _follow(self, known: _Pod, seen: _Pod, now_s: float) -> None:
        known.address = seen.address
        if known is seen:  # new: not all new pods at once, as after a restart of ours
            spread = zlib.crc32(known.uid.encode()) / 2**32
            known.about_s = now_s + ABOUT_S * spread
            known.metrics_s = now_s + BUSY_S * spread if known.ready else math.inf
        elif seen.ready and not known.ready:  # its start is over, so that what it says of itself is now whole
            known.metrics_s = known.about_s = now_s
            known.silences = 0
        elif known.ready and not seen.ready:
            known.metrics_s, known.about_s = math.inf, now_s + ABOUT_S
            known.start = known.running = None  # those of a container which may have ended
            self._calm(known)
        known.ready = seen.ready

    async def _ask_metrics(self, pod: _Pod) -> None:
        async with self._slots:
            asked_s = self._monotonic()
            try:
                reading = await fetch(
                    self._ask_pod, pod.address, _port(), contract().paths["metrics"], pod.name, self._clock
                )
            except Unavailable as error:
                pod.failures += 1
                log.debug("engine does not answer", extra={"pod": pod.name, "error": str(error)})
                reading = None
        if self._pods.get(pod.uid) is not pod or not pod.ready:
            return
        if reading is None:
            pod.metrics_s = asked_s + (RETRY_S if pod.failures == 1 else self._interval_s(pod, asked_s))
            return
        pod.failures = 0
        self._note(pod, reading, asked_s)
        pod.metrics_s = asked_s + self._interval_s(pod, asked_s)
        self._heard(pod.key, pod.role, reading)

    def _note(self, pod: _Pod, reading: EngineReading, now_s: float) -> None:
        """Whether the engine has had something to do since it was last asked."""
        stepped = pod.steps is not None and reading.steps is not None and reading.steps != pod.steps
        pod.steps = reading.steps
        pod.running = None if reading.running is None else reading.running + (reading.waiting or 0.0)
        if not (reading.running or reading.waiting or stepped):
            self._calm(pod)
            return
        tier = self._busy[pod.key, pod.role]
        if not tier:
            self._hurry(now_s, [p for p in self._pods.values() if (p.key, p.role) == (pod.key, pod.role)])
        tier.add(pod.uid)

    def _calm(self, pod: _Pod) -> None:
        tier = self._busy.get((pod.key, pod.role), set())
        tier.discard(pod.uid)
        if not tier:
            self._busy.pop((pod.key, pod.role), None)

    def _hurry(self, now_s: float, pods: list[_Pod]) -> None:
        """Bring forward what an idle interval has put off; a pod that is being asked now is left alone."""
        for pod in pods:
            if pod.metrics_s < math.inf:
                pod.metrics_s = min(pod.metrics_s, max(now_s, pod.metrics_s - (IDLE_S - BUSY_S)))

    def _interval_s(self, pod: _Pod, now_s: float) -> float:
        busy = (pod.key, pod.role) in self._busy or self._stirred.get(pod.key, -math.inf) > now_s
        return BUSY_S if busy else IDLE_S

    async def _ask_about(self, pod: _Pod) -> None:
        was_ready = pod.ready
        async with self._slots:
            asked_s = self._monotonic()
            try:
                body = await self._ask_pod(pod.address, _port(), contract().paths["about"])
                pod.about, pod.start = self._parse(body)
            except (Unavailable, ValueError) as error:
                pod.silences += 1
                log.debug("engine says nothing of itself", extra={"pod": pod.name, "error": str(error)})
            else:
                pod.silences = 0
        if pod.about_s < math.inf:  # it has become ready, or ceased to be, since it was asked
            return
        if pod.silences or not pod.ready or not was_ready:
            pod.about_s = asked_s + (SELDOM_S if pod.ready and pod.silences > 2 else ABOUT_S)


def _subject(pod: _Pod) -> str:
    return f"Pod {pod.key[0]}/{pod.name}"


def _port() -> int:
    return contract().ports["launcher"]


def _pod(obj: Object) -> _Pod | None:
    """An engine pod that can be asked; None for any other."""
    meta, key = obj["metadata"], service_of(obj)
    role, address = (meta.get("labels") or {}).get(labels.ROLE), obj.get("status", {}).get("podIP")
    if key is None or role not in _ROLES or not address or starts.is_leaving(obj):
        return None
    return _Pod(meta["uid"], meta["name"], key, Role(role), address, starts.is_ready(obj))
