"""The door: which requests come in, in which shape, and where they go.

Problem: an engine serves far more than the three paths of the API, decodes paths generously, reads bodies of any size
and waits for ever for half-sent ones; a client can send the headers by which the gateway talks to itself.

Idea: everything that must stay shut is Envoy's and does not depend on the picker. Whole paths with their methods, all
else refused before the filter that waits for a body; our own headers are stripped before routing; sizes and times are
bounded. Only the two completion paths ask the picker, and only these have a way to an engine.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from plimsoll.gateway.localreply import HEALTH, local_reply_config
from plimsoll.gateway.settings import Settings

Json = dict[str, Any]

TYPE = "type.googleapis.com/envoy"
COMPLETIONS = ("/v1/chat/completions", "/v1/completions")
MODELS = "/v1/models"
STAT_PREFIX = "gateway"
CHECK_PREFIX = "/check"  # before the client's path in what the picker is asked
ATTEMPTS = 3
METADATA = "plimsoll"  # namespace of what a cluster says of its service

# What the picker sees of a request besides method, path, host and body.
CHECK_HEADERS = ("content-type", "x-request-id", "x-stainless-retry-count", "idempotency-key", "x-plimsoll-ticket")
# What a client sees of the picker's refusal besides its status.
REFUSAL_HEADERS = ("content-type", "retry-after", "x-should-retry", "x-plimsoll-reason", "x-plimsoll-eta")
CORS = "envoy.filters.http.cors"
CORS_EXPOSED = (*REFUSAL_HEADERS[1:], "x-request-id")
CORS_MAX_AGE = 600  # seconds for which a browser keeps the answer to a preflight

ACCESS_LOG = {
    "ticket": "%REQ(X-PLIMSOLL-TICKET)%",
    "host": "%UPSTREAM_HOST%",
    "cluster": "%UPSTREAM_CLUSTER%",
    "code": "%RESPONSE_CODE%",
    "flags": "%RESPONSE_FLAGS%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "attempts": "%UPSTREAM_REQUEST_ATTEMPT_COUNT%",
    "ttft_us": "%COMMON_DURATION(DS_RX_BEG:US_RX_BODY_BEG:us)%",
    "duration_us": "%COMMON_DURATION(DS_RX_BEG:DS_TX_END:us)%",
    "received_us": "%COMMON_DURATION(DS_RX_BEG:DS_RX_END:us)%",
    "sent": "%BYTES_SENT%",
    "id": "%REQ(X-REQUEST-ID):80%",
}


def listener(settings: Settings) -> Json:
    """The one listener, as an Envoy resource."""
    return {
        "name": "api",
        "address": {"socket_address": {"address": settings.address, "port_value": settings.port}},
        # Retries need the whole body again: the limit is that of a body.
        "per_connection_buffer_limit_bytes": settings.max_body_bytes,
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": _manager(settings)}]}
        ],
    }


def _manager(settings: Settings) -> Json:
    return {
        "@type": f"{TYPE}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": STAT_PREFIX,
        "codec_type": "AUTO",
        "use_remote_address": True,
        "server_header_transformation": "OVERWRITE",
        "server_name": "plimsoll",
        "generate_request_id": True,
        "preserve_external_request_id": True,
        "always_set_request_id_in_response": True,
        "stream_idle_timeout": seconds(settings.idle_timeout_seconds),
        "request_headers_timeout": seconds(settings.headers_timeout_seconds),
        "request_timeout": seconds(settings.body_timeout_seconds),
        "common_http_protocol_options": {
            "headers_with_underscores_action": "DROP_HEADER",
            "idle_timeout": "3600s",
            "max_headers_count": 100,
        },
        "http_protocol_options": {"override_stream_error_on_invalid_http_message": True},
        "http2_protocol_options": {
            "override_stream_error_on_invalid_http_message": True,
            "max_concurrent_streams": 1000,
            "initial_stream_window_size": 1 << 20,
            "initial_connection_window_size": 16 << 20,
        },
        "normalize_path": True,
        "merge_slashes": False,
        # A client that asks for the model NAMESPACE/NAME escapes the slash. Routes see the path decoded, as engines do.
        "path_with_escaped_slashes_action": "UNESCAPE_AND_FORWARD",
        "early_header_mutation_extensions": [_strip()],
        "local_reply_config": local_reply_config(settings.max_body_bytes),
        "route_config": {"name": "api", "virtual_hosts": [_host(settings)]},
        "http_filters": [_cors(), _health(), _ask_picker(settings), _fail_open(), _router()],
        "access_log": [_access_log(settings)],
    }


def seconds(value: float) -> str:
    """A duration as protobuf's JSON spells it."""
    return f"{value:.3f}s"


def _strip() -> Json:
    """Headers by which the gateway or Envoy steer themselves never come from a client. Each request has a ticket."""
    ticket = {"key": "x-plimsoll-ticket", "value": "%UNIQUE_ID%"}
    return {
        "name": "envoy.http.early_header_mutation.header_mutation",
        "typed_config": {
            "@type": f"{TYPE}.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
            "mutations": [
                {"remove_on_match": {"key_matcher": {"prefix": "x-plimsoll-"}}},
                {"remove_on_match": {"key_matcher": {"prefix": "x-envoy-"}}},
                {"remove": "x-data-parallel-rank"},
                {"append": {"header": ticket, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}},
            ],
        },
    }


def _host(settings: Settings) -> Json:
    origins = [{"safe_regex": {"regex": ".+"}} if o == "*" else {"exact": o} for o in settings.cors_origins]
    host: Json = {"name": "api", "domains": ["*"], "routes": _routes(origins)}
    if origins:
        host["typed_per_filter_config"] = {CORS: _policy(origins)}
    return host


def _policy(origins: list[Json]) -> Json:
    """Scripts of these origins may read answers. Never with a browser's own credentials; a script sends its key."""
    return {
        "@type": f"{TYPE}.extensions.filters.http.cors.v3.CorsPolicy",
        "allow_origin_string_match": origins,
        "allow_methods": "GET, POST",
        "allow_headers": "authorization, *",  # the wildcard leaves out this one
        "expose_headers": ",".join(CORS_EXPOSED),
        "max_age": str(CORS_MAX_AGE),
    }


def _routes(origins: list[Json]) -> list[Json]:
    """origins: those of which the CORS filter answers the preflights."""
    routes = [_connect(), _two_hosts()]
    # The filter passes over routes that only respond; it answers before this cluster is asked.
    routes += [{"match": _preflight({"string_match": origin}), "route": {"cluster": "picker"}} for origin in origins]
    routes += [_refused(_preflight({"present_match": True}), 403)]
    for path in COMPLETIONS:
        routes += [_compressed(path), _reply(path), _engines(path), _refused({"path": path}, 405, allow="POST")]
    for match in ({"path": MODELS}, {"prefix": f"{MODELS}/"}):
        routes += [_models(match), _refused(match, 405, allow="GET")]
    routes += [_refused({"path": HEALTH}, 405, allow="GET, HEAD"), _refused({"prefix": "/"}, 404)]
    return routes


def _method(name: str) -> Json:
    return {"name": ":method", "string_match": {"exact": name}}


def _connect() -> Json:
    """CONNECT would hang behind the filter that waits for a body."""
    return _refused({"connect_matcher": {}}, 403)


def _refused(match: Json, status: int, **headers: str) -> Json:
    """headers: of the answer, with _ for -."""
    added = [{"header": {"key": key.replace("_", "-"), "value": value}} for key, value in headers.items()]
    return {"match": match, "direct_response": {"status": status}, "response_headers_to_add": added}


def _two_hosts() -> Json:
    """Envoy joins the values of several Host headers by a comma, which no host has."""
    return _refused({"prefix": "/", "headers": [{"name": ":authority", "string_match": {"contains": ","}}]}, 400)


def _preflight(origin: Json) -> Json:
    """Matches a browser's question whether a script of such an origin may send a request."""
    asked = {"name": "access-control-request-method", "present_match": True}
    return {"prefix": "/v1/", "headers": [_method("OPTIONS"), {"name": "origin", **origin}, asked]}


def _compressed(path: str) -> Json:
    plain = {"string_match": {"exact": "identity", "ignore_case": True}}
    coding = {"name": "content-encoding", **plain, "invert_match": True}
    present = {"name": "content-encoding", "present_match": True}
    return _refused({"path": path, "headers": [_method("POST"), present, coding]}, 415, accept_encoding="identity")


def _models(match: Json) -> Json:
    return {
        "match": {**match, "headers": [_method("GET")]},
        "route": {"cluster": "picker", "timeout": "5s"},
    }


def _reply(path: str) -> Json:
    """Where the picker sends what it refuses with 503 or 504; ext_authz has no way to say these."""
    return {
        "match": {
            "path": path,
            "headers": [_method("POST"), {"name": "x-plimsoll-reply", "present_match": True}],
        },
        "route": {"cluster": "picker", "timeout": "5s"},
    }


def _engines(path: str) -> Json:
    return {
        "match": {"path": path, "headers": [_method("POST")]},
        "request_headers_to_add": [_own_model()],
        "route": {
            "cluster_header": "x-plimsoll-cluster",
            "cluster_not_found_response_code": "SERVICE_UNAVAILABLE",
            "timeout": "0s",
            "retry_policy": {
                # Never by status: only what the engine's middleware marks may run elsewhere.
                "retry_on": "connect-failure,refused-stream,reset-before-request,retriable-headers",
                "retriable_headers": [{"name": "x-plimsoll-retry", "string_match": {"exact": "1"}}],
                "num_retries": ATTEMPTS - 1,
                "retry_host_predicate": [
                    {
                        "name": "envoy.retry_host_predicates.previous_hosts",
                        "typed_config": {
                            "@type": f"{TYPE}.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                        },
                    }
                ],
                "host_selection_retry_max_attempts": 5,
            },
        },
        "typed_per_filter_config": {
            "envoy.filters.http.ext_authz": {
                "@type": f"{TYPE}.extensions.filters.http.ext_authz.v3.ExtAuthzPerRoute",
                "check_settings": {},
            }
        },
    }


def _own_model() -> Json:
    """The name by which the engines of a cluster know their model, whatever clients call it."""
    header = {"key": "x-plimsoll-model", "value": f"%CLUSTER_METADATA({METADATA}:service)%"}
    return {"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def _cors() -> Json:
    """Answers preflights and marks answers where the virtual host names origins; else it does nothing."""
    return {"name": CORS, "typed_config": {"@type": f"{TYPE}.extensions.filters.http.cors.v3.Cors"}}


def _health() -> Json:
    """For load balancers and load generators: 200 while this gateway serves, with or without its picker."""
    path = {"name": ":path", "string_match": {"safe_regex": {"regex": rf"{HEALTH}(\?.*)?"}}}
    method = {"name": ":method", "string_match": {"safe_regex": {"regex": "GET|HEAD"}}}
    return {
        "name": "envoy.filters.http.health_check",
        "typed_config": {
            "@type": f"{TYPE}.extensions.filters.http.health_check.v3.HealthCheck",
            "pass_through_mode": False,
            "headers": [path, method],
        },
    }


def _ask_picker(settings: Settings) -> Json:
    return {
        "name": "envoy.filters.http.ext_authz",
        "disabled": True,  # routes to engines switch it on; nothing else waits for a body
        "typed_config": {
            "@type": f"{TYPE}.extensions.filters.http.ext_authz.v3.ExtAuthz",
            "transport_api_version": "V3",
            "failure_mode_allow": True,
            "failure_mode_allow_header_add": True,
            "clear_route_cache": True,
            "with_request_body": {"max_request_bytes": settings.max_body_bytes, "pack_as_bytes": True},
            "http_service": {
                "server_uri": {
                    "uri": "http://picker",
                    "cluster": "picker",
                    "timeout": seconds(settings.pick_timeout_seconds),
                },
                "path_prefix": CHECK_PREFIX,
                "authorization_response": {
                    "allowed_upstream_headers": {"patterns": [{"prefix": "x-plimsoll-"}]},
                    "allowed_client_headers": {"patterns": [{"exact": name} for name in REFUSAL_HEADERS]},
                },
            },
            "allowed_headers": {
                "patterns": [
                    {"exact": name} for name in (*CHECK_HEADERS, settings.class_header, settings.tenant_header)
                ]
            },
        },
    }


def _fail_open() -> Json:
    source = files("plimsoll.gateway").joinpath("failopen.lua").read_text()
    return {
        "name": "envoy.filters.http.lua",
        "typed_config": {
            "@type": f"{TYPE}.extensions.filters.http.lua.v3.Lua",
            "default_source_code": {"inline_string": source},
        },
    }


def _router() -> Json:
    return {
        "name": "envoy.filters.http.router",
        "typed_config": {"@type": f"{TYPE}.extensions.filters.http.router.v3.Router"},
    }


def _access_log(settings: Settings) -> Json:
    return {
        "name": "envoy.access_loggers.file",
        "typed_config": {
            "@type": f"{TYPE}.extensions.access_loggers.file.v3.FileAccessLog",
            "path": str(settings.fifo),
            "log_format": {"json_format": ACCESS_LOG},
        },
    }
