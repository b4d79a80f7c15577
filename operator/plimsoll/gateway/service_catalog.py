"""The catalog of services and their engine pods, computed from the API objects alone.

Problem: the catalog must not depend on what this process saw earlier. A model without engines still exists, and a
restarted picker must respond like one that ran all the time.

Idea: level-triggered. A `ServiceCatalog` is computed from all objects, and then marks the endpoints that Envoy reports
as healthy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import orjson

from plimsoll.adapters.normalize import epoch_s, value_at
from plimsoll.api import labels
from plimsoll.api.conditions import ConditionReason, ConditionType
from plimsoll.api.contract import engine_contract
from plimsoll.core import units
from plimsoll.core.admission.request import MAX_REQUEST_SEQUENCES
from plimsoll.core.routing.endpoint import Endpoint
from plimsoll.core.routing.model_names import read_claim, resolve_owners, served_names
from plimsoll.core.types import Role
from plimsoll.engines import vllm
from plimsoll.gateway.admission_policy import AdmissionPolicy, PolicyCache
from plimsoll.telemetry import metrics

Object = Mapping[str, Any]
T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServiceEntry:
    """One InferenceService as the gateway serves it.

    `key` is NAMESPACE/NAME. `names` are the model names that it serves, the preferred one first; none if others hold
    all of them. `created` is in Unix
    seconds. `max_sequences` is how many sequences one engine runs at once, and so how many its failure aborts.
    `max_queued` is how many sequences one engine accepts at once, running and queued; a request cannot have more.
    `policy` is None without an SLO. `next_ready_s` is when the operator expects the next ready engine, in Unix seconds.
    `startup_s` is how long a start-up takes. Both are None if unknown. `deleted` means that no engine can start: its
    namespace is being deleted. `resource_version` is that of its object. `parse_error` says which part of the object
    cannot be parsed, and why, else "".
    """

    namespace: str
    name: str
    names: tuple[str, ...]
    created: int
    endpoints: tuple[Endpoint, ...] = ()
    max_sequences: int = vllm.DEFAULT_MAX_NUM_SEQS
    max_queued: int = MAX_REQUEST_SEQUENCES
    policy: AdmissionPolicy | None = None
    next_ready_s: float | None = None
    startup_s: float | None = None
    deleted: bool = False
    resource_version: str = ""
    parse_error: str = ""
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", f"{self.namespace}/{self.name}")

    @property
    def preferred_name(self) -> str:
        """The first of its names; `key` if it has none, which is no name that clients can send."""
        return self.names[0] if self.names else self.key

    @property
    def serving_endpoints(self) -> tuple[Endpoint, ...]:
        """Available endpoints that serve clients. Envoy knows only these."""
        return tuple(e for e in self.endpoints if e.available and e.role is not Role.PREFILL)


@dataclass(frozen=True, slots=True)
class ServiceCatalog:
    """All services by `NAMESPACE/NAME`, and by every model name that the gateway serves."""

    services: Mapping[str, ServiceEntry]
    by_name: Mapping[str, ServiceEntry]

    def with_healthy(self, healthy_addresses: Mapping[str, Collection[str]]) -> ServiceCatalog:
        """Returns this catalog with the endpoints marked routable that Envoy reports healthy, by service key."""
        services = {
            key: _mark_routable(service, healthy_addresses.get(key, ())) for key, service in self.services.items()
        }
        return ServiceCatalog(services, {name: services[service.key] for name, service in self.by_name.items()})


EMPTY_CATALOG = ServiceCatalog({}, {})


def build_catalog(
    inference_services: Iterable[Object], pods: Iterable[Object], policies: PolicyCache | None = None
) -> ServiceCatalog:
    """Returns the catalog of these objects, without services that are being deleted.

    `policies` caches the policies of earlier calls.
    """
    policies = policies or PolicyCache()
    claimed = [(obj, claim) for obj in inference_services if (claim := _read(read_claim, labels.KIND, obj)) is not None]
    current = [obj for obj, _ in claimed]
    claims = {_key(obj): claim for obj, claim in claimed}
    claim_by_name = resolve_owners(claims.values())
    engines: dict[str, list[Endpoint]] = {key: [] for key in claims}
    queues: dict[str, list[int]] = {key: [] for key in claims}
    for pod in pods:
        keyed_endpoint = _read(_endpoint, "Pod", pod)
        if keyed_endpoint and keyed_endpoint[0] in engines:
            engines[keyed_endpoint[0]].append(keyed_endpoint[1])
            if keyed_endpoint[1].role is not Role.PREFILL:
                queues[keyed_endpoint[0]].append(_read(_max_queued, "Pod", pod) or MAX_REQUEST_SEQUENCES)

    def service(obj: Object) -> ServiceEntry:
        key, deleted = _key(obj), _is_deleted(obj)
        next_ready_s, startup_s = _startup(obj)
        policy = policies.get(key, obj)
        if next_ready_s is None and policy is not None and policy.limits is not None:
            next_ready_s = policy.limits.ready_at_s
        return ServiceEntry(
            namespace=claims[key].namespace,
            name=claims[key].name,
            names=served_names(claims[key], claim_by_name),
            created=_unix(claims[key].created),
            endpoints=tuple(sorted(engines[key], key=lambda e: e.pod)),
            max_sequences=_max_sequences(obj),
            max_queued=max(queues[key], default=MAX_REQUEST_SEQUENCES),
            policy=policy.without_starts if policy is not None and deleted else policy,
            next_ready_s=None if deleted else next_ready_s,
            startup_s=startup_s,
            deleted=deleted,
            resource_version=obj["metadata"].get("resourceVersion", ""),
            parse_error=policies.parse_error(key),
        )

    services = {one.key: one for obj in current if (one := _read(service, labels.KIND, obj)) is not None}
    policies.keep_only(set(services))
    by_name = {
        name: services[claim.qualified_name]
        for name, claim in claim_by_name.items()
        if claim.qualified_name in services
    }
    return ServiceCatalog(services, by_name)


def _mark_routable(service: ServiceEntry, healthy_addresses: Collection[str]) -> ServiceEntry:
    endpoints = tuple(
        replace(e, routable=e.available and e.role is not Role.PREFILL and e.address in healthy_addresses)
        for e in service.endpoints
    )
    return service if endpoints == service.endpoints else replace(service, endpoints=endpoints)


def _key(obj: Object) -> str:
    meta = obj["metadata"]
    return f"{meta['namespace']}/{meta['name']}"


def _read(reader: Callable[[Object], T | None], kind: str, obj: Object) -> T | None:
    """Returns `reader(obj)`, or None if it raises, so that one invalid object affects no other service."""
    try:
        return reader(obj)
    except Exception:
        log.exception("cannot read an object; it is ignored", extra={"kind": kind, "object": obj.get("metadata")})
        metrics.GATEWAY_UNREADABLE.labels(kind).inc()
        return None


def _unix(created: str) -> int:
    return int(epoch_s(created) or 0)


def _is_deleted(obj: Object) -> bool:
    """Whether the operator reports that the service's namespace is being deleted."""
    conditions = value_at(obj, "status", "conditions")
    return any(
        value_at(one, "type") == ConditionType.READY
        and value_at(one, "reason") == ConditionReason.NAMESPACE_TERMINATING
        for one in (conditions if isinstance(conditions, list) else ())
    )


def _startup(obj: Object) -> tuple[float | None, float | None]:
    """Returns the Unix time of the next ready engine and the median start-up time in seconds. None if unknown."""
    tiers = value_at(obj, "status", "tiers")
    role = Role.SERVE if value_at(tiers, Role.SERVE) is not None else Role.DECODE
    next_ready_s = epoch_s(value_at(tiers, role, "starting", "nextReady"))
    try:
        return next_ready_s, units.parse_duration(value_at(tiers, role, "startup", "p50"))
    except (AttributeError, TypeError, ValueError):
        return next_ready_s, None


def _max_sequences(obj: Object) -> int:
    """Returns `--max-num-seqs` of the user's engine arguments, else the default."""
    args = value_at(obj, "spec", "engine", "args")
    return vllm.flag_count(args if isinstance(args, list) else (), vllm.MAX_NUM_SEQS) or vllm.DEFAULT_MAX_NUM_SEQS


def _max_queued(pod: Object) -> int:
    """Returns how many sequences the engine of a pod accepts at once, by the rule that its launcher uses too."""
    limits = engine_contract().limits
    limit = vllm.queue_limit(
        _pod_args(pod), default=limits["queued_requests"], per_sequence=limits["queued_per_sequence"]
    )
    return limit or MAX_REQUEST_SEQUENCES


def _pod_args(pod: Object) -> tuple[object, ...]:
    """Returns the engine arguments in a pod's environment, defaults first. Ignores what cannot be parsed."""
    names = engine_contract().env
    given = {
        entry.get("name"): entry.get("value")
        for container in pod.get("spec", {}).get("containers") or ()
        for entry in container.get("env") or ()
    }
    return tuple(arg for name in ("default_args", "args") for arg in _list(given.get(names[name])))


def _list(text: object) -> list[object]:
    try:
        read = orjson.loads(text) if isinstance(text, str) else []
    except ValueError:
        return []
    return read if isinstance(read, list) else []


def _endpoint(pod: Object) -> tuple[str, Endpoint] | None:
    """Returns the service key and endpoint of an engine pod, or None for another pod or one without an address."""
    meta, status = pod["metadata"], pod.get("status", {})
    pod_labels = meta.get("labels") or {}
    service, role, ip = pod_labels.get(labels.SERVICE), pod_labels.get(labels.ROLE), status.get("podIP")
    if not service or role not in set(Role) or not ip or status.get("phase") in ("Succeeded", "Failed"):
        return None
    conditions = status.get("conditions") or ()
    endpoint = Endpoint(
        address=f"[{ip}]:{_api_port(pod)}" if ":" in ip else f"{ip}:{_api_port(pod)}",
        pod=meta["name"],
        role=Role(role),
        revision=pod_labels.get(labels.REVISION, ""),
        ready=any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions),
        terminating=bool(meta.get("deletionTimestamp")),
    )
    return f"{meta['namespace']}/{service}", endpoint


def _api_port(pod: Object) -> int:
    for container in pod.get("spec", {}).get("containers") or ():
        for port in container.get("ports") or ():
            if port.get("name") == "api" and "containerPort" in port:
                return int(port["containerPort"])
    return engine_contract().ports["api"]
