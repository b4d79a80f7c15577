"""The configuration of an Envoy with the ext_proc filter, as implementations of InferencePool make it."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

SUBSET_HEADER = "x-test-subset"  # sets the subset hint
DESTINATION = "x-gateway-destination-endpoint"
TYPE = "type.googleapis.com/envoy"
DUPLEX: Json = {
    "request_header_mode": "SEND",
    "response_header_mode": "SEND",
    "request_body_mode": "FULL_DUPLEX_STREAMED",
    "response_body_mode": "FULL_DUPLEX_STREAMED",
    "request_trailer_mode": "SEND",
    "response_trailer_mode": "SEND",
}
BUFFERED: Json = {
    "request_header_mode": "SEND",
    "response_header_mode": "SEND",
    "request_body_mode": "BUFFERED",
    "response_body_mode": "STREAMED",
    "request_trailer_mode": "SKIP",
    "response_trailer_mode": "SKIP",
}
# Envoy answers 504 after it if it buffers bodies. If it streams them, answers may take any time.
MESSAGE_TIMEOUTS = {False: "0.2s", True: "60s"}  # by whether it buffers


def envoy_config(listen: str, admin: str, picker: str, mode: Json, engines: tuple[str, ...]) -> Json:
    """The bootstrap of an Envoy that listens at an address and asks the endpoint picker at another.

    `engines` are the endpoints of its cluster; without them it goes to any address that the picker names.
    """
    manager = {
        "@type": f"{TYPE}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [_subset_filter(), _ext_proc_filter(mode), _filter("router", "router.v3.Router")],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    listener = {
        "name": "in",
        "address": _address(listen),
        "per_connection_buffer_limit_bytes": 16 << 20,
        "filter_chains": [chain],
    }
    return {
        "admin": {"address": _address(admin)},
        "static_resources": {
            "listeners": [listener],
            "clusters": [_picker_cluster(picker), _pool(engines) if engines else _any_address()],
        },
    }


def _filter(name: str, kind: str, **fields: Any) -> Json:
    config = {"@type": f"{TYPE}.extensions.filters.http.{kind}", **fields}
    return {"name": f"envoy.filters.http.{name}", "typed_config": config}


def _subset_filter() -> Json:
    present = {"metadata_namespace": "envoy.lb.subset_hint", "key": "x-gateway-destination-endpoint-subset"}
    rule = {"header": SUBSET_HEADER, "on_header_present": {**present, "type": "STRING"}, "remove": True}
    return _filter("header_to_metadata", "header_to_metadata.v3.Config", request_rules=[rule])


def _ext_proc_filter(mode: Json) -> Json:
    return _filter(
        "ext_proc",
        "ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}},
        processing_mode=mode,
        message_timeout=MESSAGE_TIMEOUTS[mode is BUFFERED],
        metadata_options={
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    )


def _picker_cluster(address: str) -> Json:
    protocol = f"{TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions"
    return {
        "name": "picker",
        "type": "STRICT_DNS",
        "connect_timeout": "5s",
        "circuit_breakers": {"thresholds": [{"max_requests": 100_000, "max_pending_requests": 100_000}]},
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": protocol,
                "explicit_http_config": {"http2_protocol_options": {}},
            }
        },
        "load_assignment": _endpoints("picker", (address,)),
    }


def _any_address() -> Json:
    return {
        "name": "pool",
        "type": "ORIGINAL_DST",
        "connect_timeout": "5s",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
    }


def _pool(engines: tuple[str, ...]) -> Json:
    policies = f"{TYPE}.extensions.load_balancing_policies"
    override = {
        "name": "envoy.load_balancing_policies.override_host",
        "typed_config": {
            "@type": f"{policies}.override_host.v3.OverrideHost",
            "override_host_sources": [{"metadata": {"key": "envoy.lb", "path": [{"key": DESTINATION}]}}],
            "fallback_policy": {
                "policies": [
                    {
                        "typed_extension_config": {
                            "name": "envoy.load_balancing_policies.random",
                            "typed_config": {"@type": f"{policies}.random.v3.Random"},
                        }
                    }
                ]
            },
        },
    }
    return {
        "name": "pool",
        "type": "STATIC",
        "connect_timeout": "5s",
        "load_balancing_policy": {"policies": [{"typed_extension_config": override}]},
        "load_assignment": _endpoints("pool", engines),
    }


def _endpoints(cluster: str, addresses: tuple[str, ...]) -> Json:
    endpoints = [{"endpoint": {"address": _address(address)}} for address in addresses]
    return {"cluster_name": cluster, "endpoints": [{"lb_endpoints": endpoints}]}


def _address(address: str) -> Json:
    host, _, port = address.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}
