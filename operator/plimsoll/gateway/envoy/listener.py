"""Envoy's listener: which requests it accepts, in which form, and where it routes them.

Problem: an engine serves more paths than the API, decodes paths leniently, reads bodies of any size and waits forever
for incomplete ones. A client can send the gateway's internal headers, and it can open streams without end.

Idea: Envoy enforces all restrictions, so they do not depend on the picker. Routes match exact paths and methods. All
else is rejected before the filter that buffers the body. Internal headers are stripped before routing. Sizes and times
are limited. Only the paths of `api_routes` call the picker, and only they route to engines.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from plimsoll.api.v1alpha1.request_limits import IDLE_TIMEOUTS_S
from plimsoll.gateway.adapters import ADAPTER_HEADER
from plimsoll.gateway.api_routes import RESPONSES_PATH, ROUTES
from plimsoll.gateway.deadlines import TIMEOUT_HEADERS
from plimsoll.gateway.envoy.body_filters import (
    BODY_BYTES_HEADER,
    LARGE_BODY_BYTES,
    RATE_FILTER,
    RESERVE_FILTER,
    RESERVE_PREFIX,
    RESERVE_SECONDS,
    TYPE_URL,
    clear_no_answer,
    rate_filter,
    rate_policy,
)
from plimsoll.gateway.envoy.jwt import jwt_filters
from plimsoll.gateway.envoy.local_reply import HEALTH, local_reply_config, plain_http_config
from plimsoll.gateway.envoy.tls import plain_chain, tls_chain, tls_inspector
from plimsoll.gateway.envoy.tracing import ATTRIBUTE_PREFIX, tracing
from plimsoll.gateway.identity import CREDENTIAL_HEADERS
from plimsoll.gateway.jwt_issuers import PAYLOAD_HEADER
from plimsoll.gateway.key_limits import RATE_LIMIT_HEADERS
from plimsoll.gateway.request_bounds import IDLE_TIMEOUT_HEADER, UPSTREAM_TIMEOUT_HEADER
from plimsoll.gateway.settings import ApiKeyMode, PickerSettings, Plaintext

Json = dict[str, Any]

MODELS_PATH = "/v1/models"
STAT_PREFIX = "gateway"
CLIENT_IDLE = "660s"  # without a request; load balancers keep idle connections for up to 600 s
CHECK_PREFIX = "/check"  # prefix of the client's path in ext_authz checks
CHECK_FILTER = "envoy.filters.http.ext_authz"
CONNECTION_BUFFER_BYTES = 64 << 10  # what is kept for a client or an engine that reads slowly
MAX_STREAMS_PER_CONNECTION = 100  # of HTTP/2
MAX_ATTEMPTS = 3
PICK_CLUSTER_PREFIX = "pick/"  # clusters whose endpoint the picker names, by NAMESPACE/NAME
MODEL_CLUSTER_PREFIX = "model/"  # clusters that Envoy balances by itself, by model name
METADATA = "plimsoll"  # namespace of the cluster metadata

# Request headers that ext_authz forwards to the picker.
CHECK_HEADERS = (
    "content-type",
    "x-request-id",
    "x-stainless-retry-count",
    "idempotency-key",
    "x-plimsoll-request-id",
    *TIMEOUT_HEADERS,
)
# Headers of the picker's rejection that ext_authz forwards to the client.
REJECTION_HEADERS = (
    "content-type",
    "retry-after",
    "x-should-retry",
    "x-plimsoll-reason",
    "x-plimsoll-eta",
    "www-authenticate",
    *RATE_LIMIT_HEADERS,
)
# Never sent to engines: they would log them, or pass them on.
STRIPPED_HEADERS = (*CREDENTIAL_HEADERS, "proxy-authorization", "cookie")
CORS = "envoy.filters.http.cors"
CORS_EXPOSED = (*REJECTION_HEADERS[1:], "x-request-id")
CORS_MAX_AGE = 600  # seconds for which a browser caches a preflight response

ACCESS_LOG_FORMAT = {
    "request_id": "%REQ(X-PLIMSOLL-REQUEST-ID)%",
    "upstream": "%UPSTREAM_HOST%",
    "cluster": "%UPSTREAM_CLUSTER%",
    "status": "%RESPONSE_CODE%",
    "flags": "%RESPONSE_FLAGS%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "ttft_us": "%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%",
    "duration_us": "%COMMON_DURATION(DS_RX_BEG:DS_TX_END:us)%",
    "received_us": "%COMMON_DURATION(DS_RX_BEG:DS_RX_END:us)%",
    "sent_bytes": "%BYTES_SENT%",
    "client_request_id": "%REQ(X-REQUEST-ID):80%",
}
# What only the gateway's own access log needs.
ACCESS_LOG_DETAILS = {
    "method": "%REQ(:METHOD):20%",
    "path": "%PATH(NQ:PATH):200%",
    "reason": "%RESP(X-PLIMSOLL-REASON):64%",
    "received_bytes": "%BYTES_RECEIVED%",
    "trace_id": "%TRACE_ID%",
    "total_ms": "%DURATION%",
}


def listener_resource(settings: PickerSettings) -> Json:
    """Returns the listener as an Envoy resource."""
    return {
        "name": "api",
        "address": {"socket_address": {"address": settings.address, "port_value": settings.port}},
        "per_connection_buffer_limit_bytes": CONNECTION_BUFFER_BYTES,
        # Waits for a connection's first bytes, and closes one that sends none.
        "listener_filters": [_http_inspector() if settings.tls_directory is None else tls_inspector()],
        "listener_filters_timeout": duration(settings.headers_timeout_seconds),
        "filter_chains": _filter_chains(settings),
    }


def _filter_chains(settings: PickerSettings) -> list[Json]:
    """Returns one chain, or with TLS two: for connections that begin with a TLS handshake, and for all others."""
    manager = _http_connection_manager(settings)
    if settings.tls_directory is None:
        return [{"filters": [_network_filter(manager)]}]
    plain = manager if settings.plaintext is Plaintext.ALLOW else _refuse_plain_http(manager, settings)
    handshake_timeout = duration(settings.headers_timeout_seconds)
    return [tls_chain(_network_filter(manager), settings, handshake_timeout), plain_chain(_network_filter(plain))]


def _network_filter(manager: Json) -> Json:
    return {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}


def _refuse_plain_http(manager: Json, settings: PickerSettings) -> Json:
    """Returns a connection manager with the same limits that answers each request with an error."""
    host = {"name": "plain", "domains": ["*"], "routes": [_direct_response({"prefix": "/"}, 400)]}
    shared = {name: value for name, value in manager.items() if name != "tracing"}
    return {
        **shared,
        "stat_prefix": "plain_http",
        "local_reply_config": plain_http_config(),
        "route_config": {"name": "plain", "virtual_hosts": [host]},
        "http_filters": [_router_filter()],
        "access_log": manager["access_log"] if settings.access_log else [],
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
            "max_headers_count": 100,
        },
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
        "route_config": {"name": "api", "virtual_hosts": [_host(settings)]},
        "http_filters": [
            _cors(),
            _health(),
            *jwt_filters(settings),
            _reserve_filter(settings),
            rate_filter(),
            clear_no_answer(),
            _check_filter(settings),
            _fail_open_filter(),
            _router_filter(),
        ],
        "access_log": [_access_log(settings)],
        **tracing(settings),
    }


def duration(value: float) -> str:
    """Returns seconds in the JSON format of a protobuf duration."""
    return f"{value:.3f}s"


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


def _host(settings: PickerSettings) -> Json:
    origins = [{"safe_regex": {"regex": ".+"}} if o == "*" else {"exact": o} for o in settings.cors_origins]
    filters = {RATE_FILTER: rate_policy(settings)} | ({CORS: _policy(origins)} if origins else {})
    routes = _routes(settings, origins)
    return {"name": "api", "domains": ["*"], "routes": routes, "typed_per_filter_config": filters}


def _policy(origins: list[Json]) -> Json:
    """Returns a CORS policy for these origins. It never allows browser credentials; a script sends its API key."""
    return {
        "@type": f"{TYPE_URL}.extensions.filters.http.cors.v3.CorsPolicy",
        "allow_origin_string_match": origins,
        "allow_methods": "GET, POST",
        "allow_headers": "authorization, *",  # the wildcard does not cover this one
        "expose_headers": ",".join(CORS_EXPOSED),
        "max_age": str(CORS_MAX_AGE),
    }


def _routes(settings: PickerSettings, origins: list[Json]) -> list[Json]:
    """Returns all routes. The CORS filter responds to preflights from `origins`."""
    routes = [_connect_route(), _two_hosts(), *(_idle_route(settings, seconds) for seconds in IDLE_TIMEOUTS_S)]
    small = {"name": "content-length", "range_match": {"start": 0, "end": LARGE_BODY_BYTES}}
    # The CORS filter ignores direct responses, so this needs a cluster. It responds before the cluster is called.
    routes += [{"match": _preflight({"string_match": origin}), "route": {"cluster": "picker"}} for origin in origins]
    routes += [_direct_response(_preflight({"present_match": True}), 403)]
    for path in ROUTES:
        routes += [
            _compressed(path),
            _reply_route(path),
            _engine_route({"path": path, "headers": [_method("POST"), small]}, settings, CHECK_FILTER),
            _engine_route({"path": path, "headers": [_method("POST")]}, settings, RESERVE_FILTER, CHECK_FILTER),
            _direct_response({"path": path}, 405, allow="POST"),
        ]
    routes.append(_direct_response({"prefix": f"{RESPONSES_PATH}/"}, 404))
    for match in ({"path": MODELS_PATH}, {"prefix": f"{MODELS_PATH}/"}):
        routes += [_models_route(match), _direct_response(match, 405, allow="GET")]
    routes += [_direct_response({"path": HEALTH}, 405, allow="GET, HEAD"), _direct_response({"prefix": "/"}, 404)]
    return routes


def _method(name: str) -> Json:
    return {"name": ":method", "string_match": {"exact": name}}


def _connect_route() -> Json:
    """Reject CONNECT: it would hang in the filter that buffers the body."""
    return _direct_response({"connect_matcher": {}}, 403)


def _direct_response(match: Json, status: int, **headers: str) -> Json:
    """Returns a route that responds itself. `headers` are response headers, with _ for -."""
    added = [{"header": {"key": key.replace("_", "-"), "value": value}} for key, value in headers.items()]
    return {"match": match, "direct_response": {"status": status}, "response_headers_to_add": added}


def _two_hosts() -> Json:
    """Reject several Host headers: Envoy joins their values by a comma, which no host contains."""
    return _direct_response(
        {"prefix": "/", "headers": [{"name": ":authority", "string_match": {"contains": ","}}]}, 400
    )


def _preflight(origin: Json) -> Json:
    """Matches CORS preflights whose origin matches. Without a method the CORS filter takes a request for none."""
    asked = {"name": "access-control-request-method", "string_match": {"safe_regex": {"regex": ".+"}}}
    return {"prefix": "/", "headers": [_method("OPTIONS"), {"name": "origin", **origin}, asked]}


def _compressed(path: str) -> Json:
    plain = {"string_match": {"exact": "identity", "ignore_case": True}}
    coding = {"name": "content-encoding", **plain, "invert_match": True}
    present = {"name": "content-encoding", "present_match": True}
    return _direct_response(
        {"path": path, "headers": [_method("POST"), present, coding]}, 415, accept_encoding="identity"
    )


def _models_route(match: Json) -> Json:
    return {
        "match": {**match, "headers": [_method("GET")]},
        "route": {"cluster": "picker", "timeout": "5s"},
    }


def _reply_route(path: str) -> Json:
    """Route 503 and 504 rejections of the picker, which an ext_authz response cannot carry."""
    return {
        "match": {
            "path": path,
            "headers": [_method("POST"), {"name": "x-plimsoll-error-response", "present_match": True}],
        },
        "route": {"cluster": "picker", "timeout": "5s"},
    }


def _idle_route(settings: PickerSettings, seconds: int) -> Json:
    """Route requests that the picker has sent on with an idle timeout of their own. No client can set the header."""
    header = {"name": IDLE_TIMEOUT_HEADER, "string_match": {"exact": str(seconds)}}
    route = _engine_route({"prefix": "/", "headers": [_method("POST"), header]}, settings)
    route["route"]["idle_timeout"] = duration(seconds)
    return route


def _engine_route(match: Json, settings: PickerSettings, *filters: str) -> Json:
    """Route requests to engines. `filters` are the ext_authz filters that ask the picker."""
    return {
        "match": match,
        # Retries send the whole body again, so the buffer must hold a body of the maximum size.
        "request_body_buffer_limit": settings.max_body_bytes,
        "request_headers_to_remove": [BODY_BYTES_HEADER, PAYLOAD_HEADER, *STRIPPED_HEADERS],
        "request_headers_to_add": [_own_model(), _adapter()],
        "route": {
            "cluster_header": "x-plimsoll-cluster",
            "cluster_not_found_response_code": "SERVICE_UNAVAILABLE",
            "timeout": "0s",
            "retry_policy": {
                # Never by status: only a response that the engine's middleware marks is safe to retry.
                "retry_on": "connect-failure,refused-stream,reset-before-request,retriable-headers",
                "retriable_headers": [{"name": "x-plimsoll-retry", "string_match": {"exact": "1"}}],
                "num_retries": MAX_ATTEMPTS - 1,
                "retry_host_predicate": [
                    {
                        "name": "envoy.retry_host_predicates.previous_hosts",
                        "typed_config": {
                            "@type": f"{TYPE_URL}.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                        },
                    }
                ],
                "host_selection_retry_max_attempts": 5,
            },
        },
        "typed_per_filter_config": {
            name: {
                "@type": f"{TYPE_URL}.extensions.filters.http.ext_authz.v3.ExtAuthzPerRoute",
                "check_settings": {},
            }
            for name in filters
        },
    }


def _own_model() -> Json:
    """Set the model name that the engines of a cluster use, whatever name the client sent."""
    header = {"key": "x-plimsoll-model", "value": f"%CLUSTER_METADATA({METADATA}:service)%"}
    return {"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def _adapter() -> Json:
    """Name the adapter of a cluster if the picker did not name one; the picker's own cluster has none."""
    header = {"key": ADAPTER_HEADER, "value": f"%CLUSTER_METADATA({METADATA}:adapter)%"}
    return {"header": header, "append_action": "ADD_IF_ABSENT"}


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
    more = {"stat_prefix": "reserve", **_when_away(settings)}
    return _ext_authz_filter(RESERVE_FILTER, RESERVE_PREFIX, RESERVE_SECONDS, headers, more)


def _check_filter(settings: PickerSettings) -> Json:
    """Ask the picker about the request, with its body."""
    headers = (*CHECK_HEADERS, *_identity_headers(settings))
    body = {
        **_when_away(settings),
        "clear_route_cache": True,
        "with_request_body": {"max_request_bytes": settings.max_body_bytes, "pack_as_bytes": True},
    }
    return _ext_authz_filter(CHECK_FILTER, CHECK_PREFIX, settings.pick_timeout_seconds, headers, body)


def _identity_headers(settings: PickerSettings) -> tuple[str, ...]:
    """Returns the headers from which the picker learns who sends a request."""
    has_issuers = bool(settings.jwt_issuers)
    credentials = CREDENTIAL_HEADERS if has_issuers or settings.api_keys is not ApiKeyMode.DISABLED else ()
    payload = (PAYLOAD_HEADER,) if has_issuers else ()
    trusted = (settings.class_header, settings.tenant_header) if settings.trust_identity_headers else ()
    return (*credentials, *payload, *trusted)


def _when_away(settings: PickerSettings) -> Json:
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


def _fail_open_filter() -> Json:
    source = files("plimsoll.gateway").joinpath("failopen.lua").read_text()
    return {
        "name": "envoy.filters.http.lua",
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


def _access_log(settings: PickerSettings) -> Json:
    log_format = ACCESS_LOG_FORMAT | (ACCESS_LOG_DETAILS if settings.access_log else {})
    return {
        "name": "envoy.access_loggers.file",
        "typed_config": {
            "@type": f"{TYPE_URL}.extensions.access_loggers.file.v3.FileAccessLog",
            "path": str(settings.fifo),
            "log_format": {"json_format": log_format},
        },
    }
