"""A cache of API objects, fed by watches.

One watch per kind and namespace, and one for the pods of each target that takes requests, feeds a `WatchCache` and
calls `on_change` after each event. The caller merges a burst of events into one change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from plimsoll.adapters.kube_client import INFERENCESERVICEADMISSIONS, INFERENCESERVICES, PODS, Resource, WatchEvent
from plimsoll.adapters.shared_parts import with_shared_parts
from plimsoll.api import labels
from plimsoll.gateway.target_pods import TargetPods, TargetSelection, selection_of

log = logging.getLogger(__name__)

Object = dict[str, Any]

TARGET_LIST_SECONDS: Final = 10.0  # then a target whose pods cannot be listed holds up no other service
_UNLISTED: Final = (
    "InferenceService %s/%s: the API server has not listed its pods for %.0f s, and until it does, its requests find no"
    " engine; check status.tiers.serve.podSelector, which is %s"
)
MAX_TARGETS: Final = 200  # the operator publishes the selectors of half as many
_TOO_MANY: Final = (
    "InferenceService %s gets no requests: %d others have status.tiers.serve.podSelector, more than the operator"
    " publishes; find who else writes the status of InferenceServices"
)
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
    """Objects by kind. Each (kind, namespace) scope is synced after its first list.

    The first catalog also awaits the pods of targets, but of none for longer than `TARGET_LIST_SECONDS`. Later a target
    that is new waits for its pods alone.
    """

    def __init__(self, namespaces: Iterable[str] = ()) -> None:
        namespace_list: list[str | None] = list(namespaces) or [None]
        self._scopes: dict[tuple[str, str | None], dict[str, Object] | None] = {
            (resource.plural, namespace): None for resource, _ in WATCHED_RESOURCES for namespace in namespace_list
        }
        self._changed: dict[str, dict[str, Object | None]] = {resource.plural: {} for resource, _ in WATCHED_RESOURCES}
        self._targets: dict[str, TargetPods] = {}  # by service
        self._synced = False

    @property
    def synced(self) -> bool:
        return self._synced

    @property
    def selections(self) -> frozenset[TargetSelection]:
        """The targets whose pods take requests."""
        return frozenset(target.selection for target in self._targets.values())

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
        if resource == INFERENCESERVICES:
            for name, obj in updated.items():
                self._select(name, obj)
        self._update_synced()

    def apply_target(self, selection: TargetSelection, event: WatchEvent) -> None:
        """Apply one watch event of a target's pods. One of a selection that is gone changes nothing."""
        target = self._targets.get(f"{selection.namespace}/{selection.service}")
        if target is not None and target.selection == selection:
            self._changed[PODS.plural] |= target.apply(event)
            self._update_synced()

    def stop_waiting(self, selection: TargetSelection) -> bool:
        """Let the first catalog wait no longer for the pods of a target. Returns whether it did."""
        target = self._targets.get(f"{selection.namespace}/{selection.service}")
        if self._synced or target is None or target.selection != selection or not target.is_awaited:
            return False
        target.is_awaited = False
        self._update_synced()
        return True

    def _select(self, name: str, service: Object | None) -> None:
        selection, target = None if service is None else selection_of(service), self._targets.get(name)
        if selection is None:
            if target is not None:
                self._changed[PODS.plural] |= dict.fromkeys(self._targets.pop(name).pods)
        elif target is None and len(self._targets) >= MAX_TARGETS:
            log.warning(_TOO_MANY, name, MAX_TARGETS)
        elif target is None:
            self._targets[name] = TargetPods(selection)
        elif target.selection != selection:
            target.selection, target.is_awaited = selection, True

    def _update_synced(self) -> None:
        are_listed = all(scope is not None for scope in self._scopes.values())
        self._synced |= are_listed and not any(target.is_awaited for target in self._targets.values())


def _is_same_version(previous: Object | None, obj: Object) -> bool:
    version = obj["metadata"].get("resourceVersion")
    return previous is not None and version is not None and previous["metadata"].get("resourceVersion") == version


def _name(obj: Object) -> str:
    meta = obj["metadata"]
    return f"{meta['namespace']}/{meta['name']}"


def _stop_waiting(cache: WatchCache, selection: TargetSelection, on_change: Callable[[], None]) -> None:
    if cache.stop_waiting(selection):
        log.warning(_UNLISTED, selection.namespace, selection.service, TARGET_LIST_SECONDS, selection.selector)
        on_change()


async def run_watches(source: WatchSource, cache: WatchCache, on_change: Callable[[], None]) -> None:
    """Keep `cache` in sync with the API server. Never returns."""

    async def watch_scope(resource: Resource, namespace: str | None, selector: str | None) -> None:
        async for event in source.watch(resource, namespace, selector):
            cache.apply(resource, namespace, event)
            if resource == INFERENCESERVICES:
                follow_targets()
            on_change()

    async def watch_target(selection: TargetSelection) -> None:
        async for event in source.watch(PODS, selection.namespace, selection.selector):
            cache.apply_target(selection, event)
            on_change()

    def follow_targets() -> None:
        for gone in target_tasks.keys() - cache.selections:
            target_tasks.pop(gone).cancel()
        for new in cache.selections - target_tasks.keys():
            target_tasks[new] = group.create_task(watch_target(new))
            asyncio.get_running_loop().call_later(TARGET_LIST_SECONDS, _stop_waiting, cache, new, on_change)

    target_tasks: dict[TargetSelection, asyncio.Task[None]] = {}

    selectors = {resource.plural: (resource, selector) for resource, selector in WATCHED_RESOURCES}
    async with asyncio.TaskGroup() as group:
        for plural, namespace in cache.scopes:
            resource, selector = selectors[plural]
            group.create_task(watch_scope(resource, namespace, selector))
