"""The InferenceServices as the webhook needs them: names, fallbacks and grants, from a watch of its own.

Every operator replica serves the webhook, and a standby has none of the leader's caches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Final

from plimsoll.adapters.kube_client import INFERENCESERVICES, KubeClient, WatchEvent
from plimsoll.adapters.normalize import value_at
from plimsoll.api import labels
from plimsoll.controllers.isolation import ObjectErrors, Stage, subject_of
from plimsoll.controllers.object_cache import ObjectCache
from plimsoll.controllers.operator_config import OperatorConfig
from plimsoll.controllers.reconcile.name_claims import FIELD as NAME_CLAIM
from plimsoll.controllers.reconcile.name_claims import name_rules
from plimsoll.controllers.reconcile.service_namespaces import ServiceNamespaces
from plimsoll.controllers.webhook.validation import Cluster
from plimsoll.core.errors import ClusterError
from plimsoll.telemetry.service_log import ServiceLog

Object = dict[str, Any]

log = ServiceLog(__name__)

NAMESPACES_INTERVAL_SECONDS: Final = 300.0  # between two reads of the list of namespaces with services
_INDEXED_FIELDS: Final = (
    ("metadata", "name"),
    ("metadata", "namespace"),
    ("metadata", "uid"),
    ("metadata", "resourceVersion"),
    ("metadata", "creationTimestamp"),
    ("metadata", "deletionTimestamp"),
    ("spec", "model", "name"),
    ("spec", "adapters"),
    ("spec", "admission", "fallback", "name"),
    ("status", "adapters"),
    ("status", NAME_CLAIM),
    ("status", "modelNames"),
)


class ServiceIndex:
    """All services of the operator's namespaces. `parts` are its components, which run until they are cancelled."""

    def __init__(self, kube: KubeClient, config: OperatorConfig, errors: ObjectErrors) -> None:
        self._kube = kube
        self._errors = errors
        self._scopes = config.platform.watch_namespaces or (None,)
        self._short_name_namespaces = frozenset(config.platform.gateway.short_model_names.namespaces)
        self._namespaces = ServiceNamespaces(kube, config.namespace)
        self._cache = ObjectCache()
        self._synced: set[str | None] = set()

    @property
    def cluster(self) -> Cluster | None:
        """The services as of now; None before every watch has listed them."""
        if len(self._synced) < len(self._scopes):
            return None
        return Cluster(self._cache, name_rules(self._cache, self._short_name_namespaces, self._namespaces))

    def parts(self) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
        for namespace in self._scopes:
            yield "webhook's watch of services", partial(self._follow, namespace)
        yield "webhook's list of namespaces", self._read_namespaces

    async def _follow(self, namespace: str | None) -> None:
        async for event in self._kube.watch(INFERENCESERVICES, namespace):
            with self._errors.contained(Stage.WATCH, None, subject_of(event.object)):
                self.take(namespace, event)

    def take(self, namespace: str | None, event: WatchEvent) -> None:
        """Process an event of the watch of a namespace, None for all."""
        match event.type:
            case "SYNC":
                self._cache.replace(labels.KIND, tuple(map(essentials, event.objects)), namespace)
                self._synced.add(namespace)
            case "DELETED":
                self._cache.delete(essentials(event.object))
            case _:
                self._cache.put(essentials(event.object))

    async def _read_namespaces(self) -> None:
        while True:
            try:
                await self._namespaces.load()
            except ClusterError as error:
                log.debug(None, "cannot read the list of namespaces with services", error=str(error))
            await asyncio.sleep(NAMESPACES_INTERVAL_SECONDS)


def essentials(service_object: Object) -> Object:
    """The part of an InferenceService that rules about other services read."""
    reduced: Object = {"apiVersion": labels.API_VERSION, "kind": labels.KIND, "metadata": {}, "spec": {}, "status": {}}
    for path in _INDEXED_FIELDS:
        value = value_at(service_object, *path)
        if value is not None:
            at = reduced
            for field in path[:-1]:
                at = at.setdefault(field, {})
            at[path[-1]] = value
    return reduced
