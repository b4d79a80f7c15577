"""Envoy's initial files: its bootstrap, empty cluster and runtime resources, and the FIFO of its access log.

`plimsoll gateway init` runs in an init container before Envoy and the picker, so that each of them can restart alone.
It leaves existing valid files unchanged.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Any

import orjson

from plimsoll.gateway.atomic_write import write_if_changed
from plimsoll.gateway.envoy.listener import TYPE_URL, duration, listener_resource
from plimsoll.gateway.settings import PickerSettings

Json = dict[str, Any]

MAX_CONNECTIONS = 20_000  # about 0.1 MB of Envoy's memory each while a stream runs
MAX_CLUSTER_REQUESTS = 1_000_000
RUNTIME_LAYER = "bounds"  # request limits of clusters, delivered by file like the clusters
RUNTIME_FILE = "runtime.json"
# By default Envoy merges health changes for up to 1 s before its workers see them.
NO_HEALTH_MERGE: Json = {"update_merge_window": "0s"}


def write_files(settings: PickerSettings) -> None:
    """Write the files that Envoy and the picker share. Idempotent."""
    settings.xds.mkdir(parents=True, exist_ok=True)
    _ensure_fifo(settings)
    for name, resources in (("cds.json", []), (RUNTIME_FILE, [runtime_resource({})])):
        if not (settings.xds / name).exists():
            write_if_changed(settings.xds / name, orjson.dumps({"version_info": "0", "resources": resources}))
    write_if_changed(settings.bootstrap, orjson.dumps(bootstrap(settings), option=orjson.OPT_INDENT_2))


def _ensure_fifo(settings: PickerSettings) -> None:
    if settings.fifo.exists() and not stat.S_ISFIFO(settings.fifo.stat().st_mode):
        settings.fifo.unlink()
    if not settings.fifo.exists():
        os.mkfifo(settings.fifo)
    settings.fifo.chmod(0o660)  # Envoy may run as another user of the same group


def bootstrap(settings: PickerSettings) -> Json:
    """Returns Envoy's bootstrap document."""
    return {
        "node": {"id": settings.pod, "cluster": "plimsoll-gateway"},
        "admin": {"address": {"pipe": {"path": str(settings.admin_socket), "mode": 0o660}}},
        "dynamic_resources": {"cds_config": _path_config_source(settings, "cds.json")},
        "layered_runtime": {
            "layers": [
                {
                    "name": RUNTIME_LAYER,
                    "rtds_layer": {"name": RUNTIME_LAYER, "rtds_config": _path_config_source(settings, RUNTIME_FILE)},
                }
            ]
        },
        "static_resources": {"listeners": [listener_resource(settings)], "clusters": [_picker_cluster(settings)]},
        "overload_manager": {
            "resource_monitors": [
                {
                    "name": "envoy.resource_monitors.global_downstream_max_connections",
                    "typed_config": {
                        "@type": (
                            f"{TYPE_URL}.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig"
                        ),
                        "max_active_downstream_connections": MAX_CONNECTIONS,
                    },
                }
            ]
        },
    }


def runtime_resource(values: Mapping[str, int]) -> Json:
    """Returns runtime values as the one resource of `RUNTIME_FILE`."""
    return {
        "@type": "type.googleapis.com/envoy.service.runtime.v3.Runtime",
        "name": RUNTIME_LAYER,
        "layer": dict(values),
    }


def _path_config_source(settings: PickerSettings, name: str) -> Json:
    """Returns the config source for one of the picker's files."""
    return {"resource_api_version": "V3", "path_config_source": {"path": str(settings.xds / name)}}


def _picker_cluster(settings: PickerSettings) -> Json:
    """Returns the cluster of the picker. Panic mode is off, so Envoy sends nothing to an unhealthy picker."""
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
        "circuit_breakers": {"thresholds": [unbounded_thresholds()]},
        "per_connection_buffer_limit_bytes": settings.max_body_bytes,
        "health_checks": [
            {
                "timeout": duration(1.0),
                "interval": duration(0.5),
                "unhealthy_interval": duration(0.2),
                "no_traffic_interval": duration(0.5),
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                "http_health_check": {"path": "/healthz"},
            }
        ],
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}} | NO_HEALTH_MERGE,
    }


def unbounded_thresholds() -> Json:
    """Returns thresholds that lift Envoy's default limits. The picker limits requests, or `RUNTIME_FILE` does."""
    return {
        "max_connections": MAX_CLUSTER_REQUESTS,
        "max_pending_requests": MAX_CLUSTER_REQUESTS,
        "max_requests": MAX_CLUSTER_REQUESTS,
    }
