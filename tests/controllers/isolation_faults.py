"""Faults that a test sets into one object, and how many errors were counted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from plimsoll.adapters.kube_client import INFERENCESERVICES, PODS, KubeClient, Resource, WatchEvent
from plimsoll.controllers.isolation import Stage
from plimsoll.core.errors import NotFound
from plimsoll.telemetry import operator_metrics

Object = dict[str, Any]

CHAT, OTHER = ("team", "chat"), ("team", "other")


def error_count(stage: Stage) -> float:
    name = "plimsoll_operator_internal_errors_total"
    return operator_metrics.OPERATOR.get_sample_value(name, {"stage": stage.value}) or 0.0


def fail(*_: Any, **__: Any) -> Any:
    raise KeyError("finishedAt")


class Cluster(KubeClient):
    """An API server that keeps what is written; pod_events: what its watch of pods says."""

    def __init__(self, *pod_events: WatchEvent) -> None:
        self.pod_events = pod_events
        self.statuses: list[Object] = []
        self.scaled: list[str] = []
        self.service: Object = {}

    async def watch(self, resource: Any, *_: Any) -> AsyncIterator[WatchEvent]:  # type: ignore[override]
        for event in self.pod_events if resource is PODS else ():
            yield event

    async def apply(self, obj: Object, *_: Any, **options: Any) -> Object:
        if options.get("subresource") == "status":
            self.statuses.append(obj["status"])
            return {**self.service, "status": obj["status"]}
        return obj

    async def get(self, resource: Any, *_: Any) -> Object:
        if resource is INFERENCESERVICES and self.service:
            return self.service
        raise NotFound("no object is there before it is applied")

    async def create(self, obj: Object) -> Object:
        return obj

    async def is_terminating(self, namespace: str) -> bool:
        return False

    async def scale(self, resource: Resource, namespace: str, name: str, replicas: int, manager: str) -> None:
        self.scaled.append(name)
