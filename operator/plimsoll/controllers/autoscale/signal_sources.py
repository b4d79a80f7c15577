"""Where the scaling tick gets its inputs from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from plimsoll.adapters.launcher import StartupProgress
from plimsoll.controllers.object_cache import Key
from plimsoll.controllers.targets.target_state import TargetState
from plimsoll.core.ports import EngineInfo, GatewayReading, MetricsHistory

Object = dict[str, Any]


@dataclass(frozen=True)
class SignalSources:
    """Inputs of the tick.

    gateways: fresh readings, and the names of all gateways. engine_info, startup_progress, running_requests: last
    report of an engine, by pod name. cached_tokens: prompt tokens that its prefix cache has saved in the last minutes.
    mark_active: called for a service with arrivals, so that its engines are polled more often. history: None if no
    metrics store is configured. prometheus_only_tiers: tiers of a service with an engine that is known from the metrics
    store only. checkpoint: learned state that an earlier process has stored for a service. targets: the targets of a
    service by role, {} for one with tiers. on_target_written: called with service, role and uid of a target whose
    replica count was set.
    """

    gateways: Callable[[], tuple[Iterable[GatewayReading], Iterable[str]]]
    engine_info: Callable[[str, str], EngineInfo | None]
    startup_progress: Callable[[str, str], StartupProgress | None]
    running_requests: Callable[[str, str], float | None] = lambda namespace, pod: None
    cached_tokens: Callable[[str, str], float] = lambda namespace, pod: 0.0
    mark_active: Callable[[Key], None] = lambda key: None
    history: MetricsHistory | None = None
    prometheus_only_tiers: Callable[[Key], tuple[str, ...]] = lambda key: ()
    checkpoint: Callable[[Object], str | None] = lambda service_object: None
    targets: Callable[[Key], Mapping[str, TargetState]] = lambda key: {}
    on_target_written: Callable[[Key, str, str], None] = lambda key, role, uid: None
