"""Bounds the memory that one object of the API server takes.

Problem: the API server stores objects of 1.5 MB, and the schema bounds each text and list, not their sum. The author of
a few dozen large ones would end the process for lack of memory.
Idea: of an object beyond the limits only what identifies it is kept, with a sentence about its size. `parse` reports
that sentence as an invalid spec. All other objects are kept whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from plimsoll.api import labels
from plimsoll.api.message_text import shorten

Object = dict[str, Any]

MAX_SERVICE_BYTES: Final = 128 * 1024  # JSON of an InferenceService without managedFields
MAX_CHILD_BYTES: Final = 512 * 1024  # JSON of another object: a template, and its fields again in managedFields
MAX_VALUES: Final = 16_384  # values in an object; a small one takes some hundred bytes of memory
MAX_PART_BYTES: Final = 32 * 1024  # JSON of a part that an object beyond the limits keeps
MAX_NAME_CHARS: Final = 256
MAX_PATH_CHARS: Final = 200
MAX_PATH_FIELDS: Final = 8
_WHOLE_KINDS: Final = frozenset({"ConfigMap", "Lease", "Event"})  # read one at a time, and not cached; but children are
_IDENTITY: Final = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "labels",
    "ownerReferences",
)
_SPEC_NAMES: Final = (("model", "name"), ("admission", "fallback", "name"))  # names that other services depend on


def bounded(obj: Mapping[str, Any]) -> Object:
    """The object, or its identity, status and the names in its spec if it exceeds a limit."""
    kind = obj.get("kind")
    if kind in _WHOLE_KINDS and labels.SERVICE not in (obj["metadata"].get("labels") or {}):
        return dict(obj)
    if kind == labels.KIND:
        obj = _without_managed_fields(obj)
    if _is_surely_small(obj):
        return dict(obj)
    limit = MAX_SERVICE_BYTES if kind == labels.KIND else MAX_CHILD_BYTES
    size, values = measure(obj, limit)
    return dict(obj) if size <= limit and values <= MAX_VALUES else _identity(obj, limit)


def _is_surely_small(obj: Mapping[str, Any]) -> bool:
    """Whether an object is within all limits by its length as JSON, as most are. A value has two bytes or more."""
    try:
        return len(orjson.dumps(obj)) <= 2 * MAX_VALUES
    except TypeError:  # such as of an integer of more than 64 bits
        return False


def measure(value: Any, limit: int | None = None) -> tuple[int, int]:
    """Bytes of a value as compact JSON, within some percent, and the number of values in it.

    limit: stop once the bytes exceed it or the values exceed MAX_VALUES; the result is then too low.
    """
    size = values = 0
    pending = [value]
    while pending and (limit is None or (size <= limit and values <= MAX_VALUES)):
        one = pending.pop()
        values += 1
        if isinstance(one, str):
            size += _text_bytes(one) + 3
        elif isinstance(one, dict):  # not Mapping, whose check costs more than all the rest
            size += 2 + sum(4 + (_text_bytes(name) if isinstance(name, str) else 0) for name in one)
            pending.extend(one.values())
        elif isinstance(one, list):
            size += 2 + len(one)
            pending.extend(one)
        elif isinstance(one, int) and not isinstance(one, bool):
            size += 1 + one.bit_length() // 3
        else:
            size += 6
    return size, values


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


def _without_managed_fields(obj: Mapping[str, Any]) -> Object:
    meta = obj.get("metadata")
    if not isinstance(meta, Mapping) or "managedFields" not in meta:
        return dict(obj)
    return {**obj, "metadata": {name: part for name, part in meta.items() if name != "managedFields"}}


def _identity(obj: Mapping[str, Any], limit: int) -> Object:
    meta, spec, status = (_mapping(obj.get(name)) for name in ("metadata", "spec", "status"))
    names: Object = {}
    for path in _SPEC_NAMES if obj.get("kind") == labels.KIND else ():
        value: Any = spec
        for field in path:
            value = _mapping(value).get(field)
        if isinstance(value, str) and len(value) <= MAX_NAME_CHARS:
            for field in reversed(path):
                value = {field: value}
            names |= value
    replicas = spec.get("replicas")
    return {
        **{name: obj[name] for name in ("apiVersion", "kind") if name in obj},
        "metadata": {name: meta[name] for name in _IDENTITY if name in meta and _is_small(meta[name])},
        "spec": names | ({"replicas": replicas} if isinstance(replicas, int) else {}),
        "status": status if _is_small(status) else {},
        labels.SIZE_PROBLEM: _problem(obj, limit),
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_small(value: Any) -> bool:
    return measure(value, MAX_PART_BYTES)[0] <= MAX_PART_BYTES


def _problem(obj: Mapping[str, Any], limit: int) -> str:
    """The size, the limit, and the innermost part that takes more than half of it."""
    size, values = measure(obj)
    path, part = list[str](), obj
    while isinstance(part, Mapping) and len(path) < MAX_PATH_FIELDS:
        name = next((name for name, value in part.items() if _is_large(value, limit)), None)
        if name is None:
            break
        path, part = [*path, str(name)], part[name]
    where = f"; most of it is {shorten('.'.join(path), MAX_PATH_CHARS)}" if path else ""
    facts = f"{size // 1024} KiB and {values} values"
    return f"the object has {facts}, the limit is {limit // 1024} KiB and {MAX_VALUES} values{where}; make it smaller"


def _is_large(value: Any, limit: int) -> bool:
    size, values = measure(value, limit // 2)
    return 2 * size > limit or 2 * values > MAX_VALUES
