"""InferenceServices and engine pods as the API server would send them, and a source that reads them from a file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from plimsoll.adapters.kube_client import Resource, WatchEvent
from plimsoll.api import labels
from plimsoll.gateway.service_catalog import CatalogBuilder, RoutableCatalog, ServiceCatalog, _read

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
        "status": {"nameClaim": f"{model or name} since 2026-01-02T03:04:06.000001Z"},
    }


def with_adapters(obj: Object, *names: str, **not_loaded_on: list[str]) -> Object:
    """The InferenceService with LoRA adapters that hold their names; `not_loaded_on` are pods without them."""
    since = "2026-01-02T03:04:07.000001Z"
    missing = {name: {"notLoadedOn": pods} for name, pods in not_loaded_on.items()}
    adapters = [{"name": name, "uri": f"file:///adapters/{name}"} for name in names]
    return {
        **obj,
        "spec": {**obj["spec"], "adapters": adapters},
        "status": {
            **obj["status"],
            "adapters": [{"name": name, "since": since, **missing.get(name, {})} for name in names],
        },
    }


LIMITS = "limits"  # key of a test's InferenceService: what its InferenceServiceAdmission holds


def admission(obj: Object, limits: Any, **changes: Any) -> Object:
    """The InferenceServiceAdmission of a service; `changes` go into its metadata."""
    meta = obj["metadata"]
    owner = {"kind": labels.KIND, "name": meta["name"], "uid": meta["uid"], "controller": True}
    names = {"name": meta["name"], "namespace": meta["namespace"], "uid": f"{meta['uid']}-admission"}
    return {
        "kind": labels.ADMISSION_KIND,
        "metadata": {**names, "ownerReferences": [owner], **changes},
        "limits": limits,
    }


def split(objects: Iterable[Object]) -> tuple[list[Object], list[Object]]:
    """The InferenceServices and the InferenceServiceAdmissions as the API server has them."""
    given = list(objects)
    services = [{name: part for name, part in obj.items() if name != LIMITS} for obj in given]
    return services, [admission(obj, obj[LIMITS]) for obj in given if LIMITS in obj]


def catalog(objects: Iterable[Object], pods: Iterable[Object]) -> ServiceCatalog:
    """What a gateway makes of these InferenceServices, their limits, and engine pods."""
    services, admissions = split(objects)
    return build_catalog(services, pods, admissions)


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


def target_service(
    name: str = "chat", port: int | None = 8000, selector: str | None = "app=llm", **changes: Any
) -> Object:
    """An InferenceService with a target, whose pods the operator has found."""
    obj = service(name, **changes)
    ref = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llm"}
    serve = {"scaleTargetRef": ref, "maxReplicas": 4, **({} if port is None else {"port": port})}
    tier = {"summary": "1/1", **({} if selector is None else {"podSelector": selector})}
    return {
        **obj,
        "spec": {**obj["spec"], "targets": {"serve": serve}},
        "status": {**obj["status"], "tiers": {"serve": tier}},
    }


def target_pod(ip: str, *, ready: bool = True, args: Iterable[str] = (), **changes: Any) -> Object:
    """A pod that Plimsoll did not make; `changes` go into its metadata."""
    return {
        "metadata": {"name": f"llm-{ip.replace('.', '-')}", "namespace": "team", "labels": {"app": "llm"}, **changes},
        "spec": {"containers": [{"name": "vllm", "image": "vllm/vllm-openai:v0.32.0", "args": list(args)}]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def gateway_pod(name: str, *, ready: bool = True, address: str = "", **changes: Any) -> Object:
    """A gateway pod of the release; `changes` go into its metadata."""
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {
        "metadata": {"name": name, "namespace": SYSTEM, "labels": {labels.COMPONENT: "gateway"}, **changes},
        "status": {"phase": "Running", "conditions": conditions, **({"podIP": address} if address else {})},
    }


class FileSource:
    """Objects of a JSON file {plural: [object]}; a replaced file is a new sync, no file an API server that is away."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def list(
        self, resource: Resource, namespace: str | None = None, selector: str | None = None
    ) -> tuple[list[Object], str]:
        objects = json.loads(self._path.read_bytes())[resource.plural]
        return [o for o in objects if _is_selected(o, namespace, selector)], ""

    async def watch(
        self, resource: Resource, namespace: str | None = None, selector: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        before: tuple[int, int] | None = None
        while True:
            found = self._path.stat() if self._path.exists() else None
            # A file of two replacements later can have the inode of the first.
            now = found and (found.st_ino, found.st_mtime_ns)
            if now is not None and now != before:
                before = now
                objects = json.loads(self._path.read_bytes())[resource.plural]
                yield WatchEvent("SYNC", objects=tuple(o for o in objects if _is_selected(o, namespace, selector)))
            await asyncio.sleep(0.02)


def _is_selected(obj: Object, namespace: str | None, selector: str | None) -> bool:
    """Whether a list of this namespace (None: all) with this selector (KEY or KEY=VALUE) has the object."""
    meta = obj["metadata"]
    key, _, value = (selector or "").partition("=")
    found = meta.get("labels", {}).get(key)
    return namespace in (None, meta["namespace"]) and (not key or (found == value if value else found is not None))


def build_catalog(
    inference_services: Iterable[Object], pods: Iterable[Object], admissions: Iterable[Object] = ()
) -> ServiceCatalog:
    """The catalog of these objects, without services that are being deleted."""
    kinds = ((inference_services, labels.KIND), (pods, "Pod"), (admissions, labels.ADMISSION_KIND))
    return CatalogBuilder().update(
        *({key: obj for obj in objects if (key := _read(_key, kind, obj)) is not None} for objects, kind in kinds)
    )


def with_healthy(known: ServiceCatalog, healthy_addresses: Mapping[str, Collection[str]]) -> ServiceCatalog:
    """This catalog with the endpoints marked routable that Envoy reports healthy, by service key."""
    return RoutableCatalog().update(known, {key: frozenset(found) for key, found in healthy_addresses.items()})


def _key(obj: Object) -> str:
    meta = obj["metadata"]
    return f"{meta['namespace']}/{meta['name']}"
