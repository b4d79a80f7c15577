"""Objects without the parts that no reader needs, before they are stored.

Problem: the API server repeats every field of an object in its managed fields, once for each manager. As Python
objects these are more than half of what the caches hold.

Idea: of each entry only the manager stays, how it writes, and whether it owns the replica count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

Object = dict[str, Any]

_ENTRY_FIELDS: Final = ("manager", "operation", "subresource")
_REPLICAS: Final = "f:replicas"


def trimmed(obj: Object) -> Object:
    """Return an object of the API server without what nobody reads. Fields of an unexpected type are left alone."""
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
