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
from plimsoll.gateway.engine_slices import engines_of, service_of
from plimsoll.gateway.service_catalog import ENGINES

log = logging.getLogger(__name__)

Object = dict[str, Any]

ENGINES_SECONDS: Final = 60.0  # then services whose engines are not published hold up no other
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

    The first catalog also awaits that the operator has published the engines of each service that has some, but not for
    longer than `ENGINES_SECONDS`: after an upgrade of both, the former gateways serve on meanwhile.
    """

    def __init__(self, namespaces: Iterable[str] = ()) -> None:
        namespace_list: list[str | None] = list(namespaces) or [None]
        self._scopes: dict[tuple[str, str | None], dict[str, Object] | None] = {
            (resource.plural, namespace): None for resource, _ in WATCHED_RESOURCES for namespace in namespace_list
        }
        self._changed: dict[str, dict[str, Object | None]] = {resource.plural: {} for resource, _ in WATCHED_RESOURCES}
        self._synced = False

    @property
    def synced(self) -> bool:
        return self._synced

    @property
    def is_listed(self) -> bool:
        """Whether each scope has had its first list."""
        return all(scope is not None for scope in self._scopes.values())

    @property
    def not_ready_reason(self) -> str:
        """Returns why there is no first catalog, "" once it can be made."""
        if self._synced:
            return ""
        unpublished = self._unpublished()
        return _UNPUBLISHED % (len(unpublished), unpublished[0]) if self.is_listed and unpublished else _UNLISTED

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
        if not self._synced and self.is_listed:
            self._synced = not self._unpublished()

    def stop_waiting(self) -> None:
        """Let the first catalog wait no longer for what the operator publishes."""
        if not self._synced and self.is_listed:
            log.warning(self.not_ready_reason)
            self._synced = True

    def _objects(self, resource: Resource) -> dict[str, Object]:
        scopes = (scope for (plural, _), scope in self._scopes.items() if plural == resource.plural)
        return {name: obj for scope in scopes for name, obj in (scope or {}).items()}

    def _unpublished(self) -> list[str]:
        """Returns the services that have engines, of which the operator has not published what gateways need.

        Of a target that is the Service of its pods, too, which Kubernetes gives a slice also without any.
        """
        services, slices, admissions = map(
            self._objects, (INFERENCESERVICES, ENDPOINTSLICES, INFERENCESERVICEADMISSIONS)
        )
        of_slices = [(service_of(obj), engines_of(obj)) for obj in slices.values()]
        with_slices = {service[0] for service, _ in of_slices if service is not None}
        with_engines = {found[0] for _, found in of_slices if found is not None and found[1]}
        return sorted(
            name
            for name, obj in services.items()
            if (name in with_engines and ENGINES not in (admission_of(obj, admissions.get(name)) or {}))
            or (name not in with_slices and _is_routed_target(obj))
        )


def _is_routed_target(service: Object) -> bool:
    return bool(value_at(service, "spec", "targets") and value_at(service, "status", "tiers", "serve", "podSelector"))


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
                asyncio.get_running_loop().call_later(ENGINES_SECONDS, stop_waiting)
            on_change()

    def stop_waiting() -> None:
        cache.stop_waiting()
        on_change()

    selectors = {resource.plural: (resource, selector) for resource, selector in WATCHED_RESOURCES}
    async with asyncio.TaskGroup() as group:
        for plural, namespace in cache.scopes:
            resource, selector = selectors[plural]
            group.create_task(watch_scope(resource, namespace, selector))
