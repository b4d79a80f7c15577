"""Envoy's local replies, as error bodies of the route's API with messages that a client can act on.

Problem: Envoy itself responds to a bad path, a body that is too large, or an unreachable engine. Such a local reply has
an empty or plain text body and no `Retry-After`, and most carry no response flag.

Idea: one mapper per status sets the message, the error type and the headers, and another one for the paths of
Anthropic's API, whose errors have another shape. Rejections by the picker through ext_authz
(flag UAEX) match first and pass unchanged. A cluster at its request limit (flag UO) occurs only while the picker does
not respond, so its rejections look like the picker's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from plimsoll.api.contract import engine_contract
from plimsoll.gateway.api_routes import MESSAGES_PATH, MODELS_PATH, RESPONSES_PATH, ROUTES
from plimsoll.gateway.errors import anthropic_error_type
from plimsoll.gateway.request_bounds import DEADLINE_HEADER

Json = dict[str, Any]


@dataclass(frozen=True)
class LocalReply:
    """The error body of one status.

    `message` may hold Envoy format commands. `code` is also the value of `x-plimsoll-reason`.
    """

    message: str
    code: str
    retry_after: int | str | None = None  # seconds or a format command; None if a retry does not help


MAX_HEADERS = 100
MAX_HEADERS_KIB = 60
UNCHANGED_BODY = "%LOCAL_REPLY_BODY%"

REPLIES = {
    400: LocalReply("The request is not valid HTTP (%RESPONSE_CODE_DETAILS%).", "bad_request"),
    403: LocalReply(
        "This gateway does not support protocol upgrades or CONNECT tunnels. Send a plain HTTP request.", "forbidden"
    ),
    404: LocalReply(
        f"Unknown path. This gateway serves /v1/models, /v1/models/NAME, /healthz and {', '.join(ROUTES)}.",
        "unknown_path",
    ),
    405: LocalReply(
        "This path does not accept the method %REQ(:METHOD):20%. Use %RESP(ALLOW)%.",
        "method_not_allowed",
    ),
    408: LocalReply(
        "The client did not send the complete request in time (%RESPONSE_CODE_DETAILS%).", "request_timeout"
    ),
    413: LocalReply(
        "The request body is larger than the limit of {max_body_bytes} bytes (chart value gateway.maxBodyBytes). Send a"
        " smaller body.",
        "body_too_large",
    ),
    415: LocalReply(
        "This gateway does not accept a compressed request body (Content-Encoding: %REQ(CONTENT-ENCODING):40%). Send"
        " the body without compression and without that header.",
        "compressed_body",
    ),
    426: LocalReply(
        "This gateway does not support the HTTP version of the request. Use HTTP/1.1 or HTTP/2.", "http_version"
    ),
    431: LocalReply(
        f"The request headers are larger than the limit of this gateway: {MAX_HEADERS} headers of {MAX_HEADERS_KIB} KiB"
        " together. Send fewer or shorter headers.",
        "headers_too_large",
    ),
    500: LocalReply("The gateway failed with an internal error (%RESPONSE_CODE_DETAILS%).", "gateway_error"),
    501: LocalReply(
        "This gateway does not support the transfer encoding of the request. Use Content-Length or chunked encoding.",
        "not_implemented",
    ),
    502: LocalReply("The engine's response is not valid HTTP (%RESPONSE_CODE_DETAILS%).", "bad_gateway"),
    503: LocalReply("No engine accepted the request (%RESPONSE_CODE_DETAILS%). Try again in 1 s.", "unavailable", 1),
    504: LocalReply("The engine did not respond in time (%RESPONSE_CODE_DETAILS%).", "timeout"),
}

NEXT_ENGINE = engine_contract().headers["next_engine"]  # set on requests that only one engine can serve
NEXT_ENGINE_SECONDS = f"%REQ({NEXT_ENGINE.upper()})%"
NO_ENGINE_READY = LocalReply(
    "No engine of the model is ready (%RESPONSE_CODE_DETAILS%), and this response does not know when the next one is."
    " Try again in 5 s: once the gateway has noticed, its response has the expected time.",
    "unavailable",
    5,
)
UNTYPED = LocalReply(
    "The request has no Content-Type header. Send Content-Type: application/json with a JSON body.",
    "content_type_required",
)
ONLY_ENGINE_FAILED = LocalReply(
    "The only ready engine did not accept the request (%RESPONSE_CODE_DETAILS%). If it has failed, the next one is"
    f" ready later: try again in {NEXT_ENGINE_SECONDS} s.",
    "unavailable",
    NEXT_ENGINE_SECONDS,
)
UNKNOWN_CLUSTER = LocalReply(
    "This gateway instance knows no engine of the model yet (%RESPONSE_CODE_DETAILS%). Try again in 1 s.",
    "unavailable",
    1,
)
NO_MODEL_LIST = LocalReply(
    "This gateway instance cannot list models, because its picker does not respond (%RESPONSE_CODE_DETAILS%). Try again"
    " in 1 s.",
    "unavailable",
    1,
)
DEADLINE_PASSED = LocalReply(
    f"The engine did not complete the response within %REQ({DEADLINE_HEADER.upper()})% s, the deadline of the request.",
    "deadline_exceeded",
)
OVERLOADED_STATUS = 429
OVERLOADED_REPLY = LocalReply("All ready engines are full. Try again in 10 s.", "overloaded", 10)
BODIES_REPLY = LocalReply(
    "This gateway instance takes only a few large request bodies, because its picker failed. Try again in 10 s.",
    "gateway_full",
    10,
)
OVERLOADED_GATEWAY = LocalReply(
    "This gateway instance is out of memory and takes no new requests. Try again in 5 s.", "gateway_full", 5
)
UNAUTHENTICATED = LocalReply(
    "This gateway instance cannot authenticate clients, because its picker failed. Try again in 1 s.", "unavailable", 1
)
PLAIN_HTTP = LocalReply(
    "This gateway speaks HTTPS on this port, and the request is plain HTTP. Use a URL that begins with https://.",
    "tls_required",
)
_SET_STATUS = (OVERLOADED_STATUS, 504)
HEALTH = "/healthz"
TWO_HOSTS = LocalReply("The request has more than one Host header. Send exactly one Host header.", "bad_request")
DRAINING = LocalReply("This gateway is shutting down. Send the request to another gateway instance.", "draining", 1)
PREFLIGHT = LocalReply(
    "The origin %REQ(ORIGIN):200% must not use this gateway from a browser: the chart value"
    " gateway.corsAllowedOrigins does not list it. Add it there, or send the request from a server.",
    "origin_not_allowed",
)
NOT_STORED = LocalReply(
    "This gateway stores no responses, so it cannot return, cancel or delete one. Use what"
    f" POST {RESPONSES_PATH} returns.",
    "response_not_stored",
)
DEFAULT_REPLY = LocalReply("The gateway rejected the request (%RESPONSE_CODE_DETAILS%).", "gateway_error")


def local_reply_config(max_body_bytes: int) -> Json:
    """The `local_reply_config` of the HTTP connection manager."""
    large = REPLIES[413]
    large = replace(large, message=large.message.format(max_body_bytes=max_body_bytes))
    by_cause = [
        (_flag_filter("UAEX"), 503, UNAUTHENTICATED),
        (_both(_status_filter("EQ", 400), _request(":authority", {"contains": ","})), 400, TWO_HOSTS),
        (_both(_status_filter("EQ", 403), _request(":method", {"exact": "OPTIONS"})), 403, PREFLIGHT),
        (_both(_status_filter("EQ", 404), _request(":path", {"prefix": f"{RESPONSES_PATH}/resp_"})), 404, NOT_STORED),
        (_both(_status_filter("EQ", 503), _request(":path", {"prefix": HEALTH})), 503, DRAINING),
        (_both(_status_filter("GE", 500), _request(":path", {"prefix": MODELS_PATH})), 503, NO_MODEL_LIST),
        (_flag_filter("NC"), 503, UNKNOWN_CLUSTER),
        (_both(_flag_filter("UF", "UC", "UH"), _request(NEXT_ENGINE, None)), 503, ONLY_ENGINE_FAILED),
        (_flag_filter("UF", "UC"), 503, REPLIES[503]),  # with or without retries
        (_flag_filter("UH"), 503, NO_ENGINE_READY),
        (_both(_status_filter("EQ", 415), _without("content-type")), 415, UNTYPED),
        (_flag_filter("UMSDR"), 504, DEADLINE_PASSED),
        (_flag_filter("UO"), OVERLOADED_STATUS, OVERLOADED_REPLY),
        (_flag_filter("RL"), 429, BODIES_REPLY),
        (_flag_filter("OM"), 429, OVERLOADED_GATEWAY),
    ]
    by_status = [(_status_filter("EQ", status), status, reply) for status, reply in (REPLIES | {413: large}).items()]
    replies = [*by_cause, *by_status, (_status_filter("GE", 400), 400, DEFAULT_REPLY)]
    return {"mappers": [_picker_mapper(), *(mapper for reply in replies for mapper in _mappers(*reply))]}


def plain_http_config() -> Json:
    """The `local_reply_config` of a connection manager that refuses all requests, because they are plain HTTP."""
    return {"mappers": list(_mappers(_status_filter("GE", 400), 400, PLAIN_HTTP))}


def _picker_mapper() -> Json:
    """Match what the picker said, which is below 500. Without its answer, ext_authz responds with 503 itself."""
    return {
        "filter": _both(_flag_filter("UAEX"), _status_filter("LE", 499)),
        "body_format_override": {
            "text_format_source": {"inline_string": UNCHANGED_BODY},
            "content_type": "application/json",
        },
    }


def _flag_filter(*flags: str) -> Json:
    """Matches replies that have any of these response flags."""
    return {"response_flag_filter": {"flags": list(flags)}}


def _status_filter(comparison: str, status: int) -> Json:
    value = {"default_value": status, "runtime_key": f"plimsoll.reply.{comparison}.{status}"}
    return {"status_code_filter": {"comparison": {"op": comparison, "value": value}}}


def _request(header: str, match: Json | None) -> Json:
    """Matches replies to requests whose header matches; without `match`, to requests that have the header."""
    return {
        "header_filter": {
            "header": {"name": header, **({"present_match": True} if match is None else {"string_match": match})}
        }
    }


def _without(header: str) -> Json:
    """Matches replies to requests without the header."""
    return {"header_filter": {"header": {"name": header, "present_match": True, "invert_match": True}}}


def _both(*filters: Json) -> Json:
    return {"and_filter": {"filters": list(filters)}}


def _mappers(reply_filter: Json, status: int, reply: LocalReply) -> tuple[Json, Json]:
    """Returns the mapper for the paths of Anthropic's API, and the one for all others."""
    is_anthropic = _both(_request(":path", {"prefix": MESSAGES_PATH}), reply_filter)
    return (
        _mapper(is_anthropic, status, reply, _anthropic_body(reply.message, status)),
        _mapper(reply_filter, status, reply, _openai_body(reply, status)),
    )


def _mapper(reply_filter: Json, status: int, reply: LocalReply, body: Json) -> Json:
    retry_header = ("x-should-retry", "false") if reply.retry_after is None else ("retry-after", str(reply.retry_after))
    return {
        "filter": reply_filter,
        "headers_to_add": [_header(*retry_header), _header("x-plimsoll-reason", reply.code)],
        "body_format_override": {"json_format": body, "content_type": "application/json"},
        **({"status_code": status} if status in _SET_STATUS else {}),  # Envoy's own is 503, and 408 at a deadline
    }


def _header(key: str, value: str) -> Json:
    return {"header": {"key": key, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def _openai_body(reply: LocalReply, status: int) -> Json:
    error_type = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": reply.message, "type": error_type, "param": None, "code": reply.code}}


def _anthropic_body(message: str, status: int) -> Json:
    return {"type": "error", "error": {"type": anthropic_error_type(status), "message": message}}
