"""Envoy's clusters, endpoints and request limits, computed from a catalog and encoded for its discovery service (xDS).

Each service has one endpoint resource, a `model/NAME` cluster for each model name, and a `pick/NAMESPACE/NAME` cluster.
Envoy balances a `model/NAME` cluster by itself while the picker does not respond. The picker names the endpoint of a
`pick/` cluster. All clusters of a service read the same endpoints. Prefill engines are in no cluster, because clients
never reach them.

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

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Modules of the messages that only their type URL names.
import envoy.extensions.load_balancing_policies.least_request.v3.least_request_pb2
import envoy.extensions.load_balancing_policies.override_host.v3.override_host_pb2
import envoy.extensions.transport_sockets.raw_buffer.v3.raw_buffer_pb2
import envoy.extensions.transport_sockets.tls.v3.tls_pb2
import envoy.extensions.upstreams.http.v3.http_protocol_options_pb2  # noqa: F401
import xxhash
from envoy.config.cluster.v3.cluster_pb2 import Cluster
from envoy.config.endpoint.v3.endpoint_pb2 import ClusterLoadAssignment
from envoy.extensions.transport_sockets.tls.v3.secret_pb2 import Secret
from envoy.service.discovery.v3 import discovery_pb2
from envoy.service.runtime.v3.rtds_pb2 import Runtime
from google.protobuf.json_format import ParseDict

from plimsoll.adapters.certificate_files import CertificatePair
from plimsoll.adapters.internal_tls import TlsIdentity
from plimsoll.core.routing.endpoint import Endpoint
from plimsoll.gateway.envoy.body_filters import TYPE_URL
from plimsoll.gateway.envoy.bootstrap import NO_HEALTH_MERGE, RUNTIME_LAYER, unbounded_thresholds
from plimsoll.gateway.envoy.listener import (
    CONNECTION_BUFFER_BYTES,
    MODEL_CLUSTER_PREFIX,
    PICK_CLUSTER_PREFIX,
)
from plimsoll.gateway.envoy.tls import (
    ADS,
    CERTIFICATE,
    ENGINE_AUTHORITY,
    ENGINE_CERTIFICATE,
    SOCKET_MATCH,
    TLS_MATCH,
    engine_socket_matches,
)
from plimsoll.gateway.envoy.virtual_host import METADATA
from plimsoll.gateway.service_catalog import ServiceCatalog, ServiceEntry

Json = dict[str, Any]

CLUSTER_TYPE = f"{TYPE_URL}.config.cluster.v3.Cluster"
ENDPOINTS_TYPE = f"{TYPE_URL}.config.endpoint.v3.ClusterLoadAssignment"
RUNTIME_TYPE = f"{TYPE_URL}.service.runtime.v3.Runtime"
SECRET_TYPE = f"{TYPE_URL}.extensions.transport_sockets.tls.v3.Secret"
# Below the 5 s after which vLLM closes an idle connection: a request sent during the close would be lost.
UPSTREAM_IDLE = "3s"


@dataclass(frozen=True, slots=True)
class XdsResource:
    """One encoded resource. Its version is a hash of its content, so an equal one is not sent to Envoy again.

    `service` is the key of its service, "" for all. `addresses` are those of an endpoint resource.
    """

    message: Any  # an envoy.service.discovery.v3.Resource
    service: str = ""
    addresses: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return str(self.message.name)

    @property
    def version(self) -> str:
        return str(self.message.version)


@dataclass(frozen=True, slots=True)
class XdsSnapshot:
    """All resources by type URL and name. Of a type that is not here Envoy keeps what it has."""

    by_type: Mapping[str, Mapping[str, XdsResource]]

    def __contains__(self, type_url: str) -> bool:
        return type_url in self.by_type

    def __getitem__(self, type_url: str) -> Mapping[str, XdsResource]:
        return self.by_type.get(type_url, {})


EMPTY_SNAPSHOT = XdsSnapshot({})


@dataclass(slots=True)
class _ServiceResources:
    """The encoded resources of one service, each with the values that it was made from."""

    entry: ServiceEntry | None = None
    names: tuple[str, ...] = ()
    max_sequences: int = -1
    clusters: dict[str, XdsResource] = field(default_factory=dict)
    serving: tuple[Endpoint, ...] | None = None
    endpoints: XdsResource | None = None
    adapters: dict[str, str] = field(default_factory=dict)  # by model name
    limit: int | None = None
    limits: bytes = b""  # an encoded Runtime message with this service's entries


class SnapshotBuilder:
    """Makes snapshots. Only resources of services that changed since the last one are encoded."""

    def __init__(self, gateway: str, has_engine_tls: bool = False) -> None:
        """`gateway` is this pod's name, under which the operator publishes its share of each engine.

        has_engine_tls: Envoy has a client certificate for the engines that require one.
        """
        self._gateway = gateway
        self._has_engine_tls = has_engine_tls
        self._services: dict[str, _ServiceResources] = {}
        self.encoded = 0  # resources encoded so far

    def build(self, catalog: ServiceCatalog) -> XdsSnapshot:
        """Returns the snapshot of a catalog."""
        owned: dict[str, list[str]] = {key: [] for key in catalog.services}
        for name, service in catalog.by_name.items():
            if not service.isolates_tenants:  # without the picker, Envoy knows no tenant
                owned[service.key].append(name)
        self._services = {key: self._services.get(key) or _ServiceResources() for key in sorted(catalog.services)}
        clusters: dict[str, XdsResource] = {}
        endpoints: dict[str, XdsResource] = {}
        for key, resources in self._services.items():
            self._update(resources, catalog.services[key], tuple(sorted(owned[key])))
            clusters |= resources.clusters
            assert resources.endpoints is not None
            endpoints[key] = resources.endpoints
        runtime = self._runtime()
        return XdsSnapshot({CLUSTER_TYPE: clusters, ENDPOINTS_TYPE: endpoints, RUNTIME_TYPE: {RUNTIME_LAYER: runtime}})

    def _update(self, resources: _ServiceResources, service: ServiceEntry, names: tuple[str, ...]) -> None:
        if resources.entry is service and resources.names == names:
            return
        serving = service.serving_endpoints
        adapters = {name: entry.name for name, entry in service.adapters.items()}
        known = resources.names, resources.adapters, resources.max_sequences
        if known != (names, adapters, service.max_sequences):
            documents = [_pick_cluster(service), *(_model_cluster(service, name) for name in names)]
            if self._has_engine_tls:
                matches = engine_socket_matches(service.key.partition("/")[0])
                documents = [{**document, "transport_socket_matches": matches} for document in documents]
            resources.clusters = {d["name"]: self._encode(CLUSTER_TYPE, Cluster, d, service.key) for d in documents}
        if resources.serving != serving:
            addresses = frozenset(endpoint.address for endpoint in serving)
            assignment = _load_assignment(service.key, serving)
            resources.endpoints = self._encode(
                ENDPOINTS_TYPE, ClusterLoadAssignment, assignment, service.key, addresses
            )
        limit = _max_requests(service, self._gateway)
        if (resources.names, resources.limit) != (names, limit):
            resources.limits = b"" if limit is None else _runtime_entries(names, limit)
        resources.names, resources.max_sequences, resources.serving = names, service.max_sequences, serving
        resources.limit, resources.entry, resources.adapters = limit, service, adapters

    def _encode(
        self, type_url: str, message: type[Any], document: Json, service: str, addresses: frozenset[str] = frozenset()
    ) -> XdsResource:
        self.encoded += 1
        name = document.get("name") or document["cluster_name"]
        content = ParseDict(document, message()).SerializeToString(deterministic=True)
        return XdsResource(_resource(type_url, name, content), service, addresses)

    def _runtime(self) -> XdsResource:
        """Returns all limits as one resource. Messages of one type that follow each other are merged when parsed."""
        content = Runtime(name=RUNTIME_LAYER).SerializeToString() + b"".join(r.limits for r in self._services.values())
        return XdsResource(_resource(RUNTIME_TYPE, RUNTIME_LAYER, content))


def with_certificate(snapshot: XdsSnapshot, pair: CertificatePair | None) -> XdsSnapshot:
    """Returns the snapshot with the listener's certificate, if there is one."""
    return snapshot if pair is None else _with_secrets(snapshot, _pair_secret(CERTIFICATE, pair))


def with_engine_identity(snapshot: XdsSnapshot, identity: TlsIdentity | None) -> XdsSnapshot:
    """Returns the snapshot with the client certificate and the authority for engines, if there are any."""
    if identity is None:
        return snapshot
    authority = Secret(name=ENGINE_AUTHORITY)
    authority.validation_context.trusted_ca.inline_bytes = identity.authority
    return _with_secrets(snapshot, _pair_secret(ENGINE_CERTIFICATE, identity.pair), authority)


def _pair_secret(name: str, pair: CertificatePair) -> Secret:
    secret = Secret(name=name)
    secret.tls_certificate.certificate_chain.inline_bytes = pair.certificate
    secret.tls_certificate.private_key.inline_bytes = pair.key
    return secret


def _with_secrets(snapshot: XdsSnapshot, *secrets: Secret) -> XdsSnapshot:
    contents = {secret.name: secret.SerializeToString(deterministic=True) for secret in secrets}
    resources = {name: XdsResource(_resource(SECRET_TYPE, name, content)) for name, content in contents.items()}
    return XdsSnapshot({**snapshot.by_type, SECRET_TYPE: {**snapshot[SECRET_TYPE], **resources}})


def _resource(type_url: str, name: str, content: bytes) -> Any:
    message = discovery_pb2.Resource(name=name, version=xxhash.xxh3_64_hexdigest(content))
    message.resource.type_url, message.resource.value = type_url, content
    return message


def _runtime_entries(names: tuple[str, ...], limit: int) -> bytes:
    """Returns the limits of one service's `model/` clusters as an encoded message."""
    layer = {f"circuit_breakers.{MODEL_CLUSTER_PREFIX}{name}.default.max_requests": limit for name in names}
    return bytes(ParseDict({"layer": layer}, Runtime()).SerializeToString(deterministic=True))


def _max_requests(service: ServiceEntry, gateway: str) -> int | None:
    """Returns an equal share of the slots at all engines, or None if the service has no cost model.

    It counts while the picker is away, and with it what any owner has decided.
    """
    policy = service.policy
    if policy is None or policy.limits is None or policy.limits.cost_model is None or not policy.has_cost_model:
        return None
    gateways = len(policy.limits.shares.keys() | {gateway})
    return max(1, policy.limits.cost_model.batch // gateways) * len(service.serving_endpoints)


def _load_assignment(key: str, endpoints: tuple[Endpoint, ...]) -> Json:
    return {"cluster_name": key, "endpoints": [{"lb_endpoints": [_lb_endpoint(endpoint) for endpoint in endpoints]}]}


def _lb_endpoint(endpoint: Endpoint) -> Json:
    ip, _, port = endpoint.address.rpartition(":")
    found = {"endpoint": {"address": {"socket_address": {"address": ip.strip("[]"), "port_value": int(port)}}}}
    return found | ({"metadata": {"filter_metadata": {SOCKET_MATCH: TLS_MATCH}}} if endpoint.tls_name else {})


def _pick_cluster(service: ServiceEntry) -> Json:
    return _cluster(PICK_CLUSTER_PREFIX + service.key, service) | {"load_balancing_policy": _override_host_policy()}


def _model_cluster(service: ServiceEntry, name: str) -> Json:
    """The cluster of a model name while the picker is away. That of an adapter tells engines which one it is."""
    cluster = _cluster(MODEL_CLUSTER_PREFIX + name, service) | {"lb_policy": "LEAST_REQUEST"}
    if (adapter := service.adapters.get(name)) is not None:
        cluster["metadata"]["filter_metadata"][METADATA]["adapter"] = adapter.name
    return cluster


def _cluster(name: str, service: ServiceEntry) -> Json:
    return {
        "name": name,
        "metadata": {"filter_metadata": {METADATA: {"service": service.key}}},
        "type": "EDS",
        "connect_timeout": "1s",
        "per_connection_buffer_limit_bytes": CONNECTION_BUFFER_BYTES,
        "eds_cluster_config": {"service_name": service.key, "eds_config": ADS},
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
