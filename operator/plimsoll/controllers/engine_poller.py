"""Polls the engines: their metrics every few seconds, and their properties once.

Problem: hundreds of pods start, idle and end. Polling all of them at once causes load spikes, polling an idle fleet
often is waste, and polling a busy one too rarely delays scaling decisions.

Idea: every pod has its own due time, spread over the interval. A busy tier is polled often, an idle one rarely, but
often enough that one missed answer does not expire its last reading (`MAX_READING_GAP_S`). After a failed poll a pod
is retried once soon, and then at its usual interval. Pods whose last poll failed share a few slots of their own, and
all slots are fair: engines that never answer cost other services nothing. The polls that wait for a slot are bounded
for each namespace and node, because a poll that waits takes 8 KB.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import zlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from plimsoll.adapters import launcher, unlaunched_engine
from plimsoll.adapters.engine_metrics import HttpGet, fetch_page
from plimsoll.adapters.engine_of_pod import MetricsAddress
from plimsoll.adapters.launcher import AdapterReport, StartupProgress
from plimsoll.api.contract import engine_contract
from plimsoll.controllers.fair_slots import FairSlots, GroupBound
from plimsoll.controllers.isolation import ObjectErrors, Stage, subject_of
from plimsoll.controllers.object_cache import Key, ObjectCache, owning_service
from plimsoll.controllers.polled_pod import PolledPod, polled_pod
from plimsoll.core.errors import BackendUnavailable, UntrustedPeer
from plimsoll.core.ports import EngineInfo, EngineReading
from plimsoll.core.types import Role
from plimsoll.engines.engine import MetricMap
from plimsoll.resources.hardware import named_accelerator
from plimsoll.telemetry import operator_metrics
from plimsoll.telemetry.service_log import ServiceLog

log = ServiceLog(__name__)

OnReading = Callable[[Key, Role, EngineReading], None]
Poll = Callable[[], Coroutine[Any, Any, None]]
ParseEngineInfo = Callable[[bytes], tuple[EngineInfo, StartupProgress]]

BUSY_INTERVAL_S: Final = 5.0
IDLE_INTERVAL_S: Final = 10.0
RETRY_DELAY_S: Final = 1.0
ENGINE_INFO_INTERVAL_S: Final = 5.0
FOREIGN_ENGINE_INTERVAL_S: Final = 60.0  # for a ready engine without /about, such as one with a foreign image
ADOPTED_INTERVAL_S: Final = 2.0  # for a target's engine: its counters are the demand
MAX_CONCURRENT_REQUESTS: Final = 32
MAX_FAILING_REQUESTS: Final = 8  # concurrent ones to pods whose last poll failed
MAX_GROUP_POLLS: Final = 32  # polls under way or waiting, of one namespace and node
MAX_FAILING_GROUP_POLLS: Final = 4  # those to pods whose last poll failed
_RELIST_INTERVAL_S: Final = 1.0  # between two reads of the pod cache
_MIN_SLEEP_S: Final = 0.05
_PAUSE_PER_SCAN_SECOND: Final = 20.0  # a scan of ten thousand pods takes milliseconds, so at most 5% of a core
_SLICE_SIZE: Final = 500  # pods of the cache that are read before other work of the event loop
_POOLS: Final = ("answering", "failing")  # of polls: the second has those to pods whose last poll failed


class UnreachableEngine(NamedTuple):
    """An engine that does not answer. metrics: the names of its metrics."""

    key: Key
    role: Role
    metrics: MetricMap


class EnginePoller:
    """Polls every engine pod in the cache."""

    def __init__(
        self,
        cache: ObjectCache,
        http_get: HttpGet,
        on_reading: OnReading,
        parse_info: ParseEngineInfo = launcher.parse_engine_info,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        errors: ObjectErrors | None = None,
        on_adapters: Callable[[Key], None] = lambda key: None,
    ) -> None:
        """http_get: body at a pod's address, port and path; raises BackendUnavailable. on_reading: called with every
        reading, its service and tier. parse_info: parses /about; raises ValueError. clock: seconds since the epoch,
        which dates the readings; due times use `monotonic`. on_adapters: called with a service whose ready engines
        report other adapters, or another model, than before."""
        self._errors = errors or ObjectErrors()
        self._on_adapters = on_adapters
        self._cache = cache
        self._http_get = http_get
        self._on_reading = on_reading
        self._parse_info = parse_info
        self._clock = clock
        self._monotonic = monotonic
        self._pods: dict[str, PolledPod] = {}  # by uid
        self._pods_by_name: dict[tuple[str, str], PolledPod] = {}  # by namespace and name
        self._pods_of: dict[Key, list[PolledPod]] = {}  # by service
        self._busy_pods: defaultdict[tuple[Key, Role], set[str]] = defaultdict(
            set
        )  # uids of pods that had work at the last poll
        self._active_until_s: dict[Key, float] = {}
        self._relisted_s = -math.inf
        self._scan_s = 0.0  # CPU time of the last search for pods that are due
        self._end_polls()
        self._slots, self._failing_slots = FairSlots(MAX_CONCURRENT_REQUESTS), FairSlots(MAX_FAILING_REQUESTS)

    def engine_info(self, namespace: str, pod: str) -> EngineInfo | None:
        """Properties of the engine in the named pod; None until it has reported them."""
        polled = self._pods_by_name.get((namespace, pod))
        return None if polled is None else polled.engine_info

    def startup_progress(self, namespace: str, pod: str) -> StartupProgress | None:
        """Start-up progress in the engine's last report; None without one."""
        polled = self._pods_by_name.get((namespace, pod))
        return None if polled is None else polled.startup_progress

    def running_requests(self, namespace: str, pod: str) -> float | None:
        """Running and waiting requests in the engine's last reading; None without one."""
        polled = self._pods_by_name.get((namespace, pod))
        return None if polled is None else polled.running_requests

    def cached_tokens(self, namespace: str, pod: str) -> float:
        """Prompt tokens that the engine's prefix cache has saved in the last minutes; 0 without a reading."""
        polled = self._pods_by_name.get((namespace, pod))
        return 0.0 if polled is None else polled.cache_hits.tokens

    def adapters(self, key: Key) -> dict[str, Mapping[str, AdapterReport]]:
        """The last report of each ready engine of a service with LoRA, by pod and adapter."""
        return {
            pod.name: pod.startup_progress.adapters
            for pod in self._pods_of.get(key, ())
            if pod.is_ready and pod.startup_progress and pod.startup_progress.adapters is not None
        }

    def model_revisions(self, key: Key) -> tuple[str, ...]:
        """The different commits or digests of the model that ready engines of a service report, sorted."""
        progress = [pod.startup_progress for pod in self._pods_of.get(key, ()) if pod.is_ready]
        return tuple(sorted({one.model_revision for one in progress if one is not None and one.model_revision}))

    def unreachable(self) -> dict[tuple[str, str], UnreachableEngine]:
        """The ready engines that failed to answer twice in a row, by namespace and pod name."""
        return {
            (pod.key[0], pod.name): UnreachableEngine(pod.key, pod.role, pod.metrics.names)
            for pod in self._pods.values()
            if pod.is_ready and pod.metrics_failures > 1 and pod.metrics is not None
        }

    def accept_external(self, namespace: str, reading: EngineReading) -> None:
        """Ingest a reading of an unreachable engine from the metrics store, unless it is not newer than the last."""
        pod = self._pods_by_name.get((namespace, reading.pod))
        if pod is None or not pod.is_ready or pod.metrics_failures < 2 or reading.at_s <= pod.external_scrape_s:
            return
        pod.external_scrape_s = reading.at_s
        self._update_load(pod, reading, self._monotonic())
        self._on_reading(pod.key, pod.role, reading)

    def mark_active(self, service: Key) -> None:
        """Poll the engines of a service at the busy interval, because requests arrive for it."""
        now_s = self._monotonic()
        if self._active_until_s.get(service, -math.inf) <= now_s:
            self._expedite(now_s, self._pods_of.get(service, ()))
        self._active_until_s[service] = now_s + IDLE_INTERVAL_S

    async def run(self) -> None:
        """Poll until cancelled."""
        self._end_polls()
        async with asyncio.TaskGroup() as group:
            while True:
                for start in await self._take_due():
                    group.create_task(start())
                await asyncio.sleep(self._sleep_s())

    def _end_polls(self) -> None:
        """Let every pod be polled again that waits for an answer: an earlier `run` that failed has ended its polls."""
        self._polls, self._failing_polls = GroupBound(MAX_GROUP_POLLS), GroupBound(MAX_FAILING_GROUP_POLLS)
        now_s = self._monotonic()
        for pod in self._pods.values():
            pod.info_due_s = min(pod.info_due_s, now_s + ENGINE_INFO_INTERVAL_S)
            if pod.is_ready:
                pod.metrics_due_s = min(pod.metrics_due_s, now_s + BUSY_INTERVAL_S)

    async def poll_due(self) -> None:
        """Poll every pod that is due, and wait for the answers."""
        await asyncio.gather(*(start() for start in await self._take_due()))

    async def _take_due(self) -> list[Poll]:
        """The polls that are due, which have a place. One without a place remains due."""
        now_s = self._monotonic()
        if now_s - self._relisted_s >= _RELIST_INTERVAL_S:
            await self._relist(now_s)
        polls = list[Poll]()
        put_off, scan_s, began_s = {False: 0, True: 0}, 0.0, time.thread_time()
        for number, pod in enumerate(list(self._pods.values()), 1):
            if number % _SLICE_SIZE == 0:
                scan_s += time.thread_time() - began_s
                await asyncio.sleep(0)
                began_s = time.thread_time()
            if min(pod.metrics_due_s, pod.info_due_s) > now_s:
                continue
            for failures, poll in self._due_polls(pod, now_s):
                if poll is None:
                    put_off[failures > 0] += 1
                else:
                    polls.append(poll)
        self._scan_s = scan_s + time.thread_time() - began_s
        for has_failed, pool in enumerate(_POOLS):
            operator_metrics.OPERATOR_ENGINE_POLLS_PUT_OFF.labels(pool).set(put_off[bool(has_failed)])
        return polls

    def _due_polls(self, pod: PolledPod, now_s: float) -> Iterator[tuple[int, Poll | None]]:
        """The polls of a pod that are due, each with its earlier failures; None for one without a place."""
        if pod.metrics_due_s <= now_s:
            if pod.metrics is None:
                pod.metrics_due_s = math.inf
            elif (leave := self._take_place(pod, pod.metrics_failures)) is not None:
                pod.metrics_due_s = math.inf
                ask = partial(self._poll_metrics, pod, pod.metrics)
                yield pod.metrics_failures, partial(self._contained, Stage.ENGINE_METRICS, pod, leave, ask)
            else:
                yield pod.metrics_failures, None
        if pod.info_due_s <= now_s:
            if not pod.launched:
                pod.info_due_s = math.inf
            elif (leave := self._take_place(pod, pod.info_failures)) is not None:
                pod.info_due_s = math.inf
                ask = partial(self._poll_engine_info, pod)
                yield pod.info_failures, partial(self._contained, Stage.ENGINE_ABOUT, pod, leave, ask)
            else:
                yield pod.info_failures, None

    def _take_place(self, pod: PolledPod, failures: int) -> Callable[[], None] | None:
        """Take a place among the polls under way or waiting. Returns what gives it back, None if there is none."""
        leave = (self._failing_polls if failures else self._polls).enter(pod.group)
        if leave is not None and pod.uid in self._pods:
            self._pods[pod.uid] = self._pods.pop(pod.uid)  # behind those that wait for a place
        return leave

    async def _contained(
        self, stage: Stage, pod: PolledPod, leave: Callable[[], None], poll: Callable[[], Awaitable[None]]
    ) -> None:
        """Run one poll. After an unexpected error the pod is polled at the interval of a silent one."""
        try:
            with self._errors.contained(stage, pod.key, pod.subject):
                await poll()
                return
        finally:
            leave()
        due_s = self._monotonic() + FOREIGN_ENGINE_INTERVAL_S
        if stage is Stage.ENGINE_ABOUT:
            pod.info_due_s = min(pod.info_due_s, due_s)
        elif pod.is_ready:
            pod.metrics_due_s = min(pod.metrics_due_s, due_s)

    def _slot(self, pod: PolledPod, failures: int) -> AbstractAsyncContextManager[None]:
        slots = self._failing_slots if failures else self._slots
        return slots.of(pod.group)

    def _sleep_s(self) -> float:
        due_s = min((min(pod.metrics_due_s, pod.info_due_s) for pod in self._pods.values()), default=math.inf)
        least_s = max(_MIN_SLEEP_S, _PAUSE_PER_SCAN_SECOND * self._scan_s)
        return min(max(due_s - self._monotonic(), least_s), _RELIST_INTERVAL_S)

    async def _relist(self, now_s: float) -> None:
        """Add new pods, update known ones, and drop deleted ones."""
        self._relisted_s = now_s
        for name, slots in zip(_POOLS, (self._slots, self._failing_slots), strict=True):
            operator_metrics.OPERATOR_ENGINE_POLLS_WAITING.labels(name).set(slots.waiting)
        present = await self._present()
        for uid in self._pods.keys() - present.keys():
            deleted = self._pods.pop(uid)
            self._unlist(deleted)
            self._mark_idle(deleted)
        for uid, pod in present.items():
            if (known := self._pods.get(uid)) is pod:
                continue
            if known is None:
                known = self._pods[uid] = self._pods_by_name[pod.key[0], pod.name] = pod
                self._pods_of.setdefault(pod.key, []).append(pod)
            self._update(known, pod, now_s)
        self._active_until_s = {key: until_s for key, until_s in self._active_until_s.items() if until_s > now_s}

    def _unlist(self, pod: PolledPod) -> None:
        """Drop a deleted pod from the indexes. A pod of its name may have taken its place."""
        if self._pods_by_name.get((pod.key[0], pod.name)) is pod:
            del self._pods_by_name[pod.key[0], pod.name]
        others = [one for one in self._pods_of[pod.key] if one is not pod]
        if others:
            self._pods_of[pod.key] = others
        else:
            del self._pods_of[pod.key]

    async def _present(self) -> dict[str, PolledPod]:
        """The engine pods that can be polled, by uid. A pod that cannot be parsed keeps its previous state."""
        found: dict[str, PolledPod] = {}
        for number, obj in enumerate(self._cache.all_pods(), 1):
            if number % _SLICE_SIZE == 0:
                await asyncio.sleep(0)
            uid = obj["metadata"]["uid"]
            known = self._pods.get(uid)
            if known is not None and known.source is obj:
                found[uid] = known
                continue
            pod = None if known is None else replace(known)
            with self._errors.contained(Stage.ENGINE_LIST, owning_service(obj), subject_of(obj)):
                pod = polled_pod(obj)
            if pod is not None:
                found[uid] = pod
        if self._errors.present:
            subjects = {subject_of(obj) for obj in self._cache.all_pods()}
            for stage in (Stage.ENGINE_LIST, Stage.ENGINE_METRICS, Stage.ENGINE_ABOUT):
                self._errors.retain(stage, subjects)
        return found

    def _update(self, polled: PolledPod, current: PolledPod, now_s: float) -> None:
        polled.address, polled.metrics, polled.adopted = current.address, current.metrics, current.adopted
        polled.source = current.source
        if polled is current:  # new: spread over the interval, because after a restart all pods are new
            phase = zlib.crc32(polled.uid.encode()) / 2**32
            polled.info_due_s = now_s + ENGINE_INFO_INTERVAL_S * phase
            polled.metrics_due_s = now_s + BUSY_INTERVAL_S * phase if polled.is_ready else math.inf
        elif current.is_ready and not polled.is_ready:  # its start-up report is complete now
            polled.metrics_due_s = polled.info_due_s = now_s
            polled.info_failures = 0
        elif polled.is_ready and not current.is_ready:
            polled.metrics_due_s, polled.info_due_s = math.inf, now_s + ENGINE_INFO_INTERVAL_S
            polled.running_requests = None
            self._mark_idle(polled)
        if polled.container_started_s != current.container_started_s:
            polled.startup_progress = polled.first_reading = None  # of a container that has ended
            polled.container_started_s = current.container_started_s
        polled.is_ready = current.is_ready

    async def _poll_metrics(self, pod: PolledPod, metrics: MetricsAddress) -> None:
        async with self._slot(pod, pod.metrics_failures):
            sent_s = self._monotonic()
            try:
                page, reading = await fetch_page(
                    self._http_get,
                    pod.address,
                    metrics.port,
                    metrics.path,
                    pod.name,
                    metrics.names,
                    self._clock,
                    pod.tls_name,
                )
            except BackendUnavailable as error:
                pod.metrics_failures += 1
                level = _level(error, pod.metrics_failures)
                log.write(level, pod.key, "engine metrics are not available", pod=pod.name, error=str(error))
                page, reading = b"", None
        if self._pods.get(pod.uid) is not pod or not pod.is_ready:
            return
        if reading is None:
            pod.metrics_due_s = sent_s + (RETRY_DELAY_S if pod.metrics_failures == 1 else self._interval_s(pod, sent_s))
            return
        pod.metrics_failures = 0
        if not pod.launched and (pod.engine_info is None or pod.engine_info.self_benchmark is None):
            gpu = named_accelerator(pod.source["spec"].get("nodeSelector") or {})
            accelerator = None if gpu is None else gpu.name
            if pod.first_reading is None or pod.first_reading.instance_id != reading.instance_id:
                pod.first_reading = reading
            pod.engine_info = unlaunched_engine.engine_info(page, reading, pod.first_reading, pod.source, accelerator)
            if pod.engine_info.self_benchmark is not None:
                pod.first_reading = None
        self._update_load(pod, reading, sent_s)
        pod.metrics_due_s = sent_s + self._interval_s(pod, sent_s)
        self._on_reading(pod.key, pod.role, reading)

    def _update_load(self, pod: PolledPod, reading: EngineReading, now_s: float) -> None:
        """Record whether the engine had work since the last poll."""
        has_stepped = pod.steps is not None and reading.steps is not None and reading.steps != pod.steps
        pod.steps = reading.steps
        pod.running_requests = None if reading.running is None else reading.running + (reading.waiting or 0.0)
        pod.cache_hits.observe(reading)
        if not (reading.running or reading.waiting or has_stepped):
            self._mark_idle(pod)
            return
        busy_in_tier = self._busy_pods[pod.key, pod.role]
        if not busy_in_tier:
            self._expedite(now_s, [one for one in self._pods_of.get(pod.key, ()) if one.role == pod.role])
        busy_in_tier.add(pod.uid)

    def _mark_idle(self, pod: PolledPod) -> None:
        busy_in_tier = self._busy_pods.get((pod.key, pod.role), set())
        busy_in_tier.discard(pod.uid)
        if not busy_in_tier:
            self._busy_pods.pop((pod.key, pod.role), None)

    def _expedite(self, now_s: float, pods: Iterable[PolledPod]) -> None:
        """Move polls from the idle to the busy interval; a poll in progress is not affected."""
        for pod in pods:
            if pod.metrics_due_s < math.inf:
                pod.metrics_due_s = min(
                    pod.metrics_due_s, max(now_s, pod.metrics_due_s - (IDLE_INTERVAL_S - BUSY_INTERVAL_S))
                )

    def _interval_s(self, pod: PolledPod, now_s: float) -> float:
        if pod.adopted is not None:
            return ADOPTED_INTERVAL_S
        is_busy = (pod.key, pod.role) in self._busy_pods or self._active_until_s.get(pod.key, -math.inf) > now_s
        return BUSY_INTERVAL_S if is_busy else IDLE_INTERVAL_S

    async def _poll_engine_info(self, pod: PolledPod) -> None:
        was_ready, before = pod.is_ready, pod.startup_progress
        async with self._slot(pod, pod.info_failures):
            sent_s = self._monotonic()
            try:
                body = await self._http_get(
                    pod.address, _launcher_port(), engine_contract().paths["about"], pod.tls_name
                )
                pod.engine_info, pod.startup_progress = self._parse_info(body)
            except (BackendUnavailable, ValueError) as error:
                pod.info_failures += 1
                level = _level(error, pod.info_failures)
                log.write(level, pod.key, "engine info is not available", pod=pod.name, error=str(error))
            else:
                pod.info_failures = 0
        progress = pod.startup_progress
        found = None if progress is None else progress.adapters
        reported = None if progress is None else (found, progress.model_revision)
        is_changed = before is None or reported != (before.adapters, before.model_revision) or not was_ready
        if reported not in (None, (None, None)) and pod.is_ready and is_changed:
            self._on_adapters(pod.key)
        if pod.info_due_s < math.inf:  # its readiness changed during the poll, and the next one is already scheduled
            return
        if pod.info_failures or not pod.is_ready or not was_ready or found is not None:
            is_foreign = pod.is_ready and pod.info_failures > 2
            pod.info_due_s = sent_s + (FOREIGN_ENGINE_INTERVAL_S if is_foreign else ENGINE_INFO_INTERVAL_S)


def _level(error: Exception, failures: int) -> int:
    """A certificate that is wrong is worth a warning once; a pod that starts or ends is not."""
    return logging.WARNING if isinstance(error, UntrustedPeer) and failures == 1 else logging.DEBUG


def _launcher_port() -> int:
    return engine_contract().ports["launcher"]
