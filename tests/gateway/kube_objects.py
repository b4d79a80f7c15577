"""InferenceServices and engine pods as the API server would send them, and a source that reads them from a file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from plimsoll.adapters.kube_client import Resource, WatchEvent
from plimsoll.api import labels

Object = dict[str, Any]

SYSTEM = "plimsoll-system"
GATEWAY_SELECTOR = f"{labels.COMPONENT}=gateway"


def service(name: str = "chat", namespace: str = "team", model: str | None = None, **changes: Any) -> Object:
    """An InferenceService that holds its model name; `changes` go into its metadata."""
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"uid-{namespace}-{name}",
            "creationTimestamp": "2026-01-02T03:04:05Z",
            **changes,
        },
        "spec": {"model": {"uri": "file:///models/tiny", **({"name": model} if model else {})}},
        "status": {"modelNameClaim": {"name": model or name, "since": "2026-01-02T03:04:06.000001Z"}},
    }


def pod(
    address: str,
    *,
    service: str = "chat",
    namespace: str = "team",
    role: str = "serve",
    revision: str = "r1",
    ready: bool = True,
    **changes: Any,
) -> Object:
    """An engine pod at `ip:port`; `changes` go into its metadata."""
    ip, _, port = address.rpartition(":")
    return {
        "metadata": {
            "name": f"{service}-{role}-{ip.replace('.', '-')}-{port}",
            "namespace": namespace,
            "labels": {labels.SERVICE: service, labels.ROLE: role, labels.REVISION: revision},
            **changes,
        },
        "spec": {"containers": [{"name": "engine", "ports": [{"name": "api", "containerPort": int(port)}]}]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def gateway_pod(name: str, *, ready: bool = True, **changes: Any) -> Object:
    """A gateway pod of the release; `changes` go into its metadata."""
    return {
        "metadata": {"name": name, "namespace": SYSTEM, "labels": {labels.COMPONENT: "gateway"}, **changes},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True" if ready else "False"}]},
    }


class FileSource:
    """Objects of a JSON file {plural: [object]}; a replaced file is a new sync, no file an API server that is away."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def watch(
        self, resource: Resource, namespace: str | None = None, selector: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        before: bytes | None = None
        while True:
            now = self._path.read_bytes() if self._path.exists() else None
            if now is not None and now != before:
                before = now
                found = json.loads(now)[resource.plural]
                yield WatchEvent("SYNC", objects=tuple(o for o in found if _is_selected(o, namespace, selector)))
            await asyncio.sleep(0.02)


def _is_selected(obj: Object, namespace: str | None, selector: str | None) -> bool:
    """Whether a list of this namespace (None: all) with this selector (KEY or KEY=VALUE) has the object."""
    meta = obj["metadata"]
    key, _, value = (selector or "").partition("=")
    found = meta.get("labels", {}).get(key)
    return namespace in (None, meta["namespace"]) and (not key or (found == value if value else found is not None))
