"""The part of an engine's pod that mutual TLS needs: the Secret of its namespace, and a label that gateways read.

The Secret is optional for the kubelet, so that its absence is an error of the launcher with a sentence in the
condition, and not a pod that waits without a word. An engine without launcher speaks plain HTTP.
"""

from __future__ import annotations

import json
from typing import Any

from plimsoll.api import labels
from plimsoll.api.contract import engine_contract, engine_tls_name, internal_tls_name
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.resources.platform_config import PlatformConfig

Object = dict[str, Any]

VOLUME = "plimsoll-tls"


def has_tls(service: InferenceService, platform: PlatformConfig) -> bool:
    """Whether the engines of a service require mutual TLS."""
    return bool(platform.engine.tls.secret_name) and service.spec.engine.contract.launched


def pod_labels(service: InferenceService, platform: PlatformConfig) -> dict[str, str]:
    return {labels.TLS: labels.MUTUAL_TLS} if has_tls(service, platform) else {}


def probe_scheme(service: InferenceService, platform: PlatformConfig) -> Object:
    """What an httpGet probe of the launcher's port needs."""
    return {"scheme": "HTTPS"} if has_tls(service, platform) else {}


def environment(service: InferenceService, platform: PlatformConfig) -> list[Object]:
    """The Secret, for messages, and the names in the certificates of the namespace's engines and of the release."""
    if not has_tls(service, platform):
        return []
    namespace = service.metadata.namespace
    document = {
        "secret": f"{namespace}/{platform.engine.tls.secret_name}",
        "name": engine_tls_name(namespace),
        "release": internal_tls_name(platform.gateway.namespace),
    }
    return [{"name": engine_contract().env["tls"], "value": json.dumps(document)}]


def volumes(service: InferenceService, platform: PlatformConfig) -> list[Object]:
    if not has_tls(service, platform):
        return []
    secret = {"secretName": platform.engine.tls.secret_name, "optional": True, "defaultMode": 0o444}
    return [{"name": VOLUME, "secret": secret}]


def mounts(service: InferenceService, platform: PlatformConfig) -> list[Object]:
    if not has_tls(service, platform):
        return []
    return [{"name": VOLUME, "mountPath": engine_contract().paths["tls"], "readOnly": True}]
