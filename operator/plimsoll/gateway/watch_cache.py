"""A cache of API objects, fed by watches.

One watch per kind and namespace feeds a `WatchCache` and calls `on_change` after each event. The caller merges a burst
of events into one change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from plimsoll.adapters.kube_client import (
    ENDPOINTSLICES,
    INFERENCESERVICEADMISSIONS,
    INFERENCESERVICES,
    Resource,
    WatchEvent,
)
from plimsoll.adapters.normalize import value_at
from plimsoll.adapters.shared_parts import with_shared_parts
from plimsoll.api import labels
from plimsoll.gateway.admission_policy import admission_of
from plimsoll.gateway.engine_slices import has_engines, service_of
from plimsoll.gateway.service_catalog import ENGINES
from plimsoll.resources.inference_pool import match_labels

log = logging.getLogger(__name__)

Object = dict[str, Any]

STRAGGLER_SECONDS: Final = 5.0  # without a further publication: then services without one hold up no other
_UNLISTED: Final = "the first list of InferenceServices, their admission limits and EndpointSlices is not complete"
_UNPUBLISHED: Final = (
    "the operator has not yet published the engines of %d InferenceServices, such as %s; check that it runs"
)
_SLICES: Final = f"{labels.ROLE},{labels.SLICE_MANAGED_BY}={labels.SLICE_CONTROLLER}"
WATCHED_RESOURCES = ((INFERENCESERVICES, None), (INFERENCESERVICEADMISSIONS, None), (ENDPOINTSLICES, _SLICES))


class WatchSource(Protocol):
    """The part of a Kubernetes client that the watches use."""

    def watch(
        self, resource: Resource, namespace: str | None = None, selector: str | None = None
    ) -> AsyncIterator[WatchEvent]: ...


@dataclass(frozen=True, slots=True)
class ObjectChanges:
    """Objects that changed, by NAMESPACE/NAME. None is one that no longer exists."""

    services: Mapping[str, Object | None]
    slices: Mapping[str, Object | None]
    admissions: Mapping[str, Object | None]


class WatchCache:
    """Objects by kind. Each (kind, namespace) scope is synced after its first list.

    The first catalog also awaits that the operator has published the engines of the services that have some: after an
    upgrade of both, the former gateways serve on meanwhile. Once it has published any, it runs, and the others may be
    awaited no longer.
    """

    def __init__(self, namespaces: Iterable[str] = ()) -> None:
        namespace_list: list[str | None] = list(namespaces) or [None]
        self._scopes: dict[tuple[str, str | None], dict[str, Object] | None] = {
            (resource.plural, namespace): None for resource, _ in WATCHED_RESOURCES for namespace in namespace_list
        }
        self._changed: dict[str, dict[str, Object | None]] = {resource.plural: {} for resource, _ in WATCHED_RESOURCES}
        self._synced = False
        self._unpublished: frozenset[str] | None = None  # None: to be found again

    @property
    def synced(self) -> bool:
        """Whether the first catalog can be made. Found when asked, not at each event: it is about all objects."""
        self._synced = self._synced or (self.is_listed and not self.unpublished)
        return self._synced

    @property
    def is_listed(self) -> bool:
        """Whether each scope has had its first list."""
        return all(scope is not None for scope in self._scopes.values())

    @property
    def not_ready_reason(self) -> str:
        """Returns why there is no first catalog, "" once it can be made."""
        if self.synced:
            return ""
        return _UNPUBLISHED % (len(self.unpublished), min(self.unpublished)) if self.is_listed else _UNLISTED

    @property
    def scopes(self) -> list[tuple[str, str | None]]:
        return list(self._scopes)

    def take_changes(self) -> ObjectChanges:
        """Returns what changed since the last call."""
        kinds = (INFERENCESERVICES, ENDPOINTSLICES, INFERENCESERVICEADMISSIONS)
        changed = ObjectChanges(*(self._changed[kind.plural] for kind in kinds))
        self._changed = {plural: {} for plural in self._changed}
        return changed

    def apply(self, resource: Resource, namespace: str | None, event: WatchEvent) -> None:
        """Apply one watch event of this scope."""
        scope_key, changed = (resource.plural, namespace), self._changed[resource.plural]
        scope = self._scopes[scope_key] or {}
        if event.type == "SYNC":
            listed = {_name(obj): obj for obj in event.objects}
            changed_objects = {name: obj for name, obj in listed.items() if not _is_same_version(scope.get(name), obj)}
            updated: dict[str, Object | None] = {**dict.fromkeys(scope.keys() - listed.keys()), **changed_objects}
            self._scopes[scope_key] = listed
        else:
            name = _name(event.object)
            if event.type == "DELETED":
                scope.pop(name, None)
                updated = {name: None}
            else:
                scope[name] = with_shared_parts(event.object, scope.get(name))
                updated = {name: scope[name]}
            self._scopes[scope_key] = scope
        changed |= updated
        self._unpublished = None

    def stop_waiting(self) -> None:
        """Let the first catalog wait no longer for what the operator publishes."""
        if reason := self.not_ready_reason:
            log.warning(reason)
            self._synced = True

    def _objects(self, resource: Resource) -> dict[str, Object]:
        scopes = (scope for (plural, _), scope in self._scopes.items() if plural == resource.plural)
        return {name: obj for scope in scopes for name, obj in (scope or {}).items()}

    @property
    def unpublished(self) -> frozenset[str]:
        """The services that have engines, of which the operator has not published what gateways need.

        Of a target that is the Service of its pods, too, which Kubernetes gives a slice also without any.
        """
        if self._unpublished is None:
            self._unpublished = self._find_unpublished()
        return self._unpublished

    @property
    def has_published(self) -> bool:
        """Whether the operator has published the engines of any service."""
        admissions = self._objects(INFERENCESERVICEADMISSIONS)
        return any(_is_published(obj, admissions.get(name)) for name, obj in self._objects(INFERENCESERVICES).items())

    def _find_unpublished(self) -> frozenset[str]:
        services, slices, admissions = map(
            self._objects, (INFERENCESERVICES, ENDPOINTSLICES, INFERENCESERVICEADMISSIONS)
        )
        of_slices = [(found[0], obj) for obj in slices.values() if (found := service_of(obj)) is not None]
        with_slices = {service for service, _ in of_slices}
        with_engines = {service for service, obj in of_slices if has_engines(obj)}
        return frozenset(
            name
            for name, obj in services.items()
            if not obj["metadata"].get("deletionTimestamp")
            and (
                (name in with_engines and not _is_published(obj, admissions.get(name)))
                or (name not in with_slices and _is_routed_target(obj))
            )
        )


def _is_published(service: Object, admission: Object | None) -> bool:
    return ENGINES in (admission_of(service, admission) or {})


def _is_routed_target(service: Object) -> bool:
    """Whether the operator is to make a Service for a target. It makes none by a selector with more than pairs."""
    selector = value_at(service, "status", "tiers", "serve", "podSelector")
    return bool(value_at(service, "spec", "targets")) and isinstance(selector, str) and bool(match_labels(selector))


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
            was_listed = cache.is_listed
            cache.apply(resource, namespace, event)
            if cache.is_listed and not was_listed:
                group.create_task(await_stragglers())
            on_change()

    async def await_stragglers() -> None:
        stragglers = cache.unpublished
        while not cache.synced:
            await asyncio.sleep(STRAGGLER_SECONDS)
            before, stragglers = stragglers, stragglers & cache.unpublished
            if cache.has_published and stragglers == before:
                cache.stop_waiting()
                on_change()

    selectors = {resource.plural: (resource, selector) for resource, selector in WATCHED_RESOURCES}
    async with asyncio.TaskGroup() as group:
        for plural, namespace in cache.scopes:
            resource, selector = selectors[plural]
            group.create_task(watch_scope(resource, namespace, selector))
