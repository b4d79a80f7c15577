"""Which pods of a target take requests, and the pods themselves as a watch has them.

Problem: engines of `spec.targets` have no label of Plimsoll, so no fixed watch finds them.

Idea: the operator publishes in the status the label selector of each target that it could read. The gateway watches the
pods of each such selector, and makes the same copies of them as the operator does. From there on they are engine pods
like others. While a new selection is listed, the pods of the former one stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plimsoll.adapters.adopted_pod import adopted_copy, is_of_tier
from plimsoll.adapters.kube_client import WatchEvent
from plimsoll.adapters.normalize import value_at
from plimsoll.adapters.shared_parts import with_shared_parts
from plimsoll.core.types import Role

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TargetSelection:
    """The pods that take the requests of a service. port: of their API."""

    namespace: str
    service: str
    role: str
    selector: str
    port: int


def selection_of(service: Mapping[str, Any]) -> TargetSelection | None:
    """Returns the selection of a service; None without one, and while the operator has not published its selector."""
    meta, role = service["metadata"], Role.SERVE.value
    port = value_at(service, "spec", "targets", role, "port")
    selector = value_at(service, "status", "tiers", role, "podSelector")
    if meta.get("deletionTimestamp") or not isinstance(port, int) or not isinstance(selector, str) or not selector:
        return None
    return TargetSelection(meta["namespace"], meta["name"], role, selector, port)


@dataclass(slots=True)
class TargetPods:
    """The pods of one selection; until its first list, those of the former one. is_awaited: by the first catalog."""

    selection: TargetSelection
    pods: dict[str, Object] = field(default_factory=dict)
    is_awaited: bool = True

    def apply(self, event: WatchEvent) -> dict[str, Object | None]:
        """Apply an event of the watch. Returns the pods that changed, None for one that is gone."""
        if event.type == "SYNC":
            listed = {self._name(pod): self._copy(pod) for pod in event.objects if not is_of_tier(pod)}
            changed: dict[str, Object | None] = dict.fromkeys(self.pods.keys() - listed.keys())
            self.pods, self.is_awaited = listed, False
            return changed | listed
        name = self._name(event.object)
        if event.type == "DELETED" or is_of_tier(event.object):
            return {} if self.pods.pop(name, None) is None else {name: None}
        self.pods[name] = with_shared_parts(self._copy(event.object), self.pods.get(name))
        return {name: self.pods[name]}

    def _copy(self, pod: Object) -> Object:
        return adopted_copy(pod, self.selection.service, self.selection.role, {"port": self.selection.port})

    def _name(self, pod: Object) -> str:
        """A name that no other watch gives a pod, which two selectors may match for a moment."""
        return f"{self.selection.namespace}/{self.selection.service}/{pod['metadata']['name']}"
