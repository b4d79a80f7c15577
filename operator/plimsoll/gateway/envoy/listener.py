"""Envoy's listener: which requests it accepts and in which form. `virtual_host` has the routes.

Problem: an engine serves more paths than the API, decodes paths leniently, reads bodies of any size and waits forever
for incomplete ones. A client can send the gateway's internal headers, and it can open streams without end.

Idea: Envoy enforces all restrictions, so they do not depend on the picker. What no route matches is rejected before
the filter that buffers the body. Internal headers are stripped before routing. Sizes and times are limited.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from plimsoll.gateway.deadlines import TIMEOUT_HEADERS
from plimsoll.gateway.envoy.access_log_config import ACCESS_LOG_OPTIONS, end_log, running_log
from plimsoll.gateway.envoy.body_filters import (
    BODY_BYTES_HEADER,
    RESERVE_FILTER,
    RESERVE_PREFIX,
    RESERVE_SECONDS,
    TYPE_URL,
    clear_no_answer,
    duration,
    rate_filter,
    without_answer,
)
from plimsoll.gateway.envoy.jwt import jwt_filters
from plimsoll.gateway.envoy.local_reply import (
    HEALTH,
    MAX_HEADERS,
    MAX_HEADERS_KIB,
    local_reply_config,
    plain_http_config,
)
from plimsoll.gateway.envoy.source_limits import grouped_chains, source_filter
from plimsoll.gateway.envoy.tls import tls_chain, tls_inspector
from plimsoll.gateway.envoy.tracing import ATTRIBUTE_PREFIX, tracing
from plimsoll.gateway.envoy.virtual_host import CHECK_FILTER, CORS, REJECTION_HEADERS, direct_response, virtual_host
from plimsoll.gateway.identity import CREDENTIAL_HEADERS, FORWARDED_FOR
from plimsoll.gateway.jwt_issuers import PAYLOAD_HEADER
from plimsoll.gateway.key_limits import RATE_LIMIT_HEADERS
from plimsoll.gateway.request_bounds import UPSTREAM_TIMEOUT_HEADER
from plimsoll.gateway.settings import ApiKeyMode, PickerSettings, Plaintext

Json = dict[str, Any]

STAT_PREFIX = "gateway"
CLIENT_IDLE = "660s"  # without a request; load balancers keep idle connections for up to 600 s
CHECK_PREFIX = "/check"  # prefix of the client's path in ext_authz checks
CONNECTION_BUFFER_BYTES = 64 << 10  # what is kept for a client or an engine that reads slowly
MAX_STREAMS_PER_CONNECTION = 100  # of HTTP/2
PICK_CLUSTER_PREFIX = "pick/"  # clusters whose endpoint the picker names, by NAMESPACE/NAME
MODEL_CLUSTER_PREFIX = "model/"  # clusters that Envoy balances by itself, by model name

# Request headers that ext_authz forwards to the picker.
CHECK_HEADERS = (
    "content-type",
    "x-request-id",
    "x-stainless-retry-count",
    "idempotency-key",
    "x-plimsoll-request-id",
    *TIMEOUT_HEADERS,
)


def listener_resource(settings: PickerSettings) -> Json:
    """Returns the listener as an Envoy resource."""
    return {
        "name": "api",
        "address": {"socket_address": {"address": settings.address, "port_value": settings.port}},
        "per_connection_buffer_limit_bytes": CONNECTION_BUFFER_BYTES,
        # Waits for a connection's first bytes, and closes one that sends none.
        "listener_filters": [source_filter(), _http_inspector() if settings.tls_directory is None else tls_inspector()],
        "listener_filters_timeout": duration(settings.headers_timeout_seconds),
        **grouped_chains(_chains(settings), settings),
    }


def _chains(settings: PickerSettings) -> dict[str, Json]:
    """Returns the filter chain of each transport protocol: TLS, if the gateway has it, and all others."""
    manager = _http_connection_manager(settings)
    if settings.tls_directory is None:
        return {"": {"filters": [_network_filter(manager)]}}
    plain = manager if settings.plaintext is Plaintext.ALLOW else _refuse_plain_http(manager, settings)
    handshake_timeout = duration(settings.headers_timeout_seconds)
    return {
        "tls": tls_chain(_network_filter(manager), settings, handshake_timeout),
        "": {"filters": [_network_filter(plain)]},
    }


def _network_filter(manager: Json) -> Json:
    return {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}


def _refuse_plain_http(manager: Json, settings: PickerSettings) -> Json:
    """Returns a connection manager with the same limits that answers each request with an error."""
    host = {"name": "plain", "domains": ["*"], "routes": [direct_response({"prefix": "/"}, 400)]}
    shared = {name: value for name, value in manager.items() if name not in ("tracing", "access_log_options")}
    return {
        **shared,
        "stat_prefix": "plain_http",
        "local_reply_config": plain_http_config(),
        "route_config": {"name": "plain", "virtual_hosts": [host]},
        "http_filters": [_router_filter()],
        "access_log": [end_log(settings)] if settings.access_log else [],
    }


def _http_connection_manager(settings: PickerSettings) -> Json:
    return {
        "@type": f"{TYPE_URL}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": STAT_PREFIX,
        "codec_type": "AUTO",
        "use_remote_address": True,
        "server_header_transformation": "OVERWRITE",
        "server_name": "plimsoll",
        "generate_request_id": True,
        "preserve_external_request_id": True,
        "always_set_request_id_in_response": True,
        "stream_idle_timeout": duration(settings.idle_timeout_seconds),
        "request_headers_timeout": duration(settings.headers_timeout_seconds),
        "request_timeout": duration(settings.body_timeout_seconds),
        "common_http_protocol_options": {
            "headers_with_underscores_action": "DROP_HEADER",
            "idle_timeout": CLIENT_IDLE,
            "max_headers_count": MAX_HEADERS,
        },
        "max_request_headers_kb": MAX_HEADERS_KIB,
        "http_protocol_options": {"override_stream_error_on_invalid_http_message": True},
        "http2_protocol_options": {
            "override_stream_error_on_invalid_http_message": True,
            "max_concurrent_streams": MAX_STREAMS_PER_CONNECTION,
            "initial_stream_window_size": 256 << 10,
            "initial_connection_window_size": 1 << 20,
        },
        "normalize_path": True,
        "merge_slashes": False,
        # Clients escape the slash of the model NAMESPACE/NAME. Routes match the decoded path, as engines do.
        "path_with_escaped_slashes_action": "UNESCAPE_AND_FORWARD",
        "early_header_mutation_extensions": [_header_mutation()],
        "local_reply_config": local_reply_config(settings.max_body_bytes),
        "route_config": {"name": "api", "virtual_hosts": [virtual_host(settings)]},
        "http_filters": [
            _cors(),
            _health(),
            *jwt_filters(settings),
            _reserve_filter(settings),
            rate_filter(),
            clear_no_answer(),
            _check_filter(settings),
            without_answer(_lua_filter("failopen.lua")),
            *([_lua_filter("usage.lua")] if settings.access_log else []),
            _router_filter(),
        ],
        "access_log": [end_log(settings), running_log(settings)],
        "access_log_options": ACCESS_LOG_OPTIONS,
        **tracing(settings),
    }


def _header_mutation() -> Json:
    """Strip the internal headers of the gateway and Envoy from client requests, and set those of the request."""
    request_id = {"key": "x-plimsoll-request-id", "value": "%UNIQUE_ID%"}
    body_bytes = {"key": BODY_BYTES_HEADER, "value": "%REQ(CONTENT-LENGTH)%"}
    return {
        "name": "envoy.http.early_header_mutation.header_mutation",
        "typed_config": {
            "@type": f"{TYPE_URL}.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
            "mutations": [
                {"remove_on_match": {"key_matcher": {"prefix": "x-plimsoll-"}}},
                {"remove_on_match": {"key_matcher": {"prefix": "x-envoy-"}}},
                {"remove": "x-data-parallel-rank"},
                {"append": {"header": request_id, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}},
                {"append": {"header": body_bytes, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}},
            ],
        },
    }


def _cors() -> Json:
    """The CORS filter. It does nothing unless the virtual host has a CORS policy."""
    return {"name": CORS, "typed_config": {"@type": f"{TYPE_URL}.extensions.filters.http.cors.v3.Cors"}}


def _health() -> Json:
    """The health check for load balancers: 200 while this gateway serves, with or without its picker."""
    path = {"name": ":path", "string_match": {"safe_regex": {"regex": rf"{HEALTH}(\?.*)?"}}}
    method = {"name": ":method", "string_match": {"safe_regex": {"regex": "GET|HEAD"}}}
    return {
        "name": "envoy.filters.http.health_check",
        "typed_config": {
            "@type": f"{TYPE_URL}.extensions.filters.http.health_check.v3.HealthCheck",
            "pass_through_mode": False,
            "headers": [path, method],
        },
    }


def _reserve_filter(settings: PickerSettings) -> Json:
    """Ask the picker for room before a large body is read."""
    headers = ("x-plimsoll-request-id", BODY_BYTES_HEADER, *_identity_headers(settings))
    more = {"stat_prefix": "reserve", **_failure_mode(settings)}
    return _ext_authz_filter(RESERVE_FILTER, RESERVE_PREFIX, RESERVE_SECONDS, headers, more)


def _check_filter(settings: PickerSettings) -> Json:
    """Ask the picker about the request, with its body."""
    headers = (*CHECK_HEADERS, *_identity_headers(settings))
    body = {
        **_failure_mode(settings),
        "clear_route_cache": True,
        "with_request_body": {"max_request_bytes": settings.max_body_bytes, "pack_as_bytes": True},
    }
    return _ext_authz_filter(CHECK_FILTER, CHECK_PREFIX, settings.pick_timeout_seconds, headers, body)


def _identity_headers(settings: PickerSettings) -> tuple[str, ...]:
    """Returns the headers from which the picker learns who sends a request. Envoy itself appends the source to one."""
    has_issuers = bool(settings.jwt_issuers)
    credentials = CREDENTIAL_HEADERS if has_issuers or settings.api_keys is not ApiKeyMode.DISABLED else ()
    payload = (PAYLOAD_HEADER,) if has_issuers else ()
    trusted = (settings.class_header, settings.tenant_header) if settings.trust_identity_headers else ()
    return (*credentials, *payload, *trusted, FORWARDED_FOR)


def _failure_mode(settings: PickerSettings) -> Json:
    """Returns what happens while the picker does not answer: only it can check the credentials that are required."""
    if settings.requires_credentials:
        return {"failure_mode_allow": False, "status_on_error": {"code": "ServiceUnavailable"}}
    return {"failure_mode_allow": True, "failure_mode_allow_header_add": True}


def _ext_authz_filter(name: str, prefix: str, timeout_s: float, headers: tuple[str, ...], more: Json) -> Json:
    return {
        "name": name,
        "disabled": True,  # routes to engines enable it; no other route buffers the body
        "typed_config": {
            "@type": f"{TYPE_URL}.extensions.filters.http.ext_authz.v3.ExtAuthz",
            "transport_api_version": "V3",
            "http_service": {
                "server_uri": {"uri": "http://picker", "cluster": "picker", "timeout": duration(timeout_s)},
                "path_prefix": prefix,
                "authorization_response": {
                    "allowed_upstream_headers": {
                        "patterns": [{"prefix": "x-plimsoll-"}, {"exact": UPSTREAM_TIMEOUT_HEADER}]
                    },
                    "allowed_client_headers": {"patterns": [{"exact": name} for name in REJECTION_HEADERS]},
                    "dynamic_metadata_from_headers": {"patterns": [{"prefix": ATTRIBUTE_PREFIX}]},
                    "allowed_client_headers_on_success": {"patterns": [{"exact": n} for n in RATE_LIMIT_HEADERS]},
                },
            },
            "allowed_headers": {"patterns": [{"exact": name} for name in headers]},
            **more,
        },
    }


def _http_inspector() -> Json:
    return {
        "name": "envoy.filters.listener.http_inspector",
        "typed_config": {"@type": f"{TYPE_URL}.extensions.filters.listener.http_inspector.v3.HttpInspector"},
    }


def _lua_filter(program: str) -> Json:
    source = files("plimsoll.gateway").joinpath(program).read_text()
    return {
        "name": f"envoy.filters.http.lua.{program.removesuffix('.lua')}",
        "typed_config": {
            "@type": f"{TYPE_URL}.extensions.filters.http.lua.v3.Lua",
            "default_source_code": {"inline_string": source},
        },
    }


def _router_filter() -> Json:
    return {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": f"{TYPE_URL}.extensions.filters.http.router.v3.Router"},
    }
