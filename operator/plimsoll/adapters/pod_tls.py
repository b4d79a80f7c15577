"""Whether a pod requires TLS, and the name in its certificate: its label says it, so both kinds may run at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plimsoll.api import labels
from plimsoll.api.contract import engine_tls_name, internal_tls_name


def tls_name(pod: Mapping[str, Any]) -> str:
    """The DNS name in the certificate of an engine's or a gateway's pod, "" for one that speaks plain HTTP."""
    meta = pod["metadata"]
    pod_labels = meta.get("labels") or {}
    if pod_labels.get(labels.TLS) != labels.MUTUAL_TLS:
        return ""
    return engine_tls_name(meta["namespace"]) if labels.ROLE in pod_labels else internal_tls_name(meta["namespace"])
