"""What Envoy starts from: its bootstrap, empty lists of clusters and of their bounds, and the FIFO of its access log.

`init` runs before Envoy and the picker, in an init container, so that either of them can be restarted alone: it leaves
what is already there and still right untouched.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Any

import orjson

from plimsoll.gateway.files import write
from plimsoll.gateway.listener import TYPE, listener, seconds
from plimsoll.gateway.settings import Settings

Json = dict[str, Any]

MAX_CONNECTIONS = 20_000  # about 0.1 MB of Envoy's memory each while a stream runs
UNBOUNDED = 1_000_000
# Envoy's workers hear of a changed health up to a second after its main thread, unless told not to gather changes.
RUNTIME = "bounds"  # what Envoy's clusters may hold, by file like the clusters
RUNTIME_FILE = "runtime.json"
HEALTH_AT_ONCE: Json = {"update_merge_window": "0s"}


def init(settings: Settings) -> None:
    """Make the files that Envoy and the picker share; idempotent."""
    settings.xds.mkdir(parents=True, exist_ok=True)
    _fifo(settings)
    for name, resources in (("cds.json", []), (RUNTIME_FILE, [runtime({})])):
        if not (settings.xds / name).exists():
            write(settings.xds / name, orjson.dumps({"version_info": "0", "resources": resources}))
    write(settings.bootstrap, orjson.dumps(bootstrap(settings), option=orjson.OPT_INDENT_2))


def _fifo(settings: Settings) -> None:
    if settings.fifo.exists() and not stat.S_ISFIFO(settings.fifo.stat().st_mode):
        settings.fifo.unlink()
    if not settings.fifo.exists():
        os.mkfifo(settings.fifo)
    settings.fifo.chmod(0o660)  # Envoy may run as another user of the same group


def bootstrap(settings: Settings) -> Json:
    """Envoy's bootstrap document."""
    return {
        "node": {"id": settings.pod, "cluster": "plimsoll-gateway"},
        "admin": {"address": {"pipe": {"path": str(settings.admin_socket), "mode": 0o660}}},
        "dynamic_resources": {"cds_config": _by_file(settings, "cds.json")},
        "layered_runtime": {
            "layers": [
                {"name": RUNTIME, "rtds_layer": {"name": RUNTIME, "rtds_config": _by_file(settings, RUNTIME_FILE)}}
            ]
        },
        "static_resources": {"listeners": [listener(settings)], "clusters": [_picker(settings)]},
        "overload_manager": {
            "resource_monitors": [
                {
                    "name": "envoy.resource_monitors.global_downstream_max_connections",
                    "typed_config": {
                        "@type": (
                            f"{TYPE}.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig"
                        ),
                        "max_active_downstream_connections": MAX_CONNECTIONS,
                    },
                }
            ]
        },
    }


def runtime(values: Mapping[str, int]) -> Json:
    """Runtime values as a resource of `RUNTIME_FILE`, which must hold just one."""
    return {"@type": "type.googleapis.com/envoy.service.runtime.v3.Runtime", "name": RUNTIME, "layer": dict(values)}


def _by_file(settings: Settings, name: str) -> Json:
    """A source of configuration that is one of the picker's files."""
    return {"resource_api_version": "V3", "path_config_source": {"path": str(settings.xds / name)}}


def _picker(settings: Settings) -> Json:
    """The picker on its socket. Unhealthy means at once unasked: no panic mode, which would ask it all the same."""
    return {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": "picker",
            "endpoints": [
                {"lb_endpoints": [{"endpoint": {"address": {"pipe": {"path": str(settings.picker_socket)}}}}]}
            ],
        },
        "circuit_breakers": {"thresholds": [unbounded()]},
        "per_connection_buffer_limit_bytes": settings.max_body_bytes,
        "health_checks": [
            {
                "timeout": seconds(1.0),
                "interval": seconds(0.5),
                "unhealthy_interval": seconds(0.2),
                "no_traffic_interval": seconds(0.5),
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "http_health_check": {"path": "/healthz"},
            }
        ],
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}} | HEALTH_AT_ONCE,
    }


def unbounded() -> Json:
    """Envoy's own limits on a cluster out of the way: they are the picker's to decide, at runtime if it is away."""
    return {"max_connections": UNBOUNDED, "max_pending_requests": UNBOUNDED, "max_requests": UNBOUNDED}
