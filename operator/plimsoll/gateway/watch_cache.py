"""A cache of API objects, fed by watches.

One watch per kind and namespace feeds a `WatchCache` and calls `on_change` after each event. The caller merges a burst
of events into one change.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from plimsoll.adapters.kube_client import INFERENCESERVICEADMISSIONS, INFERENCESERVICES, PODS, Resource, WatchEvent
from plimsoll.adapters.shared_parts import with_shared_parts
from plimsoll.api import labels

Object = dict[str, Any]

WATCHED_RESOURCES = ((INFERENCESERVICES, None), (INFERENCESERVICEADMISSIONS, None), (PODS, labels.ROLE))


class WatchSource(Protocol):
    """The part of a Kubernetes client that the watches use."""

    def watch(
        self, resource: Resource, namespace: str | None = None, selector: str | None = None
    ) -> AsyncIterator[WatchEvent]: ...


@dataclass(frozen=True, slots=True)
class ObjectChanges:
    """Objects that changed, by NAMESPACE/NAME. None is one that no longer exists."""

    services: Mapping[str, Object | None]
    pods: Mapping[str, Object | None]
    admissions: Mapping[str, Object | None]


class WatchCache:
    """Objects by kind. Each (kind, namespace) scope is synced after its first list."""

    def __init__(self, namespaces: Iterable[str] = ()) -> None:
        namespace_list: list[str | None] = list(namespaces) or [None]
        self._scopes: dict[tuple[str, str | None], dict[str, Object] | None] = {
            (resource.plural, namespace): None for resource, _ in WATCHED_RESOURCES for namespace in namespace_list
        }
        self._changed: dict[str, dict[str, Object | None]] = {resource.plural: {} for resource, _ in WATCHED_RESOURCES}

    @property
    def synced(self) -> bool:
        return all(scope is not None for scope in self._scopes.values())

    @property
    def scopes(self) -> list[tuple[str, str | None]]:
        return list(self._scopes)

    def take_changes(self) -> ObjectChanges:
        """Returns what changed since the last call."""
        kinds = (INFERENCESERVICES, PODS, INFERENCESERVICEADMISSIONS)
        changed = ObjectChanges(*(self._changed[kind.plural] for kind in kinds))
        self._changed = {plural: {} for plural in self._changed}
        return changed

    def apply(self, resource: Resource, namespace: str | None, event: WatchEvent) -> None:
        """Apply one watch event of this scope."""
        scope_key, changed = (resource.plural, namespace), self._changed[resource.plural]
        scope = self._scopes[scope_key] or {}
        if event.type == "SYNC":
            listed = {_name(obj): obj for obj in event.objects}
            changed |= dict.fromkeys(scope.keys() - listed.keys())
            changed |= {name: obj for name, obj in listed.items() if not _is_same_version(scope.get(name), obj)}
            self._scopes[scope_key] = listed
            return
        name = _name(event.object)
        if event.type == "DELETED":
            scope.pop(name, None)
            changed[name] = None
        else:
            scope[name] = changed[name] = with_shared_parts(event.object, scope.get(name))
        self._scopes[scope_key] = scope


def _is_same_version(previous: Object | None, obj: Object) -> bool:
    version = obj["metadata"].get("resourceVersion")
    return previous is not None and version is not None and previous["metadata"].get("resourceVersion") == version


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
