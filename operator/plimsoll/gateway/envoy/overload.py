"""Envoy's limits on memory and connections, from the memory limit of its container.

Problem: a container that exceeds its memory limit is killed, and all streams of the gateway with it.

Idea: most memory is bodies, whose sum `body_filters` bounds before they are read. The rest is bounded by numbers per
connection and per stream. When the heap grows in spite of that, Envoy first returns free memory, then takes no new
requests and connections, and at last ends the streams that hold most. It can tell those of HTTP/2 only.
"""

from __future__ import annotations

from typing import Any

from plimsoll.gateway.envoy.body_filters import TYPE_URL
from plimsoll.gateway.settings import PickerSettings

Json = dict[str, Any]

HEAP = "envoy.resource_monitors.fixed_heap"
CONNECTIONS = "envoy.resource_monitors.global_downstream_max_connections"
REFRESH_SECONDS = "0.250s"  # a body of 8 MiB arrives within 0.1 s on a fast network
# Shares of the heap limit at which the actions begin. Those that end a client's work come last.
SHRINK_HEAP_AT = 0.75
NO_KEEPALIVE_AT = 0.85
NO_REQUESTS_AT = 0.9
NO_CONNECTIONS_AT = 0.93
RESET_STREAMS_AT = (0.95, 1.0)  # from the largest streams to all that hold `TRACKED_STREAM_BYTES`
TRACKED_STREAM_BYTES_LOG2 = 17
IDLE_TIMEOUT_FLOOR = "5s"


def overload_manager(settings: PickerSettings) -> Json:
    """Returns the overload manager of the bootstrap."""
    monitors = f"{TYPE_URL}.extensions.resource_monitors"
    heap = {"@type": f"{monitors}.fixed_heap.v3.FixedHeapConfig", "max_heap_size_bytes": settings.max_heap_bytes}
    connections = {
        "@type": f"{monitors}.downstream_connections.v3.DownstreamConnectionsConfig",
        "max_active_downstream_connections": settings.max_connections,
    }
    return {
        "refresh_interval": REFRESH_SECONDS,
        "resource_monitors": [
            {"name": HEAP, "typed_config": heap},
            {"name": CONNECTIONS, "typed_config": connections},
        ],
        "buffer_factory_config": {"minimum_account_to_track_power_of_two": TRACKED_STREAM_BYTES_LOG2},
        "actions": [
            _action("shrink_heap", {"threshold": {"value": SHRINK_HEAP_AT}}),
            _shorter_idle_timeout(),
            _action("disable_http_keepalive", {"threshold": {"value": NO_KEEPALIVE_AT}}),
            _action("stop_accepting_requests", {"threshold": {"value": NO_REQUESTS_AT}}),
            _action("reject_incoming_connections", {"threshold": {"value": NO_CONNECTIONS_AT}}),
            _action("reset_high_memory_stream", _scaled(*RESET_STREAMS_AT)),
        ],
    }


def _action(name: str, trigger: Json) -> Json:
    return {"name": f"envoy.overload_actions.{name}", "triggers": [{"name": HEAP, **trigger}]}


def _scaled(begin: float, full: float) -> Json:
    return {"scaled": {"scaling_threshold": begin, "saturation_threshold": full}}


def _shorter_idle_timeout() -> Json:
    timer = {"timer": "HTTP_DOWNSTREAM_CONNECTION_IDLE", "min_timeout": IDLE_TIMEOUT_FLOOR}
    return _action("reduce_timeouts", _scaled(SHRINK_HEAP_AT, NO_KEEPALIVE_AT)) | {
        "typed_config": {
            "@type": f"{TYPE_URL}.config.overload.v3.ScaleTimersOverloadActionConfig",
            "timer_scale_factors": [timer],
        }
    }
