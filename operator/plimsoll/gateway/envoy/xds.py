"""Envoy's clusters and endpoints: documents computed from a catalog, and their files.

Each service has one endpoint file, a `model/NAME` cluster for each model name, and a `pick/NAMESPACE/NAME` cluster.
Envoy balances a `model/NAME` cluster by itself while the picker does not respond. The picker names the endpoint of a
`pick/` cluster. All clusters of a service read the same file, so they have the same pods. Prefill engines are in no
cluster, because clients never reach them.

The metadata of a cluster has the service's key, by which engines know their model. The route sends it with each
request, whether the picker responds or not.

While the picker does not respond there is no admission control. A `model/NAME` cluster then limits its concurrent
requests to this gateway's slots at all engines, or has no limit if the service has no cost model. The limit changes
with engines and shares. A cluster that is replaced would lose the count of its running streams, so the limit is a
runtime value that Envoy reads for each request.

Only connection failures eject an endpoint, and only more of them than one engine has streams. Cut streams count as
connection failures, and clients can cause an ordinary 500.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from plimsoll.core.routing.endpoint import Endpoint
from plimsoll.gateway.atomic_write import write_if_changed
from plimsoll.gateway.envoy.bootstrap import NO_HEALTH_MERGE, RUNTIME_FILE, runtime_resource, unbounded_thresholds
from plimsoll.gateway.envoy.listener import METADATA, TYPE_URL
from plimsoll.gateway.service_catalog import ServiceCatalog, ServiceEntry

Json = dict[str, Any]

PICK_CLUSTER_PREFIX = "pick/"
MODEL_CLUSTER_PREFIX = "model/"
# Below the 5 s after which vLLM closes an idle connection: a request sent during the close would be lost.
UPSTREAM_IDLE = "3s"


def publish(catalog: ServiceCatalog, directory: Path, gateway: str) -> int:
    """Write the changed files under `directory`. Returns how many files were written or removed.

    `gateway` is this pod's name, under which the operator publishes its share of each engine.
    Endpoint files are written before the cluster list that names them, and removed after it.
    """
    endpoint_files = directory / "endpoints"
    endpoint_files.mkdir(exist_ok=True)
    documents = {endpoint_file(service): endpoint_document(service) for service in catalog.services.values()}
    written = sum(write_if_changed(endpoint_files / name, document) for name, document in documents.items())
    written += write_if_changed(directory / RUNTIME_FILE, runtime_document(catalog, gateway))
    written += write_if_changed(directory / "cds.json", cluster_document(catalog, endpoint_files))
    for stale in {path.name for path in endpoint_files.glob("*.json")} - documents.keys():
        (endpoint_files / stale).unlink()
        written += 1
    return written


def endpoint_file(service: ServiceEntry) -> str:
    """Returns a file name that is unique, because a namespace contains no dot."""
    return f"{service.namespace}.{service.name}.json"


def endpoint_document(service: ServiceEntry) -> bytes:
    """Returns a service's endpoints as an EDS response."""
    assignment = {
        "@type": f"{TYPE_URL}.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": service.key,
        "endpoints": [{"lb_endpoints": [_lb_endpoint(endpoint) for endpoint in service.serving_endpoints]}],
    }
    return _discovery_response([assignment])


def cluster_document(catalog: ServiceCatalog, endpoint_files: Path) -> bytes:
    """Returns all clusters as a CDS response."""
    clusters: list[Json] = []
    for service in sorted(catalog.services.values(), key=lambda s: s.key):
        path = endpoint_files / endpoint_file(service)
        clusters.append(
            _cluster(PICK_CLUSTER_PREFIX + service.key, service, path)
            | {"load_balancing_policy": _override_host_policy()}
        )
        names = (name for name in service.names if catalog.by_name[name].key == service.key)
        clusters += [
            _cluster(MODEL_CLUSTER_PREFIX + name, service, path) | {"lb_policy": "LEAST_REQUEST"} for name in names
        ]
    return _discovery_response(clusters)


def runtime_document(catalog: ServiceCatalog, gateway: str) -> bytes:
    """Returns Envoy's runtime values: the concurrent-request limit of each `model/NAME` cluster."""
    max_requests = {name: _max_requests(service, gateway) for name, service in sorted(catalog.by_name.items())}
    layer = {
        f"circuit_breakers.{MODEL_CLUSTER_PREFIX}{name}.default.max_requests": limit
        for name, limit in max_requests.items()
        if limit is not None
    }
    return _discovery_response([runtime_resource(layer)])


def _max_requests(service: ServiceEntry, gateway: str) -> int | None:
    """Returns this gateway's slots at all engines, or None if the service has no cost model."""
    policy = service.policy
    if policy is None or policy.limits is None or not policy.has_cost_model:
        return None
    return policy.limits.slot_limit(gateway) * len(service.serving_endpoints)


def _discovery_response(resources: Iterable[Json]) -> bytes:
    resource_list = list(resources)
    version = hashlib.sha256(orjson.dumps(resource_list)).hexdigest()[:16]
    return orjson.dumps({"version_info": version, "resources": resource_list}, option=orjson.OPT_INDENT_2)


def _lb_endpoint(endpoint: Endpoint) -> Json:
    ip, _, port = endpoint.address.rpartition(":")
    return {"endpoint": {"address": {"socket_address": {"address": ip.strip("[]"), "port_value": int(port)}}}}


def _cluster(name: str, service: ServiceEntry, path: Path) -> Json:
    return {
        "@type": f"{TYPE_URL}.config.cluster.v3.Cluster",
        "name": name,
        "metadata": {"filter_metadata": {METADATA: {"service": service.key}}},
        "type": "EDS",
        "connect_timeout": "1s",
        "eds_cluster_config": {
            "service_name": service.key,
            "eds_config": {"resource_api_version": "V3", "path_config_source": {"path": str(path)}},
        },
        "common_lb_config": NO_HEALTH_MERGE,
        "circuit_breakers": {
            "thresholds": [
                unbounded_thresholds()
                | {"retry_budget": {"budget_percent": {"value": 25.0}, "min_retry_concurrency": 100}}
            ]
        },
        "outlier_detection": {
            "split_external_local_origin_errors": True,
            "consecutive_local_origin_failure": service.max_sequences + 1,
            "enforcing_consecutive_5xx": 0,
            "enforcing_consecutive_gateway_failure": 0,
            "enforcing_success_rate": 0,
            "enforcing_local_origin_success_rate": 0,
            "enforcing_failure_percentage": 0,
            "interval": "1s",
            "base_ejection_time": "5s",
            "max_ejection_percent": 50,
        },
        # A node that vanished sends no reset; without probes its streams would hang until the idle timeout.
        "upstream_connection_options": {
            "tcp_keepalive": {"keepalive_probes": 3, "keepalive_time": 15, "keepalive_interval": 5}
        },
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{TYPE_URL}.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http_protocol_options": {}},
                "common_http_protocol_options": {"idle_timeout": UPSTREAM_IDLE},
            }
        },
    }


def _override_host_policy() -> Json:
    policies = f"{TYPE_URL}.extensions.load_balancing_policies"
    least_request = {
        "name": "envoy.load_balancing_policies.least_request",
        "typed_config": {"@type": f"{policies}.least_request.v3.LeastRequest"},
    }
    override_host = {
        "name": "envoy.load_balancing_policies.override_host",
        "typed_config": {
            "@type": f"{policies}.override_host.v3.OverrideHost",
            "override_host_sources": [{"header": "x-plimsoll-endpoint"}],
            "fallback_policy": {"policies": [{"typed_extension_config": least_request}]},
        },
    }
    return {"policies": [{"typed_extension_config": override_host}]}
