"""Detects whether an object has changed since the operator last applied it.

The API server adds defaults and rewrites quantities, so a live object never equals the applied one. Instead the cache
keeps fingerprints of the desired object and of the live object right after the apply. If both are unchanged, no write
is needed. An annotation of the live object has the fingerprint of what was applied. A new process with that desired
object applies nothing where the live one still has all of it: a restart of a large fleet's operator writes nothing.
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
        """True if `desired` was applied and the live object has not changed since.

        For an object that this process has not applied: if it was applied, and the live object still has all of it.
        """
        if live is None:
            return False
        known = self._fingerprints.get(service, {}).get(_kind_and_name(desired))
        if known is None and _was_applied(desired, live):
            self.record(service, desired, live)
            return True
        return known == (short_hash(desired, 32), fingerprint(live))

    def record(self, service: Key, desired: Object, live: Object) -> None:
        self._fingerprints.setdefault(service, {})[_kind_and_name(desired)] = (
            short_hash(desired, 32),
            fingerprint(live),
        )

    def forget(self, service: Key) -> None:
        self._fingerprints.pop(service, None)


def annotated(desired: Object) -> Object:
    """The object to apply: `desired` with its fingerprint as an annotation."""
    meta = desired["metadata"]
    annotations = {**meta.get("annotations", {}), labels.APPLIED: short_hash(desired, 32)}
    return {**desired, "metadata": {**meta, "annotations": annotations}}


def _was_applied(desired: Object, live: Object) -> bool:
    meta = live["metadata"]
    is_owner = any(
        one.get("manager") == labels.FIELD_MANAGER and one.get("operation") == "Apply"
        for one in meta.get("managedFields", [])
    )
    has_fingerprint = meta.get("annotations", {}).get(labels.APPLIED) == short_hash(desired, 32)
    return is_owner and has_fingerprint and _contains(live, desired)


def _contains(live: Any, desired: Any) -> bool:
    """Whether a live value has all of a desired one. An empty one is left out by the API server.

    A number equals its text, as which a quantity is stored.
    """
    if live is None and desired in ("", [], {}):
        return True
    if isinstance(desired, dict):
        return isinstance(live, dict) and all(
            _contains(live.get(name), part) for name, part in desired.items() if part is not None
        )
    if isinstance(desired, list):
        return isinstance(live, list) and len(live) == len(desired) and all(map(_contains, live, desired))
    return bool(live == desired) or (live is not None and str(live) == str(desired))


def _kind_and_name(desired: Object) -> tuple[str, str]:
    return desired["kind"], desired["metadata"]["name"]


def has_foreign_replicas_owner(live: Object | None) -> bool:
    """True if another client ordered spec.replicas, or Plimsoll's scaler did, so that our apply must leave it out."""
    if live is None:
        return False
    return replicas_set_by(live) is not None or any(owner != labels.FIELD_MANAGER for owner in replicas_owners(live))
