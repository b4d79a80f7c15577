"""The operator process: wait for the lease, watch, reconcile and scale until it is lost, and wait for it again.

A standby serves its probes and is ready, so that a rollout can finish. Only the leader watches and writes. A leader
that loses the lease drops its caches, which may be outdated, and starts from the API server when it leads again. An API
server that does not answer never ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import aiohttp

from plimsoll.adapters import pod_http
from plimsoll.adapters.kube_client import (
    CONFIGMAPS,
    CONTROLLERREVISIONS,
    DEPLOYMENTS,
    INFERENCESERVICEADMISSIONS,
    INFERENCESERVICES,
    NETWORKPOLICIES,
    PODDISRUPTIONBUDGETS,
    PODS,
    SERVICEACCOUNTS,
    SERVICES,
    KubeClient,
    Resource,
    WatchEvent,
    jittered,
)
from plimsoll.adapters.lease import LeaseTimes, lead_while_leased
from plimsoll.api import labels
from plimsoll.controllers import http_server, kopf_handlers, stop_signals
from plimsoll.controllers.autoscale.autoscaler import Autoscaler
from plimsoll.controllers.autoscale.checkpoint_store import CheckpointStore
from plimsoll.controllers.autoscale.prometheus_fallback import PrometheusFallback, load_history
from plimsoll.controllers.autoscale.scaling_status import ScalingReport
from plimsoll.controllers.autoscale.signal_sources import SignalSources
from plimsoll.controllers.certificates import internal_identity
from plimsoll.controllers.engine_poller import EnginePoller
from plimsoll.controllers.engine_rollout.rollout_controller import EngineRollout
from plimsoll.controllers.gateway_poller import GatewayPoller
from plimsoll.controllers.inference_pools.pool_watch import PoolWatch
from plimsoll.controllers.isolation import ObjectErrors, Stage, subject_of, supervise
from plimsoll.controllers.leader_worker_sets import LeaderWorkerSetWatches
from plimsoll.controllers.namespace_leases import RENEW_SECONDS, NamespaceLeases
from plimsoll.controllers.object_cache import Key, ObjectCache, key_of, owning_service
from plimsoll.controllers.operator_config import OperatorConfig
from plimsoll.controllers.reconcile.drain_reports import DrainReports
from plimsoll.controllers.reconcile.observe import affected_services
from plimsoll.controllers.reconcile.reconciler import Reconciler
from plimsoll.controllers.reconcile.service_namespaces import ServiceNamespaces
from plimsoll.controllers.reconcile_progress import ReconcileProgress
from plimsoll.controllers.targets.target_poller import TargetPoller
from plimsoll.controllers.webhook import server as webhook_server
from plimsoll.controllers.workqueue import WorkQueue
from plimsoll.core.errors import ClusterError, NotFound
from plimsoll.core.ports import EngineReading
from plimsoll.core.types import Role
from plimsoll.resources.platform_config import KedaScalerSettings
from plimsoll.telemetry import operator_metrics
from plimsoll.telemetry.service_log import ServiceLog

if TYPE_CHECKING:
    from plimsoll.adapters.prometheus_history import PrometheusHistory

log = ServiceLog(__name__)

LEASE_NAME = "plimsoll-operator"
FIRST_RESYNC_SECONDS = 30.0  # by then kopf has made its first list
RESYNC_INTERVAL_SECONDS = 300.0  # between two checks for missed deletions
UNSYNCED_RETRY_SECONDS = 1.0  # of each service, while the caches are being filled
MIN_LIST_PAUSE_SECONDS = 0.5  # after a failed first list
MAX_LIST_PAUSE_SECONDS = 8.0
PAUSE_PER_TICK_SECOND = 3.0  # a long tick of a large fleet must leave time to watches and lease
OWNED_RESOURCES = (
    *(DEPLOYMENTS, SERVICES, CONFIGMAPS, SERVICEACCOUNTS),
    *(PODDISRUPTIONBUDGETS, NETWORKPOLICIES, INFERENCESERVICEADMISSIONS, CONTROLLERREVISIONS),
)
WATCHED_RESOURCES = (
    *((resource, f"{labels.MANAGED_BY}=plimsoll,{labels.SERVICE}") for resource in OWNED_RESOURCES),
    (PODS, labels.SERVICE),  # not ROLE: workers of engines with several nodes have none
)


class _Stopped(Exception):
    """kopf has stopped on SIGTERM, so the other components stop too."""


class OperatorProcess:
    """The components of the leader, and their connections."""

    def __init__(
        self,
        kube: KubeClient,
        config: OperatorConfig,
        session: aiohttp.ClientSession,
        watch_services: Callable[..., Awaitable[None]] = kopf_handlers.watch_services,
        tls_context: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        """watch_services: watches services until the process is to stop.

        tls_context: of a client that gateways and engines with TLS accept, None while there is none.
        """
        self._kube = kube
        self._watch_services = watch_services
        self._config = config
        self._namespaces = config.platform.watch_namespaces
        self._synced: set[tuple[str, str | None]] = set()
        self.queue: WorkQueue[Key] = WorkQueue(self._reconcile)
        self.errors = ObjectErrors(self.queue.add)
        self.cache = ObjectCache(self.queue.add, config.platform.engine.gpu_resource)
        get_page = partial(pod_http.get_page, session, tls_context=tls_context)
        get_gateway_page = partial(get_page, max_bytes=pod_http.MAX_GATEWAY_PAGE_BYTES)
        get_engine_page = partial(get_page, max_bytes=pod_http.MAX_ENGINE_PAGE_BYTES)
        self.gateway_poller = GatewayPoller(
            kube, config.platform.gateway, get_gateway_page, self._on_routability_changed, errors=self.errors
        )
        self.engine_poller = EnginePoller(
            self.cache,
            get_engine_page,
            self._on_engine_reading,
            errors=self.errors,
            on_adapters=lambda key: self.queue.add_later(key, 0.0),
        )
        self.drain_reports = DrainReports(self.cache, self.errors)
        self.checkpoints = CheckpointStore(kube)
        self.service_namespaces = ServiceNamespaces(kube, config.namespace)
        self.namespace_leases = NamespaceLeases(
            kube, config.namespace, self._on_taken_over, on_foreign=self._queue_namespace
        )
        self.engine_rollout = EngineRollout(
            self.cache,
            config.platform.engine.rollout,
            self.queue.add,
            is_foreign=lambda key: bool(self.namespace_leases.foreign_release(key[0])),
            errors=self.errors,
        )
        self.pool_watch: PoolWatch | None = None
        if config.platform.inference_pools is not None:
            self.pool_watch = PoolWatch(kube, self.cache, config.platform.gateway.namespace, self.queue.add)
        self.set_watches = LeaderWorkerSetWatches(kube, self.cache, self._namespaces, self.queue.add)
        self.reconciler = Reconciler(
            kube,
            self.cache,
            config.platform,
            lambda: self.gateway_poller.view,
            self._report,
            self.drain_reports,
            config.identity,
            self.errors,
            self.queue.add_later,
            self.checkpoints,
            self.service_namespaces,
            self.engine_poller.adapters,
            lambda key: self.target_poller.states(key),
            self.engine_rollout.of,
            self.pool_watch,
            self.set_watches.problem,
            self.engine_poller.model_revisions,
        )
        self.target_poller = TargetPoller(
            kube, self.cache, self.queue.add, self.errors, lambda key: self.namespace_leases.manages(key[0])
        )
        history = load_history(config.prometheus_url)
        self.prometheus_fallback = PrometheusFallback(
            history, self.engine_poller.unreachable, self.engine_poller.accept_external
        )
        self.autoscaler = self._make_autoscaler(history)

    def _make_autoscaler(self, history: PrometheusHistory | None) -> Autoscaler:
        sources = SignalSources(
            self.gateway_poller.readings,
            self.engine_poller.engine_info,
            self.engine_poller.startup_progress,
            self.engine_poller.running_requests,
            self.engine_poller.cached_tokens,
            self.engine_poller.mark_active,
            history,
            self.prometheus_fallback.tiers,
            self.checkpoints.get,
            lambda key: self.target_poller.states(key),
            lambda key, role, uid: self.target_poller.record_write(key, role, uid),
        )
        return Autoscaler(
            self.cache,
            self._kube,
            sources,
            self.reconciler.status.record_event,
            self.queue.add,
            errors=self.errors,
            is_managed=lambda key: self.namespace_leases.manages(key[0]),
        )

    async def run(self) -> None:
        """Run until SIGTERM or cancellation. A failed component is restarted while the others continue."""
        pause_s = MIN_LIST_PAUSE_SECONDS
        while not await self._try_list_services():
            await asyncio.sleep(jittered(pause_s))
            pause_s = min(2 * pause_s, MAX_LIST_PAUSE_SECONDS)
        try:
            async with asyncio.TaskGroup() as group:
                for name, work in self._parts():
                    group.create_task(supervise(name, work, self.errors))
                group.create_task(self._watch_until_stopped())
        except* _Stopped:
            log.info(None, "stop requested")

    async def _try_list_services(self) -> bool:
        """List the services; returns False if the API server does not answer."""
        try:
            await self._list_services()
        except ClusterError as error:
            log.warning(None, "cannot list InferenceServices; trying again", error=str(error))
            return False
        return True

    async def _list_services(self) -> None:
        """List every service and checkpoint before the first reconcile.

        kopf does not signal the end of its own list, and the owner of a model name depends on all services.
        """
        await self.service_namespaces.load()
        for namespace in self._namespaces or (None,):
            with contextlib.suppress(NotFound):  # the CRD may be installed later
                items, _ = await self._kube.list(INFERENCESERVICES, namespace)
                await self.cache.replace_in_slices(labels.KIND, tuple(items), namespace)
        await self.checkpoints.load(self._namespaces or (None,))

    def _parts(self) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        """Name and work of each component except the watch of services."""
        for namespace in self._namespaces or (None,):
            for resource, selector in WATCHED_RESOURCES:
                yield f"watch of {resource.plural}", partial(self._follow, resource, selector, namespace)
        yield "list of services", self._resync_forever
        yield "gateways", self.gateway_poller.run
        yield "engines", self.engine_poller.run
        yield "targets", self.target_poller.run
        if self.pool_watch is not None:
            yield "InferencePools", self.pool_watch.run
        yield from (("LeaderWorkerSets", work) for work in self.set_watches.parts())
        yield "metrics store", self.prometheus_fallback.run
        yield "leases of namespaces", partial(self.namespace_leases.run, self._namespaces_with_services)
        yield "rollout of engines", partial(self.engine_rollout.run, lambda: self.is_synced)
        yield "work queue", self.queue.run
        yield "scaling", self._tick_forever
        if self._config.platform.keda_scaler is not None:
            yield "KEDA scaler", partial(self._serve_keda, self._config.platform.keda_scaler)

    async def _watch_until_stopped(self) -> None:
        """Watch services until kopf returns, as it does on a signal before `run` has taken them; then stop."""
        watch = partial(self._watch_services, self._contained_change, self._namespaces)
        await supervise("watch of services", watch, self.errors)
        raise _Stopped

    def _contained_change(self, obj: dict[str, Any], gone: bool) -> None:
        with self.errors.contained(Stage.WATCH, owning_service(obj), subject_of(obj)):
            self._on_service_changed(obj, gone)

    def _on_service_changed(self, obj: dict[str, Any], is_deleted: bool) -> None:
        before = self.cache.get(labels.KIND, key_of(obj))
        if is_deleted:
            self.cache.delete(obj)
        else:
            self.cache.put(obj)
        for key in affected_services(self.cache, before, None if is_deleted else obj):
            self.queue.add(key)

    async def _resync_forever(self) -> None:
        interval_s = FIRST_RESYNC_SECONDS
        while True:
            await asyncio.sleep(interval_s)
            await self.remove_deleted_services()
            interval_s = RESYNC_INTERVAL_SECONDS

    async def remove_deleted_services(self) -> None:
        """Drop services that were deleted before kopf's first list or between two of its lists.

        kopf does not report those. Their children would otherwise be re-created and garbage-collected forever.
        """
        for namespace in self._namespaces or (None,):
            cached = [one for one in self.cache.all(labels.KIND) if namespace in (None, key_of(one)[0])]
            try:
                items, _ = await self._kube.list(INFERENCESERVICES, namespace)
            except ClusterError as error:
                log.debug(None, "cannot list InferenceServices", error=str(error))
                continue
            listed_uids = {item["metadata"]["uid"] for item in items}
            for deleted in (one for one in cached if one["metadata"]["uid"] not in listed_uids):
                self._on_service_changed(deleted, is_deleted=True)

    @property
    def is_synced(self) -> bool:
        """True once every watch has listed its objects and the gateways have answered. No engine needs a pool."""
        return not self.unsynced()

    def unsynced(self) -> set[str]:
        """What has not been listed or has not answered yet."""
        lists = {(resource.plural, name) for resource, _ in WATCHED_RESOURCES for name in self._namespaces or (None,)}
        others = {"gateways": self.gateway_poller.is_synced, "leaderworkersets": self.set_watches.is_synced}
        return {plural for plural, _ in lists - self._synced} | {name for name, known in others.items() if not known}

    async def _follow(self, resource: Resource, selector: str, namespace: str | None) -> None:
        async for event in self._kube.watch(resource, namespace, selector):
            with self.errors.contained(Stage.WATCH, None, subject_of(event.object)):
                await self._take(resource, namespace, event)

    async def _take(self, resource: Resource, namespace: str | None, event: WatchEvent) -> None:
        match event.type:
            case "SYNC":
                await self.cache.replace_in_slices(resource.kind, event.objects, namespace)
                self._synced.add((resource.plural, namespace))
            case "DELETED":
                self.cache.delete(event.object)
            case _:
                self.cache.put(event.object)
        if resource is PODS:
            self.drain_reports.on_pod_event(event)

    async def _reconcile(self, key: Key) -> None:
        if not self.is_synced:
            self.queue.add_later(key, UNSYNCED_RETRY_SECONDS)
            return
        await self.engine_rollout.wait_planned()
        if key[0] not in self._namespaces_with_services():
            await self.reconciler.reconcile(key)
            await self.namespace_leases.give_up(key[0])
            return
        if not await self.namespace_leases.acquire(key[0]):
            if release := self.namespace_leases.foreign_release(key[0]):
                await self.reconciler.status.publish_other_release(key, release)
            if self.cache.get(labels.KIND, key) is not None:
                self.queue.add_later(key, RENEW_SECONDS)
            return
        await self.reconciler.reconcile(key)

    def _namespaces_with_services(self) -> set[str]:
        return set(self.cache.service_namespaces)

    async def _on_taken_over(self, namespace: str) -> None:
        """Continue with what the former release had learned."""
        self._queue_namespace(namespace)
        await self.checkpoints.load((namespace,))

    def _queue_namespace(self, namespace: str) -> None:
        for raw in self.cache.all(labels.KIND):
            if key_of(raw)[0] == namespace:
                self.queue.add(key_of(raw))

    async def _tick_forever(self) -> None:
        """Tick after each round of gateway polls, when the readings are newest."""
        try:
            while True:
                tick_s = 0.0
                for slice_s in self.autoscaler.slices(time.time()) if self.is_synced else ():
                    tick_s += slice_s
                    await asyncio.sleep(0)
                await asyncio.sleep(PAUSE_PER_TICK_SECOND * tick_s)
                await self.gateway_poller.wait_for_round()
        finally:
            self.autoscaler.cancel_writes()

    async def _serve_keda(self, settings: KedaScalerSettings) -> None:
        """Serve KEDA. The import is local, because most installations do not need its memory."""
        from plimsoll.controllers.keda_scaler import server

        await server.serve(settings, self.autoscaler.recommendations.get)

    def _on_engine_reading(self, key: Key, role: Role, reading: EngineReading) -> None:
        self.autoscaler.observe_engine(key, role, reading)

    def _report(self, key: Key) -> ScalingReport | None:
        return self.autoscaler.report(key)

    def _on_routability_changed(self, key: Key | None) -> None:
        if key is not None:
            self.queue.add(key)
            return
        for raw in self.cache.all(labels.KIND):
            self.queue.add(key_of(raw))


async def run(config: OperatorConfig, times: LeaseTimes | None = None) -> None:
    """Run the process until SIGTERM. times: of the lease; None for the defaults."""
    stop_requested = asyncio.Event()
    take_signals = partial(stop_signals.set_on_signals, stop_requested)
    endpoints = http_server.HttpEndpoints()
    runner = await http_server.serve(config.probe_port, config.metrics_port, endpoints)
    kube = await KubeClient.connect()
    try:
        async with aiohttp.ClientSession() as session, _webhook(kube, config), internal_identity(config) as tls_context:
            take_signals()
            watch_services = partial(kopf_handlers.watch_services, take_signals=take_signals)
            while not stop_requested.is_set():
                lead = partial(
                    _lead_and_run, kube, config, session, endpoints, times or LeaseTimes(), watch_services, tls_context
                )
                if await stop_signals.run_until(stop_requested, lead):
                    return
    finally:
        await kube.close()
        await runner.cleanup()


@contextlib.asynccontextmanager
async def _webhook(kube: KubeClient, config: OperatorConfig) -> AsyncIterator[None]:
    """Serve the admission webhook meanwhile, if it is configured. A standby serves it as the leader does."""
    settings = config.platform.webhook
    if settings is None:
        yield
        return
    task = asyncio.create_task(webhook_server.run(kube, config, settings))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def _lead_and_run(
    kube: KubeClient,
    config: OperatorConfig,
    session: aiohttp.ClientSession,
    endpoints: http_server.HttpEndpoints,
    times: LeaseTimes,
    watch_services: Callable[..., Awaitable[None]],
    tls_context: Callable[[], ssl.SSLContext | None],
) -> bool:
    """Wait for the lease and lead once. Returns False if the lease was lost."""

    async def work() -> None:
        log.info(None, "lease acquired; this replica leads", identity=config.identity)
        with operator_metrics.leading():
            operator = OperatorProcess(kube, config, session, watch_services, tls_context)
            scaler, progress = operator.autoscaler, ReconcileProgress(operator.queue, operator.unsynced)
            with endpoints.leading(scaler.explain, scaler.recommendations, progress):
                await operator.run()

    has_ended = await lead_while_leased(kube, config.namespace, LEASE_NAME, config.identity, work, times)
    if not has_ended:
        log.warning(None, "lease lost; this replica no longer leads, and waits for the lease")
        gc.collect()  # the caches refer to each other, and those of the next term would be added to them
    return has_ended
