"""Envoy's initial files: its bootstrap and the FIFO of its access log.

`plimsoll gateway init` runs in an init container before Envoy and the picker, so that each of them can restart alone.
It leaves existing valid files unchanged.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import orjson

from plimsoll.gateway.atomic_write import write_if_changed
from plimsoll.gateway.envoy.body_filters import TYPE_URL, duration
from plimsoll.gateway.envoy.jwt import jwks_clusters
from plimsoll.gateway.envoy.listener import (
    listener_resource,
)
from plimsoll.gateway.envoy.overload import overload_manager
from plimsoll.gateway.envoy.tls import ADS
from plimsoll.gateway.envoy.tracing import traces_clusters
from plimsoll.gateway.settings import PickerSettings

Json = dict[str, Any]

MAX_CLUSTER_REQUESTS = 1_000_000
RUNTIME_LAYER = "bounds"  # request limits of clusters, delivered like the clusters
MAX_FETCHED_BYTES = 1 << 20  # of a response that Envoy reads for itself: keys of JWT issuers, and the picker's checks
ADS_CLUSTER = "discovery"
# By default Envoy merges health changes for up to 1 s before its workers see them.
NO_HEALTH_MERGE: Json = {"update_merge_window": "0s"}


def write_files(settings: PickerSettings) -> None:
    """Write the files that Envoy and the picker share. Idempotent."""
    settings.directory.mkdir(parents=True, exist_ok=True)
    _ensure_fifo(settings)
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
        "dynamic_resources": {"ads_config": _ads_config(), "cds_config": ADS},
        "layered_runtime": {
            "layers": [
                {"name": "constants", "static_layer": {"http.async_response_buffer_limit": MAX_FETCHED_BYTES}},
                {
                    "name": RUNTIME_LAYER,
                    "rtds_layer": {"name": RUNTIME_LAYER, "rtds_config": ADS},
                },
            ]
        },
        "static_resources": {
            "listeners": [listener_resource(settings)],
            "clusters": [
                _picker_cluster(settings),
                _ads_cluster(settings),
                *jwks_clusters(settings),
                *traces_clusters(settings),
            ],
        },
        "overload_manager": overload_manager(settings),
    }


def _ads_config() -> Json:
    """Returns how Envoy asks the picker for its configuration: changes only, and soon again after its restart."""
    return {
        "api_type": "DELTA_GRPC",
        "transport_api_version": "V3",
        "grpc_services": [
            {
                "envoy_grpc": {
                    "cluster_name": ADS_CLUSTER,
                    "retry_policy": {"retry_back_off": {"base_interval": "0.2s", "max_interval": "1s"}},
                }
            }
        ],
    }


def _ads_cluster(settings: PickerSettings) -> Json:
    return {
        "name": ADS_CLUSTER,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": _unix_socket(ADS_CLUSTER, settings.ads_socket),
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{TYPE_URL}.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
    }


def _unix_socket(cluster: str, path: Path) -> Json:
    """Returns the load assignment of a cluster with one unix socket."""
    endpoint = {"endpoint": {"address": {"pipe": {"path": str(path)}}}}
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": [endpoint]}]}


def _picker_cluster(settings: PickerSettings) -> Json:
    """Returns the cluster of the picker. Panic mode is off, so Envoy sends nothing to an unhealthy picker."""
    return {
        "name": "picker",
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": _unix_socket("picker", settings.picker_socket),
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
    """Returns thresholds that lift Envoy's default limits. The picker limits requests, or the runtime layer does."""
    return {
        "max_connections": MAX_CLUSTER_REQUESTS,
        "max_pending_requests": MAX_CLUSTER_REQUESTS,
        "max_requests": MAX_CLUSTER_REQUESTS,
    }
