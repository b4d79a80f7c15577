"""Reads the metrics of engines that the operator cannot reach from Prometheus.

Problem: a network policy or mesh can admit only Prometheus to the engine ports. The operator then lacks the engines'
metrics, and no tier scales down.

Idea: ready engines that failed to answer twice in a row are queried from the store, one query per namespace, and never
before the previous answer. The result is a reading like any other, dated by its scrape. An engine that answers again is
read directly.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from plimsoll.controllers.engine_poller import UnreachableEngine
from plimsoll.controllers.object_cache import Key
from plimsoll.core.errors import BackendUnavailable
from plimsoll.core.ports import EngineReading
from plimsoll.engines.engine import MetricMap
from plimsoll.telemetry.service_log import ServiceLog

if TYPE_CHECKING:
    from plimsoll.adapters.prometheus_history import PrometheusHistory

log = ServiceLog(__name__)

# Pause between an answer and the next query: with a scrape interval of 5 s a sample is at most 8 s old.
QUERY_INTERVAL_S: Final = 3.0


class EngineMetricsStore(Protocol):
    """A metrics store that scrapes engines. Its calls block."""

    def engine_readings(self, namespace: str, pods: Mapping[str, MetricMap]) -> Sequence[EngineReading]:
        """Readings of the engines it knows, each dated by its scrape. pods: the metric names of each pod's engine.

        Raises BackendUnavailable.
        """
        ...


class PrometheusFallback:
    """Queries a metrics store for engines that do not answer."""

    def __init__(
        self,
        metrics_store: EngineMetricsStore | None,
        unreachable: Callable[[], Mapping[tuple[str, str], UnreachableEngine]],
        accept: Callable[[str, EngineReading], None],
    ) -> None:
        """metrics_store: None if none is configured; then nothing is queried. unreachable: the engines
        that do not answer, by namespace and pod name. accept: called with the namespace of each reading."""
        self._metrics_store = metrics_store
        self._unreachable = unreachable
        self._accept = accept
        self._tiers: dict[Key, tuple[str, ...]] = {}
        self._is_available = True  # whether the last query was answered

    def tiers(self, service: Key) -> tuple[str, ...]:
        """Names of the tiers with an engine whose metrics come from the store only."""
        return self._tiers.get(service, ())

    async def run(self) -> None:
        """Query until cancelled."""
        while self._metrics_store is not None:
            await self.query()
            await asyncio.sleep(QUERY_INTERVAL_S)

    async def query(self) -> None:
        """Query all engines that do not answer now."""
        unreachable = self._unreachable()
        namespaces: defaultdict[str, dict[str, MetricMap]] = defaultdict(dict)
        for (namespace, pod), engine in sorted(unreachable.items(), key=lambda item: item[0]):
            namespaces[namespace][pod] = engine.metrics
        tiers_by_service: defaultdict[Key, set[str]] = defaultdict(set)
        for namespace, pods in namespaces.items():
            for reading in await self._query_namespace(namespace, pods):
                if (namespace, reading.pod) in unreachable:
                    engine = unreachable[namespace, reading.pod]
                    tiers_by_service[engine.key].add(engine.role)
                    self._accept(namespace, reading)
        self._tiers = {key: tuple(sorted(tiers)) for key, tiers in tiers_by_service.items()}

    async def _query_namespace(self, namespace: str, pods: Mapping[str, MetricMap]) -> Sequence[EngineReading]:
        assert self._metrics_store is not None
        try:
            readings = await asyncio.to_thread(self._metrics_store.engine_readings, namespace, pods)
        except BackendUnavailable as error:
            if self._is_available:  # one warning per outage
                message = "metrics store does not answer; unreachable engines stay unknown"
                log.warning(None, message, namespace=namespace, error=str(error))
            self._is_available = False
            return ()
        self._is_available = True
        return readings


def load_history(url: str) -> PrometheusHistory | None:
    """The metrics store, None without a URL. The import is local, because most installations do not need its memory."""
    if not url:
        return None
    from plimsoll.adapters.prometheus_history import PrometheusHistory

    return PrometheusHistory(url)
