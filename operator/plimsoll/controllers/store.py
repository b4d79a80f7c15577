"""What the operator knows of the cluster: the watched objects, newest version each.

Writes answer with the object as the server now has it; putting that in at once means that the operator reads its
own writes, and an older version that arrives late through a watch is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from plimsoll.api import labels
from plimsoll.api.v1alpha1 import InferenceService, parse
from plimsoll.core.errors import InvalidSpec

Object = dict[str, Any]
Key = tuple[str, str]  # namespace, name


def key_of(obj: Object) -> Key:
    meta = obj["metadata"]
    return meta.get("namespace", ""), meta["name"]


def service_of(obj: Object) -> Key | None:
    """The service that an object belongs to, by its label."""
    meta = obj["metadata"]
    if obj.get("kind") == labels.KIND:
        return key_of(obj)
    name = meta.get("labels", {}).get(labels.SERVICE)
    return (meta.get("namespace", ""), name) if name else None


def role_of(obj: Object) -> str:
    """The tier that an object belongs to, by its label; empty where it has none."""
    return str(obj["metadata"].get("labels", {}).get(labels.ROLE, ""))


def version_of(obj: Object) -> int:
    """Which write made it, as the API server counts; 0 where that is not told."""
    text = obj["metadata"].get("resourceVersion", "0")
    return int(text) if text.isdecimal() else 0


class Store:
    """Objects by kind; `changed` is told the service that an object belongs to."""

    def __init__(self, changed: Callable[[Key], None] = lambda key: None) -> None:
        self._objects: dict[str, dict[Key, Object]] = {}
        self._children: dict[tuple[str, Key], dict[Key, None]] = {}
        self._typed: dict[str, tuple[Object, InferenceService | InvalidSpec]] = {}  # by uid, with what it was read from
        self._changed = changed

    def put(self, obj: Object) -> None:
        kind, key = obj["kind"], key_of(obj)
        known = self._objects.setdefault(kind, {})
        if key in known and version_of(known[key]) > version_of(obj) and _same(known[key], obj):
            return
        if key in known and not _same(known[key], obj):
            self._typed.pop(known[key]["metadata"].get("uid"), None)
        known[key] = obj
        self._link(kind, key, obj)

    def drop(self, obj: Object) -> None:
        kind, key = obj["kind"], key_of(obj)
        live = self._objects.get(kind, {}).get(key)
        if live is None or not _same(live, obj):
            return
        del self._objects[kind][key]
        self._typed.pop(live["metadata"].get("uid"), None)
        owner = service_of(live)
        if owner:
            siblings = self._children.get((kind, owner), {})
            siblings.pop(key, None)
            if not siblings:
                self._children.pop((kind, owner), None)
            self._changed(owner)

    def replace(self, kind: str, objects: tuple[Object, ...], namespace: str | None = None) -> None:
        """Everything of a kind (in one namespace, or in all), as a list call saw it."""
        present = {key_of(obj) for obj in objects}
        for key, obj in list(self._objects.get(kind, {}).items()):
            if key not in present and namespace in (None, key[0]):
                self.drop(obj)
        for obj in objects:
            self.put(obj)

    def get(self, kind: str, key: Key) -> Object | None:
        return self._objects.get(kind, {}).get(key)

    def typed(self, raw: Object) -> InferenceService | InvalidSpec:
        """The service that an object of this store stands for, or what is wrong with it; read once per version."""
        uid = raw["metadata"]["uid"]
        known = self._typed.get(uid)
        if known is None or known[0] is not raw:
            known = self._typed[uid] = (raw, _read(raw))
        return known[1]

    def all(self, kind: str) -> Iterator[Object]:
        return iter(list(self._objects.get(kind, {}).values()))

    def children(self, kind: str, service: Key) -> list[Object]:
        """The objects of a kind that belong to a service, in no order."""
        known = self._objects.get(kind, {})
        return [known[key] for key in self._children.get((kind, service), {})]

    def _link(self, kind: str, key: Key, obj: Object) -> None:
        owner = service_of(obj)
        if owner:
            self._children.setdefault((kind, owner), {})[key] = None
            self._changed(owner)


def _read(raw: Object) -> InferenceService | InvalidSpec:
    try:
        return parse(raw)
    except InvalidSpec as error:
        return error


def _same(a: Object, b: Object) -> bool:
    """True if both are versions of one object, not two objects that had the same name one after the other."""
    return bool(a["metadata"].get("uid") == b["metadata"].get("uid"))
