"""One engine pod as the poller sees it: where to ask it, when, and what it answered last."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

from plimsoll.adapters.engine_of_pod import MetricsAddress, has_launcher, metrics_address
from plimsoll.adapters.launcher import StartupProgress
from plimsoll.adapters.normalize import value_at
from plimsoll.adapters.pod_tls import tls_name
from plimsoll.api import labels
from plimsoll.controllers import pod_startup
from plimsoll.controllers.fair_slots import Group
from plimsoll.controllers.object_cache import Key, owning_service
from plimsoll.core.autoscaling.scale_down_candidates import CacheHits
from plimsoll.core.ports import EngineInfo, EngineReading
from plimsoll.core.types import Role

Object = dict[str, Any]

_ROLES: Final = frozenset(Role)


@dataclass(eq=False)
class PolledPod:
    """One engine pod. metrics: where they are; None for an engine without any. launched: whether a launcher reports.

    source: the cached object. adopted: the object of a target's pod. The properties of an engine that was not
    launched come with its metrics.
    metrics_due_s, info_due_s: next poll by the monotonic clock; infinite for none.
    """

    uid: str
    name: str
    key: Key
    node: str
    role: Role
    address: str
    is_ready: bool
    metrics: MetricsAddress | None
    launched: bool
    source: Object
    tls_name: str = ""  # in its certificate, "" for plain HTTP
    adopted: Object | None = None
    metrics_due_s: float = math.inf
    info_due_s: float = math.inf
    steps: float | None = None
    running_requests: float | None = None  # waiting ones included, from the last reading
    cache_hits: CacheHits = field(default_factory=CacheHits)
    metrics_failures: int = 0  # consecutive failures of /metrics
    external_scrape_s: float = -math.inf  # time of the last reading from the metrics store
    info_failures: int = 0  # consecutive failures of /about
    engine_info: EngineInfo | None = None
    first_reading: EngineReading | None = None  # of the running container, of an engine without a launcher
    startup_progress: StartupProgress | None = None  # of the running container
    container_started_s: float | None = None

    def __post_init__(self) -> None:
        self.group = Group(self.key[0], self.node)

    @property
    def subject(self) -> str:
        """Kind, namespace and name of the pod, as messages name it."""
        return f"Pod {self.key[0]}/{self.name}"


def polled_pod(obj: Object) -> PolledPod | None:
    """The pod's poll state; None unless it is an engine pod with an address that is not terminating."""
    meta, key = obj["metadata"], owning_service(obj)
    role, address = (meta.get("labels") or {}).get(labels.ROLE), obj.get("status", {}).get("podIP")
    if key is None or role not in _ROLES or not address or pod_startup.is_terminating(obj):
        return None
    adopted = obj if obj["kind"] == labels.ADOPTED_POD_KIND else None
    return PolledPod(
        meta["uid"],
        meta["name"],
        key,
        str(value_at(obj, "spec", "nodeName") or ""),
        Role(role),
        address,
        pod_startup.is_ready(obj),
        metrics_address(obj),
        has_launcher(obj),
        obj,
        tls_name(obj) if has_launcher(obj) else "",
        adopted,
        container_started_s=pod_startup.container_started_s(obj),
    )
