"""A cache of API objects, fed by watches.

One watch per kind and namespace feeds a `WatchCache` and calls `on_change` after each event. The caller merges a burst
of events into one change.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Protocol

from plimsoll.adapters.kube_client import INFERENCESERVICEADMISSIONS, INFERENCESERVICES, PODS, Resource, WatchEvent
from plimsoll.api import labels

Object = dict[str, Any]

WATCHED_RESOURCES = ((INFERENCESERVICES, None), (INFERENCESERVICEADMISSIONS, None), (PODS, labels.ROLE))


class WatchSource(Protocol):
    """The part of a Kubernetes client that the watches use."""

    def watch(
        self, resource: Resource, namespace: str | None = None, selector: str | None = None
    ) -> AsyncIterator[WatchEvent]: ...


class WatchCache:
    """Objects by kind. Each (kind, namespace) scope is synced after its first list."""

    def __init__(self, namespaces: Iterable[str] = ()) -> None:
        namespace_list: list[str | None] = list(namespaces) or [None]
        self._scopes: dict[tuple[str, str | None], dict[str, Object] | None] = {
            (resource.plural, namespace): None for resource, _ in WATCHED_RESOURCES for namespace in namespace_list
        }

    @property
    def synced(self) -> bool:
        return all(scope is not None for scope in self._scopes.values())

    @property
    def scopes(self) -> list[tuple[str, str | None]]:
        return list(self._scopes)

    def list_objects(self, resource: Resource) -> list[Object]:
        """Returns all objects of a kind."""
        stores = (scope for (plural, _), scope in self._scopes.items() if plural == resource.plural and scope)
        return [obj for scope in stores for obj in scope.values()]

    def apply(self, resource: Resource, namespace: str | None, event: WatchEvent) -> None:
        """Apply one watch event of this scope."""
        scope_key = (resource.plural, namespace)
        if event.type == "SYNC":
            self._scopes[scope_key] = {_name(obj): obj for obj in event.objects}
            return
        scope = self._scopes[scope_key]
        if scope is None:
            scope = self._scopes[scope_key] = {}
        if event.type == "DELETED":
            scope.pop(_name(event.object), None)
        else:
            scope[_name(event.object)] = event.object


def _name(obj: Object) -> str:
    meta = obj["metadata"]
    return f"{meta['namespace']}/{meta['name']}"


async def run_watches(source: WatchSource, cache: WatchCache, on_change: Callable[[], None]) -> None:
    """Keep `cache` in sync with the API server. Never returns."""

    async def watch_scope(resource: Resource, namespace: str | None, selector: str | None) -> None:
        async for event in source.watch(resource, namespace, selector):
            cache.apply(resource, namespace, event)
            on_change()

    selectors = {resource.plural: (resource, selector) for resource, selector in WATCHED_RESOURCES}
    async with asyncio.TaskGroup() as group:
        for plural, namespace in cache.scopes:
            resource, selector = selectors[plural]
            group.create_task(watch_scope(resource, namespace, selector))
