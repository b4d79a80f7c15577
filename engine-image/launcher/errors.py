"""Errors in OpenAI's format, for any format that the engine uses.

Problem: SDKs read `error.message`, `error.type`, `error.param` and `error.code` (a string or null). vLLM sends numbers
as codes and two spellings of types, and its web framework sends `{"detail": ...}` or plain text. Idea: parse the error,
keep its message (clients match on it, for instance on "maximum context length"), and write the other fields as OpenAI
does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

MAX_MESSAGE_CHARS = 4000
MAX_RETRY_AFTER_DIGITS = 2


class RejectionReason(StrEnum):
    """Why an engine has rejected a request; the value is the error's `code` and a header of the response."""

    DRAINING = "draining"
    ENGINE_FAILED = "engine_failed"
    QUEUE_FULL = "queue_full"
    WRONG_ENGINE = "wrong_engine"
    ABORTED = "aborted"
    ADAPTER_LOADING = "model_starting"  # the code that the gateway has for a model without a ready engine
    ADAPTER_FAILED = "adapter_failed"
    PREFILL_UNAVAILABLE = "prefill_unavailable"
    UNAVAILABLE = "engine_unavailable"  # any other 503 of vLLM
    BODY_TOO_LARGE = "body_too_large"
    REQUEST_TOO_LARGE = "request_too_large"


# Reasons for which a request has to wait for another engine, if there is none.
_NEEDS_ANOTHER_ENGINE = frozenset({RejectionReason.DRAINING, RejectionReason.ENGINE_FAILED, RejectionReason.ABORTED})

# Codes that OpenAI's clients know, by words that vLLM uses.
OPENAI_CODES = (("does not exist", "model_not_found"), ("maximum context length", "context_length_exceeded"))
# vLLM's words for a full queue (max_num_queued_reqs) and for too many tokens waiting (max_num_queued_tokens).
QUEUE_FULL_MESSAGES = ("currently busy and cannot accept new requests", "has reached its prefill token backlog limit")

# vLLM's answer to every request, also to /health, while it changes its number of data-parallel engines.
SCALING_MESSAGE = "The model is currently scaling"


def error_document(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the error object for a message and an HTTP status."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def rejection_headers(
    names: Mapping[str, str], reason: RejectionReason, retry_elsewhere: bool = False, next_engine: str = ""
) -> dict[bytes, bytes]:
    """Return the headers of a 503, with the contract's `names`.

    retry_elsewhere: the gateway may try another engine. next_engine: seconds until another engine is ready, as the
    gateway sends them if this is the only one; empty if others are ready.
    """
    retry_header = {names["retry"].encode(): b"1"} if retry_elsewhere else {}
    is_known = next_engine.isascii() and next_engine.isdecimal() and len(next_engine) <= MAX_RETRY_AFTER_DIGITS
    seconds = next_engine if is_known and reason in _NEEDS_ANOTHER_ENGINE else "1"
    return {b"retry-after": seconds.encode(), names["reason"].encode(): reason.value.encode(), **retry_header}


def to_json(document: dict[str, Any]) -> bytes:
    """Compact JSON."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def to_openai_error(raw: bytes, status: int) -> dict[str, Any]:
    """Return OpenAI's error object from any error body of the engine, with the engine's message."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        return error_document(raw[:MAX_MESSAGE_CHARS].decode("utf-8", "replace").strip() or f"HTTP {status}", status)
    details = document.get("error", document) if isinstance(document, dict) else {"message": document}
    if not isinstance(details, dict):
        details = {"message": details}
    message = _message_text(details.get("message", details.get("detail")), status)
    param, code = details.get("param"), details.get("code")
    if not isinstance(code, str):
        code = next((known_code for text, known_code in OPENAI_CODES if text in message), None)
    return error_document(message, status, param if isinstance(param, str) else None, code)


def _message_text(content: Any, status: int) -> str:
    if isinstance(content, list):  # FastAPI's list of {"loc": ..., "msg": ...}
        content = "; ".join(str(item.get("msg", item) if isinstance(item, dict) else item) for item in content)
    if not isinstance(content, str):
        content = json.dumps(content) if content is not None else f"HTTP {status}"
    return str(content)[:MAX_MESSAGE_CHARS] or f"HTTP {status}"


def is_queue_full(message: str) -> bool:
    """Whether an engine rejected a request because its queue is full: another engine may take the request."""
    return any(text in message for text in QUEUE_FULL_MESSAGES)


def is_scaling(message: str) -> bool:
    """Whether an engine rejected a request because it is scaling: another engine may take the request."""
    return message.startswith(SCALING_MESSAGE)


def too_many(n: int, prompts: int, field: str, limit: int) -> dict[str, Any]:
    """Return the error of a request for more sequences (`n` times prompts) than an idle engine accepts.

    field: field of the prompts. The message equals the gateway's.
    """
    items = "prompts" if field == "prompt" else "items"
    if prompts == 1:
        problem, action = f"The field 'n' is {n}", f"Lower 'n' to at most {limit}."
    elif n == 1:
        problem, action = f"The field '{field}' has {prompts} {items}", f"Send at most {limit} {items} in one request."
    else:
        problem = (
            f"The field 'n' is {n} and the field '{field}' has {prompts} {items}, {n * prompts} sequences in total"
        )
        action = f"Lower 'n' or send fewer {items} in one request."
    message = f"{problem}, but this engine accepts at most {limit} sequences per request. {action}"
    return error_document(message, 400, field if n == 1 else "n", RejectionReason.REQUEST_TOO_LARGE)


def error_event(message: str, code: str) -> bytes:
    """Return a server-sent event with an error; SDKs raise on it."""
    return b"data: " + to_json(error_document(message, 500, code=code)) + b"\n\n"


def to_openai_event(raw: bytes) -> bytes:
    """Return a vLLM error event (`data: {"error": ...}`) in OpenAI's format; the rest of the chunk is unchanged."""
    line, separator, rest = raw.partition(b"\n\n")
    return b"data: " + to_json(to_openai_error(line.removeprefix(b"data: "), 500)) + separator + rest
