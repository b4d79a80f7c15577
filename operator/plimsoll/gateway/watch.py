"""From the API server's watches to the objects as they stand.

One watch for each kind and namespace feeds an `Objects` store; `changed` is called after each event. Nothing here
decides anything: a burst of events is one change for whoever computes from the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Protocol

from plimsoll.adapters.kube import INFERENCESERVICES, PODS, Resource, WatchEvent
from plimsoll.api import labels

Object = dict[str, Any]

WATCHED = ((INFERENCESERVICES, None), (PODS, labels.ROLE))


class Source(Protocol):
    """What is needed of a connection to the API server."""

    def watch(
        self, resource: Resource, namespace: str | None = None, selector: str | None = None
    ) -> AsyncIterator[WatchEvent]: ...


class Objects:
    """Objects by kind; each (kind, namespace) scope is synced once its first list has come."""

    def __init__(self, namespaces: Iterable[str] = ()) -> None:
        spaces: list[str | None] = list(namespaces) or [None]
        self._scopes: dict[tuple[str, str | None], dict[str, Object] | None] = {
            (resource.plural, space): None for resource, _ in WATCHED for space in spaces
        }

    @property
    def synced(self) -> bool:
        return all(scope is not None for scope in self._scopes.values())

    @property
    def scopes(self) -> list[tuple[str, str | None]]:
        return list(self._scopes)

    def of(self, resource: Resource) -> list[Object]:
        """All objects of a kind."""
        found = (scope for (plural, _), scope in self._scopes.items() if plural == resource.plural and scope)
        return [obj for scope in found for obj in scope.values()]

    def apply(self, resource: Resource, namespace: str | None, event: WatchEvent) -> None:
        """Take in one event of the watch of this scope."""
        at = (resource.plural, namespace)
        if event.type == "SYNC":
            self._scopes[at] = {_name(obj): obj for obj in event.objects}
            return
        scope = self._scopes[at]
        if scope is None:
            scope = self._scopes[at] = {}
        if event.type == "DELETED":
            scope.pop(_name(event.object), None)
        else:
            scope[_name(event.object)] = event.object


def _name(obj: Object) -> str:
    meta = obj["metadata"]
    return f"{meta['namespace']}/{meta['name']}"


async def follow(source: Source, objects: Objects, changed: Callable[[], None]) -> None:
    """Keep `objects` as the API server has them; never returns."""

    async def one(resource: Resource, namespace: str | None, selector: str | None) -> None:
        async for event in source.watch(resource, namespace, selector):
            objects.apply(resource, namespace, event)
            changed()

    selectors = {resource.plural: (resource, selector) for resource, selector in WATCHED}
    async with asyncio.TaskGroup() as group:
        for plural, namespace in objects.scopes:
            resource, selector = selectors[plural]
            group.create_task(one(resource, namespace, selector))
