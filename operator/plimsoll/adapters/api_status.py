"""Errors of the API server, by the status of its answer."""

from __future__ import annotations

import json
from typing import NoReturn

from plimsoll.core.errors import BackendUnavailable, ClusterError, Conflict, Forbidden, NotFound, ObjectRejected

UNKNOWN_FIELD_MESSAGE = "failed to create typed patch object"  # for an unknown field the server answers 500


def raise_for_status(status: int, body: bytes, retry_after: str | None) -> NoReturn:
    """Raise the error of an answer with a status of 400 or more. retry_after: its header."""
    try:
        message = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        message = None
    if not isinstance(message, str):  # also a pod answers, through the API server
        message = body.decode(errors="replace")[:500]
    if status == 404:
        raise NotFound(message, status)
    if status == 409:
        raise Conflict(message, status)
    if status == 403:
        raise Forbidden(message, status)
    if status in (400, 405, 413, 415, 422) or message.startswith(UNKNOWN_FIELD_MESSAGE):
        raise ObjectRejected(message, status)
    if status == 401 or status == 429 or status >= 500:
        seconds = float(retry_after) if retry_after and retry_after.isdecimal() else None
        raise BackendUnavailable(message, status, seconds)
    raise ClusterError(message, status)
