"""Clusters and endpoints for Envoy: documents from a fleet, and their files.

Per service: one endpoint file; a `model/NAME` cluster for each name it answers to, which Envoy balances by itself
when the picker does not answer; and a `pick/NAMESPACE/NAME` cluster, whose endpoint the picker names. All of them
read the same file, so what is picked and what is failed open to are the same pods. Prefill engines are in none:
clients never reach them.

A cluster's metadata has the service's key, by which engines know the model: the route sends it with each request,
whether the picker answers or not.

While the picker does not answer there is no gate, so a `model/NAME` cluster takes no more requests at once than the
gate would let this gateway have at all engines; where there never is one it takes all. That number moves with engines
and shares, and a cluster that is made anew would no longer tell of the streams that it has: so it is a runtime value,
which Envoy looks up for each request.

Connection failures alone can eject an endpoint, and more of them than one engine has streams: cut streams count as
connection failures, and an ordinary 500 is something that clients can cause.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from plimsoll.core.picking.endpoint import Endpoint
from plimsoll.gateway.bootstrap import HEALTH_AT_ONCE, RUNTIME_FILE, runtime, unbounded
from plimsoll.gateway.endpoints import Fleet, Service
from plimsoll.gateway.files import write
from plimsoll.gateway.listener import METADATA, TYPE

Json = dict[str, Any]

PICK = "pick/"
MODEL = "model/"
# Below the 5 s after which vLLM closes an idle connection: a request sent into that closing would be lost.
UPSTREAM_IDLE = "3s"


def publish(fleet: Fleet, directory: Path, gateway: str) -> int:
    """Bring the files under `directory` in line with the fleet; returns how many were written.

    gateway: this pod's name, by which the operator has given it a share of each engine.

    Endpoint files come before the list that names them, and go after it.
    """
    endpoint_files = directory / "endpoints"
    endpoint_files.mkdir(exist_ok=True)
    wanted = {endpoint_file(service): endpoint_document(service) for service in fleet.services.values()}
    written = sum(write(endpoint_files / name, document) for name, document in wanted.items())
    written += write(directory / RUNTIME_FILE, runtime_document(fleet, gateway))
    written += write(directory / "cds.json", cluster_document(fleet, endpoint_files))
    for stale in {path.name for path in endpoint_files.glob("*.json")} - wanted.keys():
        (endpoint_files / stale).unlink()
        written += 1
    return written


def endpoint_file(service: Service) -> str:
    """A namespace has no dot in it, so no two services share a file."""
    return f"{service.namespace}.{service.name}.json"


def endpoint_document(service: Service) -> bytes:
    """A service's endpoints as an EDS response."""
    assignment = {
        "@type": f"{TYPE}.config.endpoint.v3.ClusterLoadAssignment",
        "cluster_name": service.key,
        "endpoints": [{"lb_endpoints": [_lb_endpoint(endpoint) for endpoint in service.answering]}],
    }
    return _response([assignment])


def cluster_document(fleet: Fleet, endpoint_files: Path) -> bytes:
    """All clusters as a CDS response."""
    clusters: list[Json] = []
    for service in sorted(fleet.services.values(), key=lambda s: s.key):
        path = endpoint_files / endpoint_file(service)
        clusters.append(_cluster(PICK + service.key, service, path) | {"load_balancing_policy": _override_host()})
        names = (name for name in service.names if fleet.by_name[name].key == service.key)
        clusters += [_cluster(MODEL + name, service, path) | {"lb_policy": "LEAST_REQUEST"} for name in names]
    return _response(clusters)


def runtime_document(fleet: Fleet, gateway: str) -> bytes:
    """Envoy's runtime values: the most requests at once of each cluster that is used without the picker."""
    most = {name: _most_requests(service, gateway) for name, service in sorted(fleet.by_name.items())}
    layer = {f"circuit_breakers.{MODEL}{name}.default.max_requests": m for name, m in most.items() if m is not None}
    return _response([runtime(layer)])


def _most_requests(service: Service, gateway: str) -> int | None:
    """What the gate would let this gateway have at all engines; None where there is no gate."""
    policy = service.policy
    if policy is None or policy.published is None or not policy.gated:
        return None
    return policy.published.units(gateway) * len(service.answering)


def _response(resources: Iterable[Json]) -> bytes:
    listed = list(resources)
    version = hashlib.sha256(orjson.dumps(listed)).hexdigest()[:16]
    return orjson.dumps({"version_info": version, "resources": listed}, option=orjson.OPT_INDENT_2)


def _lb_endpoint(endpoint: Endpoint) -> Json:
    ip, _, port = endpoint.address.rpartition(":")
    return {"endpoint": {"address": {"socket_address": {"address": ip.strip("[]"), "port_value": int(port)}}}}


def _cluster(name: str, service: Service, path: Path) -> Json:
    return {
        "@type": f"{TYPE}.config.cluster.v3.Cluster",
        "name": name,
        "metadata": {"filter_metadata": {METADATA: {"service": service.key}}},
        "type": "EDS",
        "connect_timeout": "1s",
        "eds_cluster_config": {
            "service_name": service.key,
            "eds_config": {"resource_api_version": "V3", "path_config_source": {"path": str(path)}},
        },
        "common_lb_config": HEALTH_AT_ONCE,
        "circuit_breakers": {
            "thresholds": [
                unbounded() | {"retry_budget": {"budget_percent": {"value": 25.0}, "min_retry_concurrency": 100}}
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
        # A node that vanished says nothing; without probes its streams would hang until the idle timeout.
        "upstream_connection_options": {
            "tcp_keepalive": {"keepalive_probes": 3, "keepalive_time": 15, "keepalive_interval": 5}
        },
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": f"{TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http_protocol_options": {}},
                "common_http_protocol_options": {"idle_timeout": UPSTREAM_IDLE},
            }
        },
    }


def _override_host() -> Json:
    policies = f"{TYPE}.extensions.load_balancing_policies"
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
