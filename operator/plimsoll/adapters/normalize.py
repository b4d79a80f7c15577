"""Normalises objects of the API server, so that every reader can rely on their form.

Problem: the API allows most fields to be absent or null, and a later version may send other values. A container that
never started has `finishedAt: null`: the key exists, but its value is not a time.

Idea: an object is normalised once, where it enters the process. A null field counts as absent, and so does a field that
Plimsoll reads and that has another type than in the API. Other fields are unchanged. `metadata` always exists, and so
do `spec` and `status` of a kind that has them. Readers treat all other fields as optional.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

Object = dict[str, Any]
Shape = Any  # a type, a mapping of fields to shapes, or a list with the shape of its items

_ANY: Final = "*"  # the shape of every field of a mapping that has no fixed fields
_TEXTS: Final = {_ANY: str}
_CONDITIONS: Final = [{"type": str, "status": str, "reason": str, "message": str, "lastTransitionTime": str}]
_STATE: Final = {
    "waiting": {"reason": str, "message": str},
    "running": {"startedAt": str},
    "terminated": {"exitCode": int, "reason": str, "message": str, "finishedAt": str},
}
_CONTAINERS: Final = [{"name": str, "image": str, "ready": bool, "state": _STATE, "lastState": _STATE}]
_POD: Final = {
    "containers": [
        {
            "name": str,
            "image": str,
            "args": [str],
            "env": [{"name": str, "value": str}],
            "resources": {"limits": {}},
            "ports": [{"name": str, "containerPort": int}],
        }
    ],
    "nodeSelector": _TEXTS,
}
_METADATA: Final = {
    "name": str,
    "namespace": str,
    "uid": str,
    "resourceVersion": str,
    "generation": int,
    "creationTimestamp": str,
    "deletionTimestamp": str,
    "deletionGracePeriodSeconds": int,
    "labels": _TEXTS,
    "annotations": _TEXTS,
    "ownerReferences": [{"uid": str, "kind": str, "name": str, "controller": bool}],
    "managedFields": [{"manager": str, "fieldsV1": {"f:spec": {}}}],
}
_COUNTS: Final = ("replicas", "readyReplicas", "updatedReplicas", "observedGeneration")
_KINDS: Final[Mapping[str, Mapping[str, Shape]]] = {
    "Pod": {
        "spec": _POD,
        "status": {
            "phase": str,
            "podIP": str,
            "conditions": _CONDITIONS,
            "containerStatuses": _CONTAINERS,
            "initContainerStatuses": _CONTAINERS,
        },
    },
    "Deployment": {
        "spec": {"replicas": int, "template": {"spec": _POD}},
        "status": {**dict.fromkeys(_COUNTS, int), "conditions": _CONDITIONS},
    },
    "LeaderWorkerSet": {
        "spec": {"replicas": int, "leaderWorkerTemplate": {"leaderTemplate": {"spec": _POD}}},
        "status": {**dict.fromkeys(_COUNTS, int), "conditions": _CONDITIONS},
    },
    "ControllerRevision": {"data": {}},
    "Lease": {"spec": {"holderIdentity": str}},
    # `parse` validates the spec, and reports a wrong type to the user.
    "InferenceService": {
        "status": {
            "conditions": _CONDITIONS,
        }
    },
    "InferenceServiceAdmission": {"limits": {}},
    "EndpointSlice": {
        "endpoints": [
            {
                "addresses": [str],
                "conditions": {"serving": bool, "terminating": bool},
                "targetRef": {"name": str, "uid": str},
            }
        ],
        "ports": [{"name": str, "port": int}],
    },
}


MAX_DEPTH: Final = 64  # levels of an object; Kubernetes' own have fewer than 30


def normalize(obj: Mapping[str, Any]) -> Object:
    """The object without nulls, without fields of a wrong type, and without what is nested deeper than `MAX_DEPTH`."""
    kind = obj.get("kind")
    shape = {"metadata": _METADATA, **_KINDS.get(kind if isinstance(kind, str) else "", {})}
    return {name: {} for name in shape} | _fields(obj, shape, MAX_DEPTH)


def value_at(obj: object, *path: str) -> Any:
    """The value at a path of field names; None if a part of the path is absent or not a mapping."""
    for name in path:
        obj = obj.get(name) if isinstance(obj, Mapping) else None
    return obj


def epoch_s(text: object) -> float | None:
    """Seconds since the epoch of a time in the API's format; None for anything else."""
    if not isinstance(text, str):
        return None
    try:
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except ValueError:
        return None


def _fields(value: Mapping[str, Any], shape: Mapping[str, Shape], depth: int) -> Object:
    other = shape.get(_ANY)
    pairs = ((name, _value(part, shape.get(name, other), depth - 1)) for name, part in value.items())
    return {name: part for name, part in pairs if part is not None}


def _value(value: Any, shape: Shape, depth: int) -> Any:
    """The value without nulls; None if it does not match `shape` or has more than `depth` levels. A shape of None
    matches any value."""
    if depth <= 0 and isinstance(value, (dict, list)):  # not Mapping, whose check costs more than all the rest
        return None
    if isinstance(value, dict):
        return _fields(value, shape or {}, depth) if shape is None or isinstance(shape, dict) else None
    if isinstance(value, list):
        if shape is not None and not isinstance(shape, list):
            return None
        item = shape[0] if shape else None
        return [part for one in value if (part := _value(one, item, depth - 1)) is not None]
    if shape is None:
        return value
    fits = isinstance(shape, type) and isinstance(value, shape) and isinstance(value, bool) is (shape is bool)
    return value if fits else None
