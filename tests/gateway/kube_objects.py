"""InferenceServices and engine pods as the API server would send them.

A gateway reads no engine pods, but what Kubernetes and the operator make of them: `published` makes both from pods.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from plimsoll.adapters.adopted_pod import adopted_copy
from plimsoll.adapters.engine_of_pod import is_of_earlier_service
from plimsoll.adapters.kube_client import received
from plimsoll.adapters.normalize import value_at
from plimsoll.api import labels
from plimsoll.controllers.reconcile.engine_publication import published_engines
from plimsoll.core import codec
from plimsoll.core.routing.published_engines import PublishedEngines
from plimsoll.gateway.service_catalog import CatalogBuilder, RoutableCatalog, ServiceCatalog, _read
from plimsoll.resources import object_meta

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


ENGINE_PORT = 8000  # of a pod that names none


def engine_slice(*pods: Object, service: str, role: str, port: int, targets: bool = False, name: str = "") -> Object:
    """The EndpointSlice that Kubernetes makes of these pods of one Service."""
    meta, suffix = pods[0]["metadata"], "targets" if targets else role
    endpoints = []
    for one in pods:
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in one["status"].get("conditions") or ())
        terminating = bool(one["metadata"].get("deletionTimestamp"))
        conditions = {"ready": ready and not terminating, "serving": ready, "terminating": terminating}
        ref = {"kind": "Pod", "namespace": meta["namespace"], "name": one["metadata"]["name"], "uid": uid_of(one)}
        endpoints.append({"addresses": [one["status"]["podIP"]], "conditions": conditions, "targetRef": ref})
    slice_labels = {
        labels.SERVICE: service,
        labels.ROLE: role,
        labels.SLICE_SERVICE: f"{service}-{suffix}",
        labels.SLICE_MANAGED_BY: labels.SLICE_CONTROLLER,
    }
    made = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name or f"{service}-{suffix}-{port}",
            "namespace": meta["namespace"],
            "labels": slice_labels,
        },
        "addressType": "IPv6" if ":" in pods[0]["status"]["podIP"] else "IPv4",
        "ports": [{"name": "api", "port": port, "protocol": "TCP"}],
        "endpoints": endpoints,
    }
    made["metadata"]["resourceVersion"] = object_meta.short_hash(made)
    return received(made)


def uid_of(pod: Object) -> str:
    """The uid of a pod; one that a test gives none has its name."""
    return str(pod["metadata"].get("uid") or f"uid-{pod['metadata']['name']}")


def _with_uid(pod: Object) -> Object:
    return {**pod, "metadata": {**pod["metadata"], "uid": uid_of(pod)}}


def _is_listed(pod: Object) -> bool:
    return bool(pod["status"].get("podIP")) and pod["status"].get("phase") not in ("Succeeded", "Failed")


def slices_of(services: Iterable[Object], pods: Iterable[Object]) -> list[Object]:
    """The EndpointSlices of these pods: of tiers by their labels, of targets that are published by theirs."""
    found: dict[tuple[Any, ...], list[Object]] = {}
    targets = [obj for obj in services if _target_port(obj) is not None]
    for one in pods:
        meta, own = one["metadata"], one["metadata"].get("labels") or {}
        if not _is_listed(one):
            continue
        if labels.ROLE in own and labels.SERVICE in own:
            place = (meta["namespace"], own[labels.SERVICE], own[labels.ROLE], _api_port(one), False)
            found.setdefault(place, []).append(one)
        for obj in targets:
            if _is_target_pod(obj, one):
                place = (meta["namespace"], obj["metadata"]["name"], "serve", _target_port(obj), True)
                found.setdefault(place, []).append(one)
    return [
        engine_slice(*members, service=service, role=role, port=port, targets=is_target)
        for (_, service, role, port, is_target), members in found.items()
    ]


def _target_port(obj: Object) -> int | None:
    port = value_at(obj, "spec", "targets", "serve", "port")
    return port if value_at(obj, "status", "tiers", "serve", "podSelector") else None


def _is_target_pod(obj: Object, pod: Object) -> bool:
    name, _, value = obj["status"]["tiers"]["serve"]["podSelector"].partition("=")
    meta = pod["metadata"]
    return meta["namespace"] == obj["metadata"]["namespace"] and (meta.get("labels") or {}).get(name) == value


def _api_port(pod: Object) -> int:
    containers = pod.get("spec", {}).get("containers") or ()
    ports = (port for one in containers for port in one.get("ports") or () if port.get("name") == "api")
    return next((int(port["containerPort"]) for port in ports), ENGINE_PORT)


def engines_of(obj: Object, pods: Iterable[Object]) -> PublishedEngines:
    """What the operator publishes of the engines of a service, whose workloads have the templates of the last pods."""
    meta, own, earlier = obj["metadata"], list[Object](), list[Object]()
    workloads: dict[str, Object] = {}
    for one in map(_with_uid, pods):
        pod_labels = one["metadata"].get("labels") or {}
        if one["metadata"]["namespace"] != meta["namespace"]:
            continue
        if _target_port(obj) is not None and _is_target_pod(obj, one):
            own.append(adopted_copy(one, meta["name"], "serve", {"port": _target_port(obj)}))
        elif pod_labels.get(labels.SERVICE) == meta["name"] and is_of_earlier_service(one, obj):
            earlier.append(one)
        elif pod_labels.get(labels.SERVICE) == meta["name"]:
            own.append(one)
            role = pod_labels.get(labels.ROLE, "")
            template = {"metadata": {"labels": pod_labels}, "spec": one.get("spec", {})}
            workloads[role] = {
                "kind": "Deployment",
                "metadata": {"labels": {labels.ROLE: role}},
                "spec": {"template": template},
            }
    return published_engines(workloads.values(), own, earlier)


def published(
    services: Iterable[Object], pods: Iterable[Object], admissions: Iterable[Object] = ()
) -> tuple[list[Object], list[Object]]:
    """The EndpointSlices of these pods, and the InferenceServiceAdmissions with what the operator says of them."""
    given, engines = list(admissions), list(pods)
    known = [obj for obj in services if value_at(obj, "metadata", "uid") and value_at(obj, "metadata", "namespace")]
    by_key = {_key(one): one for one in given if value_at(one, "metadata", "namespace")}
    found = [one for one in given if not value_at(one, "metadata", "namespace")]
    by_service: dict[str, list[Object]] = {}
    for one in engines:
        name = (one["metadata"].get("labels") or {}).get(labels.SERVICE, "")
        by_service.setdefault(f"{one['metadata']['namespace']}/{name}", []).append(one)
    for obj in known:
        own = engines if _target_port(obj) is not None else by_service.get(_key(obj), [])
        document = codec.encode(engines_of(obj, own))
        made = by_key.get(_key(obj)) or without_limits(obj, resourceVersion=object_meta.short_hash(document))
        by_key[_key(obj)] = {**made, "engines": document}
    return slices_of(known, engines), [*found, *by_key.values()]


def without_limits(obj: Object, **changes: Any) -> Object:
    """The InferenceServiceAdmission of a service without an SLO; `changes` go into its metadata."""
    return {name: part for name, part in admission(obj, {}, **changes).items() if name != LIMITS}


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


class CatalogOfPods:
    """The catalog of a gateway, as services and their pods change."""

    def __init__(self, has_engine_tls: bool = True) -> None:
        self.builder = CatalogBuilder(has_engine_tls)
        self._keys: tuple[set[str], ...] = set(), set(), set()

    def set(
        self, inference_services: Iterable[Object], pods: Iterable[Object] = (), admissions: Iterable[Object] = ()
    ) -> ServiceCatalog:
        """These are the objects from now on."""
        services = list(inference_services)
        slices, made = published(services, pods, admissions)
        kinds = ((services, labels.KIND), (slices, "EndpointSlice"), (made, labels.ADMISSION_KIND))
        found = tuple(
            {key: obj for obj in objects if (key := _read(_key, kind, obj)) is not None} for objects, kind in kinds
        )
        gone = (dict.fromkeys(keys - objects.keys()) for keys, objects in zip(self._keys, found, strict=True))
        known = self.builder.update(*(g | objects for g, objects in zip(gone, found, strict=True)))
        self._keys = tuple(set(objects) for objects in found)
        return known


def build_catalog(
    inference_services: Iterable[Object], pods: Iterable[Object], admissions: Iterable[Object] = ()
) -> ServiceCatalog:
    """The catalog of these objects, without services that are being deleted."""
    return CatalogOfPods().set(inference_services, pods, admissions)


def with_healthy(known: ServiceCatalog, healthy_addresses: Mapping[str, Collection[str]]) -> ServiceCatalog:
    """This catalog with the endpoints marked routable that Envoy reports healthy, by service key."""
    return RoutableCatalog().update(known, {key: frozenset(found) for key, found in healthy_addresses.items()})


def _key(obj: Object) -> str:
    meta = obj["metadata"]
    return f"{meta['namespace']}/{meta['name']}"
