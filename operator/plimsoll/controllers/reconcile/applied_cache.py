"""Detects whether an object has changed since the operator last applied it.

The API server adds defaults and rewrites quantities, so a live object never equals the applied one. Instead the cache
keeps fingerprints of the desired object and of the live object right after the apply. If both are unchanged, no write
is needed. After a restart the cache is empty, and every object is applied once, which changes nothing on the server.
"""

from __future__ import annotations

from typing import Any

from plimsoll.api import labels
from plimsoll.controllers.object_cache import Key
from plimsoll.controllers.replicas_owner import replicas_owners, replicas_set_by
from plimsoll.resources.object_meta import short_hash

Object = dict[str, Any]

SERVER_OWNED_METADATA = ("resourceVersion", "generation", "managedFields", "creationTimestamp", "uid", "annotations")


def fingerprint(live: Object) -> str:
    """Hash of a live object, without its status and the metadata that only the API server changes."""
    meta = {k: v for k, v in live["metadata"].items() if k not in SERVER_OWNED_METADATA}
    body = {k: v for k, v in live.items() if k not in ("metadata", "status", "apiVersion")}
    return short_hash([meta, body], 32)


class AppliedCache:
    """Fingerprints of the desired and the live object, by service and object."""

    def __init__(self) -> None:
        self._fingerprints: dict[Key, dict[tuple[str, str], tuple[str, str]]] = {}

    def is_in_sync(self, service: Key, desired: Object, live: Object | None) -> bool:
        """True if `desired` was applied and the live object has not changed since."""
        if live is None:
            return False
        fingerprints = self._fingerprints.get(service, {})
        return fingerprints.get(_kind_and_name(desired)) == (short_hash(desired, 32), fingerprint(live))

    def record(self, service: Key, desired: Object, live: Object) -> None:
        self._fingerprints.setdefault(service, {})[_kind_and_name(desired)] = (
            short_hash(desired, 32),
            fingerprint(live),
        )

    def forget(self, service: Key) -> None:
        self._fingerprints.pop(service, None)


def _kind_and_name(desired: Object) -> tuple[str, str]:
    return desired["kind"], desired["metadata"]["name"]


def has_foreign_replicas_owner(live: Object | None) -> bool:
    """True if another client ordered spec.replicas, or Plimsoll's scaler did, so that our apply must leave it out."""
    if live is None:
        return False
    return replicas_set_by(live) is not None or any(owner != labels.FIELD_MANAGER for owner in replicas_owners(live))
