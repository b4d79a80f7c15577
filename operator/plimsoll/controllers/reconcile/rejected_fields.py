"""Names the field of the InferenceService in the API server's message about a Deployment that it rejects. Pure.

Problem: the message names a field of the Deployment, which the user has not written.
Idea: the fields that come from the service's spec are few, and are copied unchanged. Their paths are replaced.
"""

from __future__ import annotations

import re
from typing import Final

_POD_FIELDS: Final = (
    "affinity",
    "nodeSelector",
    "tolerations",
    "topologySpreadConstraints",
    "runtimeClassName",
    "priorityClassName",
    "schedulerName",
    "serviceAccountName",
)
# Lists that begin with entries of Plimsoll's own: their index would be wrong in the service.
_EXTENDED: Final = {
    r"spec\.volumes": "pod.volumes",
    r"spec\.imagePullSecrets": "pod.imagePullSecrets",
    r"spec\.containers\[\d+\]\.volumeMounts": "pod.volumeMounts",
}
_COPIED: Final = {
    **{rf"spec\.{name}": f"pod.{name}" for name in _POD_FIELDS},
    r"spec\.containers\[\d+\]\.resources": "pod.resources",
    r"metadata\.annotations": "pod.annotations",
    r"metadata\.labels": "pod.labels",
}
_RULES: Final = tuple(
    (re.compile(rf"\.?\bspec\.template\.{path}{index}(?![A-Za-z])"), field)
    for paths, index in ((_EXTENDED, r"(?:\[[^\]]*\])?"), (_COPIED, ""))
    for path, field in paths.items()
)


def in_service_terms(message: str, role: str) -> str:
    """The message with the service's fields. role: the tier of the Deployment."""
    for pattern, field in _RULES:
        message = pattern.sub(f"spec.tiers.{role}.{field}", message)
    return message
