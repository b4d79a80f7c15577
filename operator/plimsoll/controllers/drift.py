"""Has anybody touched an object since we applied it?

The server fills in defaults and rewrites quantities, so a live object never equals what was applied. What it looked
like right after our last apply is remembered instead: the same wish and the same looks mean that nothing need be
written, and a converged fleet costs no write. The memory is lost with the process; then everything is applied once,
which the server answers without changing anything.
"""

from __future__ import annotations

from typing import Any

from plimsoll.api import labels
from plimsoll.controllers.store import Key
from plimsoll.resources.meta import digest

Object = dict[str, Any]

SERVER_OWNED = ("resourceVersion", "generation", "managedFields", "creationTimestamp", "uid", "annotations")


def looks(live: Object) -> str:
    """Hash of what anybody but the server's own controllers could have changed of a live object."""
    meta = {k: v for k, v in live["metadata"].items() if k not in SERVER_OWNED}
    body = {k: v for k, v in live.items() if k not in ("metadata", "status", "apiVersion")}
    return digest([meta, body], 32)


class Memory:
    """What was wished and what the server made of it, by service and object."""

    def __init__(self) -> None:
        self._applied: dict[Key, dict[tuple[str, str], tuple[str, str]]] = {}

    def settled(self, service: Key, wish: Object, live: Object | None) -> bool:
        """True if this wish was applied and the object still looks as it did then."""
        if live is None:
            return False
        known = self._applied.get(service, {})
        return known.get(_name(wish)) == (digest(wish, 32), looks(live))

    def applied(self, service: Key, wish: Object, live: Object) -> None:
        self._applied.setdefault(service, {})[_name(wish)] = (digest(wish, 32), looks(live))

    def forget(self, service: Key) -> None:
        self._applied.pop(service, None)


def _name(wish: Object) -> tuple[str, str]:
    return wish["kind"], wish["metadata"]["name"]


def replicas_owned_elsewhere(live: Object | None) -> bool:
    """True if a field manager other than ours owns spec.replicas, so that our apply must leave it out."""
    if live is None:
        return False
    for entry in live["metadata"].get("managedFields", []):
        owns = "f:replicas" in entry.get("fieldsV1", {}).get("f:spec", {})
        if owns and entry.get("manager") != labels.MANAGER:
            return True
    return False
