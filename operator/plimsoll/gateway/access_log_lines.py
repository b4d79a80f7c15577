"""The gateway's access log: one line of JSON for each request.

Problem: what clients send must not reach the log unchanged. A line break in a model name would forge a line, and a long
one would fill the disk.

Idea: Envoy's record and the picker's attributes have bounded text only, and JSON in ASCII escapes the rest. Prompts,
keys and header values of clients are in neither, except `x-request-id`.
"""

from __future__ import annotations

import datetime
import json
from typing import Final

import orjson

from plimsoll.engines.redaction import redact
from plimsoll.gateway.envoy.access_log import AccessRecord
from plimsoll.gateway.envoy.listener import MODEL_CLUSTER_PREFIX, PICK_CLUSTER_PREFIX
from plimsoll.gateway.envoy.local_reply import HEALTH
from plimsoll.gateway.request_attributes import RequestAttributes, redact_repeated

_ENGINE_CLUSTERS: Final = (PICK_CLUSTER_PREFIX, MODEL_CLUSTER_PREFIX)
_UNKNOWN: Final = RequestAttributes("", "", "")


def access_line(record: AccessRecord, attributes: RequestAttributes | None, unix_s: float) -> bytes | None:
    """Returns the line of a request that ended at this Unix time, or None for a health check.

    `attributes` are None if the picker did not see the request. Times are in seconds.
    """
    if record.path == HEALTH:
        return None
    known = attributes or _UNKNOWN
    is_at_engine = (record.cluster or "").startswith(_ENGINE_CLUSTERS)
    line = orjson.dumps(
        {
            "time": datetime.datetime.fromtimestamp(unix_s, datetime.UTC).isoformat(timespec="milliseconds"),
            "log": "access",
            "request_id": redact(record.client_request_id) if record.client_request_id else None,
            "trace_id": record.trace_id or None,
            "method": redact_repeated(record.method) if record.method else None,
            "path": redact_repeated(record.path) if record.path else None,
            "tenant": known.tenant or None,
            "class": known.request_class or None,
            "api_key": known.key_name or None,
            "model": known.model or None,
            "service": known.service or None,
            "endpoint": (record.upstream or None) if is_at_engine else None,
            "prefill_endpoint": known.prefill or None,
            "status": record.status,
            "reason": record.reason or None,
            "outcome": record.outcome.value if is_at_engine else None,
            "flags": record.flags,
            "details": record.details,
            "retry": known.is_retry,
            "attempts": record.attempts if is_at_engine else None,
            "queue_s": None if known.queued_s is None else round(known.queued_s, 6),
            "ttft_s": _seconds(record.ttft_us) if is_at_engine else None,
            "duration_s": _duration_s(record),
            "prompt_tokens": known.prompt_tokens,
            "output_tokens": known.output_tokens if record.output_tokens is None else record.output_tokens,
            "output_tokens_from": _output_source(record, known),
            "request_bytes": record.received_bytes,
            "response_bytes": record.sent_bytes,
        },
        option=orjson.OPT_APPEND_NEWLINE,
    )
    # Some readers take U+2028 and the like for the end of a line.
    return line if line.isascii() else json.dumps(orjson.loads(line), separators=(",", ":")).encode() + b"\n"


def _output_source(record: AccessRecord, known: RequestAttributes) -> str | None:
    """Returns what the output tokens are from: the response's `usage`, an estimate by its size, None if unknown."""
    if record.output_tokens is not None:
        return "usage"
    return None if known.output_tokens is None else "size"


def _duration_s(record: AccessRecord) -> float | None:
    """Returns the time to the last byte, or to the end of a request without one, which is known in milliseconds."""
    if record.duration_us is not None or record.total_ms is None:
        return _seconds(record.duration_us)
    return record.total_ms / 1e3


def _seconds(micros: int | None) -> float | None:
    return None if micros is None else micros / 1e6
