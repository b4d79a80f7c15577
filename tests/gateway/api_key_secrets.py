"""Secrets that declare API keys, as the API server would send them."""

from __future__ import annotations

import hashlib
from typing import Any

from plimsoll.api import api_keys
from tests.gateway.kube_objects import SYSTEM, Object

FIELD_NAMES = {
    "request_class": "class",
    "requests_per_minute": "requestsPerMinute",
    "tokens_per_minute": "tokensPerMinute",
}


def key_of(name: str) -> str:
    """The key that belongs to the Secret of this name."""
    return f"plim-{name}-{hashlib.sha256(name.encode()).hexdigest()[:40]}"


def key_secret(name: str, created: str = "2026-01-02T03:04:05Z", **fields: Any) -> Object:
    """The Secret of `key_of(name)`."""
    values = {FIELD_NAMES.get(field, field): str(value) for field, value in fields.items()}
    secret = api_keys.to_secret(SYSTEM, name, key_of(name), values)
    secret["metadata"] |= {"creationTimestamp": created}
    return secret


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key_of(name)}"}
