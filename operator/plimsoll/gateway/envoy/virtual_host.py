"""Envoy's virtual host: which paths and methods it routes, and where.

Routes match exact paths and methods. Everything else gets a response from Envoy itself. Only the paths of `api_routes`
call the picker, and only they route to engines.
"""

from __future__ import annotations

from typing import Any

from plimsoll.api.v1alpha1.request_limits import IDLE_TIMEOUTS_S
from plimsoll.gateway.adapters import ADAPTER_HEADER
from plimsoll.gateway.api_routes import EVENT_STREAM, MODELS_PATH, RESPONSES_PATH, ROUTES, BodyForm
from plimsoll.gateway.envoy.body_filters import (
    BODY_BYTES_HEADER,
    LARGE_BODY_BYTES,
    RATE_FILTER,
    RESERVE_FILTER,
    TYPE_URL,
    duration,
    rate_policy,
)
from plimsoll.gateway.envoy.local_reply import HEALTH
from plimsoll.gateway.identity import CREDENTIAL_HEADERS
from plimsoll.gateway.jwt_issuers import PAYLOAD_HEADER
from plimsoll.gateway.key_limits import RATE_LIMIT_HEADERS
from plimsoll.gateway.request_bounds import IDLE_TIMEOUT_HEADER
from plimsoll.gateway.settings import PickerSettings

Json = dict[str, Any]

CHECK_FILTER = "envoy.filters.http.ext_authz"
MAX_ATTEMPTS = 3
METADATA = "plimsoll"  # namespace of the cluster metadata
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


def virtual_host(settings: PickerSettings) -> Json:
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
    routes += [{"match": _is_preflight({"string_match": origin}), "route": {"cluster": "picker"}} for origin in origins]
    routes += [direct_response(_is_preflight({"present_match": True}), 403)]
    for path, route in ROUTES.items():
        routes += [
            _compressed(path),
            *([] if route.form is BodyForm.AUDIO else [_untyped(path)]),
            _reply_route(path),
            _engine_route({"path": path, "headers": [_method("POST"), small]}, settings, CHECK_FILTER),
            _engine_route({"path": path, "headers": [_method("POST")]}, settings, RESERVE_FILTER, CHECK_FILTER),
            direct_response({"path": path}, 405, allow="POST"),
        ]
    routes.append(direct_response({"prefix": f"{RESPONSES_PATH}/"}, 404))
    routes.append(_progress_route())
    for match in ({"path": MODELS_PATH}, {"prefix": f"{MODELS_PATH}/"}):
        routes += [_models_route(match), direct_response(match, 405, allow="GET, HEAD")]
    routes += [direct_response({"path": HEALTH}, 405, allow="GET, HEAD"), direct_response({"prefix": "/"}, 404)]
    return routes


def _method(name: str) -> Json:
    return {"name": ":method", "string_match": {"exact": name}}


def _connect_route() -> Json:
    """Reject CONNECT: it would hang in the filter that buffers the body."""
    return direct_response({"connect_matcher": {}}, 403)


def direct_response(match: Json, status: int, **headers: str) -> Json:
    """Returns a route that responds itself. `headers` are response headers, with _ for -."""
    added = [{"header": {"key": key.replace("_", "-"), "value": value}} for key, value in headers.items()]
    return {"match": match, "direct_response": {"status": status}, "response_headers_to_add": added}


def _two_hosts() -> Json:
    """Reject several Host headers: Envoy joins their values by a comma, which no host contains."""
    return direct_response({"prefix": "/", "headers": [{"name": ":authority", "string_match": {"contains": ","}}]}, 400)


def _is_preflight(origin: Json) -> Json:
    """Matches CORS preflights whose origin matches. Without a method the CORS filter takes a request for none."""
    method = {"name": "access-control-request-method", "string_match": {"safe_regex": {"regex": ".+"}}}
    return {"prefix": "/", "headers": [_method("OPTIONS"), {"name": "origin", **origin}, method]}


def _compressed(path: str) -> Json:
    plain = {"string_match": {"exact": "identity", "ignore_case": True}}
    coding = {"name": "content-encoding", **plain, "invert_match": True}
    present = {"name": "content-encoding", "present_match": True}
    return direct_response(
        {"path": path, "headers": [_method("POST"), present, coding]}, 415, accept_encoding="identity"
    )


def _untyped(path: str) -> Json:
    """Refuse a body without a content type: engines would, in words of their own."""
    absent = {"name": "content-type", "present_match": True, "invert_match": True}
    return direct_response({"path": path, "headers": [_method("POST"), absent]}, 415, accept="application/json")


def _models_route(match: Json) -> Json:
    return {
        "match": {**match, "headers": [{"name": ":method", "string_match": {"safe_regex": {"regex": "GET|HEAD"}}}]},
        "route": {"cluster": "picker", "timeout": "5s"},
    }


def _progress_route() -> Json:
    """Route to the progress of a model. The picker ends the stream."""
    stream = {"name": "accept", "string_match": {"contains": EVENT_STREAM, "ignore_case": True}}
    return {
        "match": {"prefix": f"{MODELS_PATH}/", "headers": [_method("GET"), stream]},
        "route": {"cluster": "picker", "timeout": "0s"},
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
