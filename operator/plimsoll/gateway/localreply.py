"""Envoy's own refusals, in OpenAI's shape and with words a caller can act on.

Problem: what Envoy answers by itself (a bad path, a body too large, no engine to connect to) has an empty or plain text
body, no `Retry-After`, and most of these carry no response flag to tell them apart.

Idea: one mapper per status, with the words, the type and the headers that belong to it; whatever the picker denied
through ext_authz (flag UAEX) passes first and unchanged. A cluster that has as many requests as it may (flag UO) is one
whose picker does not answer: what it refuses is told as the picker would.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Words:
    """How one status reads. `message` may hold Envoy's format commands; `code` is told as `x-plimsoll-reason` too."""

    message: str
    code: str
    retry_after: int | None = None  # seconds; None means that trying again does not help


OWN_TEXT = "%LOCAL_REPLY_BODY%"

WORDS = {
    400: Words("The request is not valid HTTP (%RESPONSE_CODE_DETAILS%).", "bad_request"),
    403: Words("This gateway takes no upgrades and no tunnels.", "forbidden"),
    404: Words(
        "Unknown path. This gateway serves /v1/models, /v1/models/NAME, /v1/chat/completions, /v1/completions and"
        " /health.",
        "unknown_path",
    ),
    405: Words(
        "This path does not take the method %REQ(:METHOD):20%. Use %RESP(ALLOW)%.",
        "method_not_allowed",
    ),
    408: Words("The request did not arrive in time (%RESPONSE_CODE_DETAILS%).", "request_timeout"),
    413: Words(
        "The request body is larger than the limit of {max_body_bytes} bytes (chart value gateway.maxBodyBytes). Send a"
        " smaller one.",
        "body_too_large",
    ),
    415: Words(
        "The request body is compressed (Content-Encoding: %REQ(CONTENT-ENCODING):40%), which this gateway does not"
        " read. Send it without compression and without that header.",
        "compressed_body",
    ),
    426: Words("This gateway needs HTTP/1.1 or HTTP/2.", "http_version"),
    431: Words("The request headers are larger than this gateway accepts.", "headers_too_large"),
    500: Words("The gateway failed (%RESPONSE_CODE_DETAILS%).", "gateway_error"),
    501: Words("The request is framed in a way that this gateway does not read.", "not_implemented"),
    502: Words("The engine's answer is not valid HTTP (%RESPONSE_CODE_DETAILS%).", "bad_gateway"),
    503: Words("No engine could take the request (%RESPONSE_CODE_DETAILS%). Please try again.", "unavailable", 1),
    504: Words("The engine did not answer in time (%RESPONSE_CODE_DETAILS%).", "timeout"),
}

FULL = 429
FULL_WORDS = Words("All ready engines are full. Please try again.", "overloaded", 10)
HEALTH = "/health"
TWO_HOSTS = Words("The request has more than one Host header. Send exactly one.", "bad_request")
DRAINING = Words("This gateway is shutting down. Use another instance.", "draining", 1)
PREFLIGHT = Words(
    "The origin %REQ(ORIGIN):200% may not use this gateway from a browser: it is not in the chart value"
    " gateway.corsAllowedOrigins. Add it there, or send the request from a server.",
    "origin_not_allowed",
)
OTHERS = Words("The gateway refused the request (%RESPONSE_CODE_DETAILS%).", "gateway_error")


def local_reply_config(max_body_bytes: int) -> Json:
    """The `local_reply_config` of the HTTP connection manager."""
    large = WORDS[413]
    large = replace(large, message=large.message.format(max_body_bytes=max_body_bytes))
    return {
        "mappers": [
            _picker_own(),
            _mapper(_both(_status("EQ", 400), _request(":authority", {"contains": ","})), 400, TWO_HOSTS),
            _mapper(_both(_status("EQ", 403), _request(":method", {"exact": "OPTIONS"})), 403, PREFLIGHT),
            _mapper(_both(_status("EQ", 503), _request(":path", {"prefix": HEALTH})), 503, DRAINING),
            _mapper(_flags("UF", "UC"), 503, WORDS[503]),  # whatever became of their retries
            _mapper(_flags("UO"), FULL, FULL_WORDS) | {"status_code": FULL},
            *(_mapper(_status("EQ", status), status, words) for status, words in (WORDS | {413: large}).items()),
            _mapper(_status("GE", 400), 400, OTHERS),
        ]
    }


def _picker_own() -> Json:
    return {
        "filter": _flags("UAEX"),
        "body_format_override": {
            "text_format_source": {"inline_string": OWN_TEXT},
            "content_type": "application/json",
        },
    }


def _flags(*flags: str) -> Json:
    """Replies with any of these."""
    return {"response_flag_filter": {"flags": list(flags)}}


def _status(comparison: str, status: int) -> Json:
    value = {"default_value": status, "runtime_key": f"plimsoll.reply.{comparison}.{status}"}
    return {"status_code_filter": {"comparison": {"op": comparison, "value": value}}}


def _request(header: str, match: Json) -> Json:
    """Replies to requests with such a header."""
    return {"header_filter": {"header": {"name": header, "string_match": match}}}


def _both(*filters: Json) -> Json:
    return {"and_filter": {"filters": list(filters)}}


def _mapper(which: Json, status: int, words: Words) -> Json:
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    again = ("x-should-retry", "false") if words.retry_after is None else ("retry-after", str(words.retry_after))
    return {
        "filter": which,
        "headers_to_add": [_header(*again), _header("x-plimsoll-reason", words.code)],
        "body_format_override": _body(words.message, kind, words.code),
    }


def _header(key: str, value: str) -> Json:
    return {"header": {"key": key, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def _body(message: str, kind: str, code: str) -> Json:
    return {
        "json_format": {"error": {"message": message, "type": kind, "param": None, "code": code}},
        "content_type": "application/json",
    }
