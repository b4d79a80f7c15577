"""Builds the InferencePool of a service, by which gateways of other products find its engines and its picker. Pure.

The pool has the engines that take clients' requests. Its failure mode is FailClose, since a gateway that picks engines
itself would bypass admission control and pass on the headers that only the picker may set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from plimsoll.api import labels
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.core.types import Role
from plimsoll.resources import object_meta
from plimsoll.resources.platform_config import InferencePoolSettings

Object = dict[str, Any]

_HTTP_1: Final = "http"  # appProtocol of a pool, and its default
_PAIR: Final = re.compile(r"([-\w./]+)\s*==?\s*([-\w.]*)", re.ASCII)
_ANY: Final[Mapping[str, Any]] = {}


def inference_pool(
    service: InferenceService,
    parent: Object,
    settings: InferencePoolSettings,
    target_labels: Mapping[str, str] | None = None,
) -> Object:
    """The InferencePool of a service. target_labels: of the pods of its target; None for a service with tiers."""
    name, targets = service.metadata.name, service.spec.targets
    role = Role.DECODE if service.spec.tiers.decode is not None else Role.SERVE
    port = service.spec.engine.api_port if targets is None else targets.port
    return {
        "apiVersion": labels.POOL_API_VERSION,
        "kind": labels.POOL_KIND,
        "metadata": object_meta.child_metadata(parent, name, object_meta.service_labels(name)),
        "spec": {
            "selector": {"matchLabels": target_labels or object_meta.tier_selector(name, role)},
            "targetPorts": [{"number": port}],
            "endpointPickerRef": {
                "group": "",
                "kind": "Service",
                "name": settings.picker_service,
                "port": {"number": settings.picker_port},
                "failureMode": "FailClose",
            },
        },
    }


def match_labels(selector: str) -> dict[str, str] | None:
    """The pairs of a label selector; None for one that a pool, which has only pairs, cannot express."""
    found: dict[str, str] = {}
    for part in selector.split(","):
        pair = _PAIR.fullmatch(part.strip())
        if pair is None or found.setdefault(pair[1], pair[2]) != pair[2]:
            return None
    return found


def differences(live: Object, desired: Object) -> tuple[str, ...]:
    """The fields in which a pool of somebody else keeps requests from the picker or from the service's engines."""
    spec, desired_spec = live.get("spec") or _ANY, desired["spec"]
    picker, desired_picker = spec.get("endpointPickerRef") or _ANY, desired_spec["endpointPickerRef"]
    name, port = desired_picker["name"], desired_picker["port"]["number"]
    number = (picker.get("port") or _ANY).get("number")
    reference = (picker.get("group", ""), picker.get("kind", "Service"), picker.get("name"), number)
    found, ports = [], [one["number"] for one in desired_spec["targetPorts"]]
    if (spec.get("selector") or _ANY).get("matchLabels") != desired_spec["selector"]["matchLabels"]:
        pairs = ",".join(f"{name}={value}" for name, value in sorted(desired_spec["selector"]["matchLabels"].items()))
        found.append(f"selector.matchLabels must be {pairs}")
    if [one.get("number") for one in spec.get("targetPorts") or ()] != ports:
        found.append(f"targetPorts must have the port {ports[0]} alone")
    if spec.get("appProtocol", _HTTP_1) != _HTTP_1:
        found.append(f"appProtocol must be {_HTTP_1}, which engines speak")
    if reference != ("", "Service", name, port):
        found.append(f"endpointPickerRef must be Service {name} port {port}")
    if picker.get("failureMode", "FailClose") != desired_picker["failureMode"]:
        found.append(f"endpointPickerRef.failureMode must be {desired_picker['failureMode']}")
    return tuple(found)
