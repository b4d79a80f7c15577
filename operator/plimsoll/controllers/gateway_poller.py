"""Polls the gateway replicas: the endpoints they can route to, and their request counters.

A service is ready when clients can reach it, which only a gateway knows, and so is its demand. Every replica is polled
once a second. If a replica does not answer, or its answer is invalid, its last answer stays valid for a few seconds.
After that it counts as silent, never as "no endpoint" or "no demand". A round does not wait for slow replicas, because
the answers of the others would age meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plimsoll.adapters.gateway_signals import GatewaySignals, parse_signals
from plimsoll.adapters.kube_client import PODS, KubeClient, WatchEvent
from plimsoll.adapters.pod_tls import tls_name
from plimsoll.controllers.isolation import ObjectErrors, Stage, subject_of
from plimsoll.controllers.object_cache import Key
from plimsoll.core.errors import BackendUnavailable, UntrustedPeer
from plimsoll.core.ports import GatewayReading
from plimsoll.resources.platform_config import GatewaySettings
from plimsoll.telemetry.service_log import ServiceLog

log = ServiceLog(__name__)

POLL_INTERVAL_SECONDS = 1.0
ROUND_TIMEOUT_SECONDS = 0.5  # longest wait of a round for slow replicas
FRESHNESS_SECONDS = 5.0
MAX_MESSAGE_CHARS = 300
LARGE_DOCUMENT_BYTES = 1 << 18  # above it, it is parsed in a thread

_UNREADABLE = "its /signals cannot be read (run operator and gateways at the same release)"
_UNTRUSTED = "its /signals cannot be read with TLS"
_UNSYNCED = (
    "its caches are not synced with the API server (kubectl auth can-i: it must list and watch inferenceservices"
    " and pods)"
)

HttpGet = Callable[[str, int, str, str], Awaitable[bytes]]  # a pod's address, port, path, and name in its certificate


@dataclass(frozen=True)
class GatewayView:
    """Combined state of the gateway replicas.

    replicas: number that exist. responding: number with a fresh answer. error: why no answer is usable; "" if none
    answers. models: model names that every replica accepts, by service; a service that none reports is missing.
    """

    replicas: int = 0
    responding: int = 0
    routable: Mapping[Key, int] = field(
        default_factory=dict
    )  # service -> endpoints that one replica can route to, at most
    error: str = ""
    models: Mapping[Key, frozenset[str]] = field(default_factory=dict)


@dataclass
class _GatewayReplica:
    """A gateway pod. received_s: monotonic time of its last valid answer. error: why later ones are invalid."""

    name: str
    address: str
    tls_name: str = ""  # in its certificate, "" for plain HTTP
    signals: GatewaySignals | None = None
    received_s: float = float("-inf")
    error: str = ""

    def fresh_signals(self, now_s: float) -> GatewaySignals | None:
        return self.signals if now_s - self.received_s < FRESHNESS_SECONDS else None


class GatewayPoller:
    """Watches the gateway's pods and polls each of them."""

    def __init__(
        self,
        kube: KubeClient,
        settings: GatewaySettings,
        http_get: HttpGet,
        on_change: Callable[[Key | None], None],
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        round_timeout_s: float = ROUND_TIMEOUT_SECONDS,
        errors: ObjectErrors | None = None,
    ) -> None:
        """http_get: body at a pod's address, port and path, by the name in its certificate; raises BackendUnavailable.
        on_change: called with a service whose routability changed, or None if any may have. clock: seconds since the
        epoch, which dates the readings; freshness uses `monotonic`."""
        self._errors = errors or ObjectErrors()
        self._kube = kube
        self._settings = settings
        self._http_get = http_get
        self._on_change = on_change
        self._clock = clock
        self._monotonic = monotonic
        self._round_timeout_s = round_timeout_s
        self._replicas: dict[str, _GatewayReplica] = {}
        self._polls: dict[str, asyncio.Task[None]] = {}  # polls in progress, by uid
        self._round_done = asyncio.Event()  # set at the end of the current round
        self._has_polled = False  # whether a round has ended since the first list of pods
        self._listed_s: float | None = None  # time of the first list of pods
        self.view = GatewayView()

    @property
    def is_synced(self) -> bool:
        """True once every replica has answered or had time to. Until then a missing answer has no meaning."""
        if self._listed_s is None:
            return False
        all_responded = self._has_polled and all(r.signals for r in self._replicas.values())
        return all_responded or self._monotonic() - self._listed_s > FRESHNESS_SECONDS

    def readings(self) -> tuple[tuple[GatewayReading, ...], tuple[str, ...]]:
        """The fresh readings, and the names of all replicas."""
        now_s = self._monotonic()
        replicas = sorted(self._replicas.values(), key=lambda r: r.name)
        fresh_signals = (replica.fresh_signals(now_s) for replica in replicas)
        return tuple(signals.reading for signals in fresh_signals if signals), tuple(
            replica.name for replica in replicas
        )

    async def wait_for_round(self) -> None:
        """Wait for the end of a round, when the readings are newest."""
        await self._round_done.wait()

    async def run(self) -> None:
        """Watch and poll until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._poll_forever())

    async def _follow(self) -> None:
        selector = ",".join(f"{k}={v}" for k, v in sorted(self._settings.pod_selector.items()))
        async for event in self._kube.watch(PODS, self._settings.namespace, selector):
            self.on_pod_event(event)

    def on_pod_event(self, event: WatchEvent) -> None:
        """Apply one event of the watch of the gateway's pods."""
        if event.type == "SYNC":
            if self._listed_s is None:
                self._listed_s = self._monotonic()
            present = {pod["metadata"]["uid"] for pod in event.objects}
            self._replicas = {uid: r for uid, r in self._replicas.items() if uid in present}
        for pod in event.objects or (event.object,):
            if pod:
                with self._errors.contained(Stage.GATEWAY, None, subject_of(pod)):
                    self._update_replica(pod, is_deleted=event.type == "DELETED")

    def _update_replica(self, pod: Mapping[str, Any], *, is_deleted: bool) -> None:
        uid, address = pod["metadata"]["uid"], pod.get("status", {}).get("podIP")
        if is_deleted or pod.get("status", {}).get("phase") in ("Failed", "Succeeded"):
            self._replicas.pop(uid, None)
        elif address:
            replica = self._replicas.setdefault(uid, _GatewayReplica(pod["metadata"]["name"], address))
            replica.address = address  # changes when the pod's sandbox is re-created
            replica.tls_name = tls_name(pod)

    async def _poll_forever(self) -> None:
        try:
            while True:
                await self.poll_round()
                await asyncio.sleep(POLL_INTERVAL_SECONDS)
        finally:
            for poll in self._polls.values():
                poll.cancel()
            self._polls.clear()

    async def poll_round(self) -> None:
        """Run one round: poll every replica without a poll in progress, then update the view."""
        was_listed = self._listed_s is not None
        idle_replicas = [(uid, replica) for uid, replica in self._replicas.items() if uid not in self._polls]
        polls = {uid: asyncio.create_task(self._ask_contained(replica)) for uid, replica in idle_replicas}
        self._polls |= polls
        if polls:
            await asyncio.wait(polls.values(), timeout=self._round_timeout_s)
        for uid in [uid for uid, poll in self._polls.items() if poll.done()]:
            del self._polls[uid]
        self._has_polled = self._has_polled or was_listed
        now_s = self._monotonic()
        fresh_signals = [signals for r in self._replicas.values() if (signals := r.fresh_signals(now_s))]
        routable: dict[Key, int] = {}
        for signals in fresh_signals:
            for key, count in signals.routable_endpoints.items():
                routable[key] = max(count, routable.get(key, 0))
        error = "" if fresh_signals else next((r.error for r in self._replicas.values() if r.error), "")
        self._update_view(
            GatewayView(
                len(self._replicas),
                len(fresh_signals),
                routable,
                error,
                _common([signals.models for signals in fresh_signals]),
            )
        )
        done, self._round_done = self._round_done, asyncio.Event()
        done.set()

    def _update_view(self, view: GatewayView) -> None:
        previous, self.view = self.view, view
        current_state, previous_state = (
            (bool(one.responding), bool(one.replicas), one.error) for one in (view, previous)
        )
        if current_state != previous_state:
            self._on_change(None)
            return
        for key in previous.routable.keys() | view.routable.keys():
            was, is_now = (bool(one.routable.get(key)) for one in (previous, view))
            if was != is_now or previous.models.get(key) != view.models.get(key):
                self._on_change(key)

    async def _ask_contained(self, replica: _GatewayReplica) -> None:
        with self._errors.contained(Stage.GATEWAY, None, f"Pod {self._settings.namespace}/{replica.name}"):
            await self._poll_replica(replica)

    async def _poll_replica(self, replica: _GatewayReplica) -> None:
        log_fields = {"gateway": replica.name, "address": replica.address}
        try:
            document = await self._http_get(replica.address, self._settings.picker_port, "/signals", replica.tls_name)
            signals = await _parse(document, replica.name, self._clock())
        except UntrustedPeer as error:
            level = logging.DEBUG if replica.error.startswith(_UNTRUSTED) else logging.WARNING
            log.write(level, None, "gateway signals cannot be read with TLS", **log_fields, error=str(error))
            replica.error = f"{_UNTRUSTED}: {error}"[:MAX_MESSAGE_CHARS]
            return
        except BackendUnavailable as error:
            log.debug(None, "gateway signals are not available", **log_fields, error=str(error))
            replica.error = ""
            return
        except ValueError as error:
            level = logging.DEBUG if replica.error.startswith(_UNREADABLE) else logging.WARNING
            log.write(level, None, "gateway signals cannot be parsed", **log_fields, error=str(error))
            replica.error = f"{_UNREADABLE}: {error}"[:MAX_MESSAGE_CHARS]
            return
        replica.error = "" if signals.synced else _UNSYNCED
        if signals.synced:
            replica.signals, replica.received_s = signals, self._monotonic()


async def _parse(document: bytes, gateway: str, at_s: float) -> GatewaySignals:
    """Parse a document, a large one in a thread: that of 1,000 services takes 30 ms. Raises ValueError."""
    if len(document) < LARGE_DOCUMENT_BYTES:
        return parse_signals(document, gateway, at_s)
    return await asyncio.to_thread(parse_signals, document, gateway, at_s)


def _common(models_by_replica: list[Mapping[Key, frozenset[str]]]) -> dict[Key, frozenset[str]]:
    """The model names that all reporting replicas accept, by service. A replica without a service accepts none."""
    reporting = [models for models in models_by_replica if models]
    keys = {key for models in reporting for key in models}
    return {key: frozenset.intersection(*(models.get(key, frozenset()) for models in reporting)) for key in keys}
