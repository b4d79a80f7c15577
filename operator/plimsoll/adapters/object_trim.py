"""Objects without the parts that no reader needs, before they are stored.

Problem: the API server repeats every field of an object in its managed fields, once for each manager. As Python
objects these are more than half of what the caches hold.

Idea: of each entry only the manager stays, how it writes, and whether it owns the replica count. Of an EndpointSlice
only what a gateway reads stays: a thousand services have as many, with ten engines each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from plimsoll.api import labels

Object = dict[str, Any]

_ENTRY_FIELDS: Final = ("manager", "operation", "subresource")
_REPLICAS: Final = "f:replicas"
_SLICE_METADATA: Final = ("name", "namespace", "uid", "resourceVersion")
_SLICE_LABELS: Final = (labels.SERVICE, labels.ROLE, labels.SLICE_SERVICE, labels.SLICE_MANAGED_BY)
_POD_FIELDS: Final = ("name", "uid")
_CONDITIONS: Final = ("serving", "terminating")


def trimmed(obj: Object) -> Object:
    """Return an object of the API server without what nobody reads. Fields of an unexpected type are left alone."""
    if obj.get("kind") == "EndpointSlice":
        return _trimmed_slice(obj)
    meta = obj.get("metadata")
    entries = meta.get("managedFields") if isinstance(meta, Mapping) else None
    if not isinstance(meta, Mapping) or not isinstance(entries, list):
        return obj
    trimmed = [_trimmed_entry(entry) if isinstance(entry, Mapping) else entry for entry in entries]
    return {**obj, "metadata": {**meta, "managedFields": trimmed}}


def _trimmed_entry(entry: Mapping[str, Any]) -> Object:
    trimmed: Object = {name: entry[name] for name in _ENTRY_FIELDS if name in entry}
    fields = entry.get("fieldsV1")
    spec = fields.get("f:spec") if isinstance(fields, Mapping) else None
    if isinstance(spec, Mapping) and _REPLICAS in spec:
        trimmed["fieldsV1"] = {"f:spec": {_REPLICAS: {}}}
    return trimmed


def _trimmed_slice(obj: Object) -> Object:
    meta = _fields(obj.get("metadata"), _SLICE_METADATA)
    meta["labels"] = _fields((obj.get("metadata") or {}).get("labels"), _SLICE_LABELS)
    return {
        **_fields(obj, ("apiVersion", "kind")),
        "metadata": meta,
        "ports": [_fields(port, ("name", "port")) for port in obj.get("ports") or ()],
        "endpoints": [
            {
                "addresses": list(one.get("addresses") or ())[:1],
                "conditions": _fields(one.get("conditions"), _CONDITIONS),
                "targetRef": _fields(one.get("targetRef"), _POD_FIELDS),
            }
            for one in obj.get("endpoints") or ()
        ],
    }


def _fields(part: Any, names: tuple[str, ...]) -> Object:
    return {name: part[name] for name in names if name in part} if isinstance(part, Mapping) else {}
