"""InferenceObjectives of the Gateway API Inference Extension, as names of classes.

Problem: a user of another endpoint picker names an InferenceObjective in a header, and its priority says who is served
first. Plimsoll's services have classes, which have targets and shares as well.

Idea: an objective is one more name of a class: of that with the highest priority up to the objective's. It counts for
the service whose pool it names; a class of that very name comes first. The kind is optional, so each state without
objectives is logged with its remedy, and requests go on with the classes alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from plimsoll.adapters.kube_client import INFERENCEOBJECTIVES, UNREADABLE, Resource, WatchEvent
from plimsoll.adapters.normalize import value_at
from plimsoll.api import labels
from plimsoll.core.errors import Forbidden, NotFound
from plimsoll.gateway.service_catalog import ServiceCatalog
from plimsoll.gateway.watch_cache import WatchSource
from plimsoll.telemetry import gateway_metrics

log = logging.getLogger(__name__)

CHECK_SECONDS: Final = 30.0  # between two looks whether the kind can be listed
RETRY_SECONDS: Final = 2.0  # after a look that failed
SETTING: Final = "gateway.endpointPicker.inferenceObjectives"

Object = dict[str, Any]


class ObjectiveSource(WatchSource, Protocol):
    """The part of a Kubernetes client that reads objectives."""

    async def list(
        self, resource: Resource, namespace: str | None = None, selector: str | None = None
    ) -> tuple[list[Object], str]: ...


class ObjectiveStore:
    """The objectives of one namespace. `synced` is true once they are known, or why there are none."""

    def __init__(
        self, namespace: str, check_seconds: float = CHECK_SECONDS, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        self.synced = False
        self._namespace = namespace
        self._check_s = check_seconds
        self._retry_s = retry_seconds
        self._objects: dict[str, Object] = {}
        self._state = ""  # what was logged last
        self._ignored: dict[str, str] = {}  # why, by name

    def by_service(self) -> dict[str, dict[str, int]]:
        """Returns the priority of each objective by its name, for each service by NAMESPACE/NAME."""
        found: dict[str, dict[str, int]] = {}
        for name, obj in self._objects.items():
            if not _invalid(obj):
                service = f"{self._namespace}/{value_at(obj, 'spec', 'poolRef', 'name')}"
                found.setdefault(service, {})[name] = int(value_at(obj, "spec", "priority") or 0)
        return found

    def apply(self, event: WatchEvent) -> None:
        """Apply one event of the watch."""
        if event.type == "SYNC":
            self._objects = {obj["metadata"]["name"]: obj for obj in event.objects}
            self.synced = True
            self._tell("")
        elif event.type == "DELETED":
            self._objects.pop(event.object["metadata"]["name"], None)
        else:
            self._objects[event.object["metadata"]["name"]] = event.object

    def report(self, catalog: ServiceCatalog) -> None:
        """Set the metric of all objectives, and log each one that has become useless."""
        ignored = {}
        for name, obj in self._objects.items():
            pool = value_at(obj, "spec", "poolRef", "name")
            service = catalog.services.get(f"{self._namespace}/{pool}")
            if problem := _invalid(obj):
                ignored[name] = problem
            elif service is None:
                ignored[name] = f"spec.poolRef.name: no InferenceService {pool} in namespace {self._namespace}"
            elif service.policy is None:
                ignored[name] = f"InferenceService {pool} has no spec.slo, so it has no classes"
        for name in sorted(ignored.keys() - self._ignored.keys()):
            log.warning("InferenceObjective %s/%s is ignored: %s", self._namespace, name, ignored[name])
        self._ignored = ignored
        metric = gateway_metrics.GATEWAY_INFERENCE_OBJECTIVES
        metric.labels("used").set(len(self._objects) - len(ignored))
        metric.labels("ignored").set(len(ignored))

    async def follow(self, source: ObjectiveSource, on_change: Callable[[], None]) -> None:
        """Keep the objectives in sync with the API server. Never returns."""
        while (pause_s := await self._look(source)) > 0:
            on_change()
            await asyncio.sleep(pause_s)
        async for event in source.watch(INFERENCEOBJECTIVES, self._namespace):
            self.apply(event)
            on_change()

    async def _look(self, source: ObjectiveSource) -> float:
        """Returns the seconds until the next look, 0 if objectives can be watched."""
        place = f"InferenceObjectives in namespace {self._namespace}"
        try:
            await source.list(INFERENCEOBJECTIVES, self._namespace)
        except NotFound:
            self._tell(
                f"the cluster has no kind {INFERENCEOBJECTIVES.kind} of {INFERENCEOBJECTIVES.api_version}: install the"
                f" CRDs of the Gateway API Inference Extension, or set {SETTING} to false"
            )
        except Forbidden as error:
            self._tell(
                f"the gateway may not list {place} ({error}): grant its role list and watch, or set {SETTING} to false"
            )
        except UNREADABLE as error:
            self._tell(f"cannot list {place}; trying again: {error}")
            return self._retry_s
        else:
            return 0.0
        self.synced = True
        return self._check_s

    def _tell(self, state: str) -> None:
        """Log a new state, and set the metric that shows it. "" is that objectives are known."""
        gateway_metrics.GATEWAY_INFERENCE_OBJECTIVES_WATCHED.set(not state)
        if state != self._state:
            log.warning("no InferenceObjectives: %s", state) if state else log.info("InferenceObjectives are known")
            self._state = state


def _invalid(obj: Mapping[str, Any]) -> str:
    """Returns why an objective cannot name a class, "" if it can."""
    reference, priority = value_at(obj, "spec", "poolRef"), value_at(obj, "spec", "priority")
    group, kind = value_at(reference, "group") or labels.POOL_GROUP, value_at(reference, "kind") or labels.POOL_KIND
    if not isinstance(value_at(reference, "name"), str):
        return "spec.poolRef.name is missing"
    if (group, kind) != (labels.POOL_GROUP, labels.POOL_KIND):
        return f"spec.poolRef names {group}/{kind}, not {labels.POOL_GROUP}/{labels.POOL_KIND}"
    if priority is not None and (isinstance(priority, bool) or not isinstance(priority, int)):
        return f"spec.priority is {priority!r}, not an integer"
    return ""
