"""Services and their engine pods, from the API objects alone.

Problem: what is known of models and engines must not depend on what this process has seen before: a model whose engines
are all gone still exists, and a picker that was just restarted must answer like one that was not.

Idea: level-triggered. Objects as the API server sends them go in, a `Fleet` is computed from all of them, and what
Envoy reports as healthy is laid over it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import orjson

from plimsoll.adapters.normalize import epoch_s, value_at
from plimsoll.api import labels
from plimsoll.api.contract import contract
from plimsoll.core.admission.outcome import MOST_SEQUENCES
from plimsoll.core.picking.endpoint import Endpoint, Role
from plimsoll.core.picking.names import Claim, names_of, owners, published
from plimsoll.gateway.policy import Policies, Policy
from plimsoll.resources import arguments
from plimsoll.telemetry import metrics

Object = Mapping[str, Any]
T = TypeVar("T")

log = logging.getLogger(__name__)

DEFAULT_MAX_SEQUENCES = 1024  # vLLM's own, on the largest GPUs; less elsewhere


@dataclass(frozen=True, slots=True)
class Service:
    """One InferenceService as the gateway serves it.

    key: NAMESPACE/NAME. names: what it answers to, the preferred one first. created: Unix seconds.
    max_sequences: what one engine runs at once, and so what one death can cut at once. max_queued: sequences that one
    engine accepts at once, running and waiting; one request cannot have more. policy: None without a promise.
    version: of its object, as the API server counts. unread: what of the object cannot be read, and why, else "".
    """

    namespace: str
    name: str
    names: tuple[str, ...]
    created: int
    endpoints: tuple[Endpoint, ...] = ()
    max_sequences: int = DEFAULT_MAX_SEQUENCES
    max_queued: int = MOST_SEQUENCES
    policy: Policy | None = None
    version: str = ""
    unread: str = ""
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", f"{self.namespace}/{self.name}")

    @property
    def answering(self) -> tuple[Endpoint, ...]:
        """Live endpoints that answer clients: Envoy knows these and no other."""
        return tuple(e for e in self.endpoints if e.live and e.role is not Role.PREFILL)


@dataclass(frozen=True, slots=True)
class Fleet:
    """All services, by `NAMESPACE/NAME`, and every name that is answered to."""

    services: Mapping[str, Service]
    by_name: Mapping[str, Service]

    def with_healthy(self, healthy: Mapping[str, Collection[str]]) -> Fleet:
        """The same fleet with endpoints routable where Envoy lists them: addresses by service key."""
        services = {key: _mark(service, healthy.get(key, ())) for key, service in self.services.items()}
        return Fleet(services, {name: services[service.key] for name, service in self.by_name.items()})


EMPTY = Fleet({}, {})


def fleet(inference_services: Iterable[Object], pods: Iterable[Object], policies: Policies | None = None) -> Fleet:
    """The fleet these objects describe; services that are being deleted are gone already.

    policies: what was read of the same objects before.
    """
    policies = policies or Policies()
    claimed = [(obj, claim) for obj in inference_services if (claim := _read(_claim, labels.KIND, obj)) is not None]
    live = [obj for obj, _ in claimed]
    claims = {_key(obj): claim for obj, claim in claimed}
    owned = owners(claims.values())
    engines: dict[str, list[Endpoint]] = {key: [] for key in claims}
    queues: dict[str, list[int]] = {key: [] for key in claims}
    for pod in pods:
        found = _read(_endpoint, "Pod", pod)
        if found and found[0] in engines:
            engines[found[0]].append(found[1])
            if found[1].role is not Role.PREFILL:
                queues[found[0]].append(_read(_max_queued, "Pod", pod) or MOST_SEQUENCES)

    def service(obj: Object) -> Service:
        key = _key(obj)
        return Service(
            namespace=claims[key].namespace,
            name=claims[key].name,
            names=names_of(claims[key], owned),
            created=_unix(claims[key].created),
            endpoints=tuple(sorted(engines[key], key=lambda e: e.pod)),
            max_sequences=_max_sequences(obj),
            max_queued=max(queues[key], default=MOST_SEQUENCES),
            policy=policies.of(key, obj),
            version=obj["metadata"].get("resourceVersion", ""),
            unread=policies.unread(key),
        )

    services = {one.key: one for obj in live if (one := _read(service, labels.KIND, obj)) is not None}
    policies.keep(set(services))
    by_name = {name: services[claim.long_name] for name, claim in owned.items() if claim.long_name in services}
    return Fleet(services, by_name)


def _mark(service: Service, healthy: Collection[str]) -> Service:
    endpoints = tuple(
        replace(e, routable=e.live and e.role is not Role.PREFILL and e.address in healthy) for e in service.endpoints
    )
    return service if endpoints == service.endpoints else replace(service, endpoints=endpoints)


def _key(obj: Object) -> str:
    meta = obj["metadata"]
    return f"{meta['namespace']}/{meta['name']}"


def _read(reader: Callable[[Object], T | None], kind: str, obj: Object) -> T | None:
    """What a reader makes of an object; None where it fails, so that one object stops no other service."""
    try:
        return reader(obj)
    except Exception:
        log.exception("an object cannot be read and is left out", extra={"kind": kind, "object": obj.get("metadata")})
        metrics.GATEWAY_UNREADABLE.labels(kind).inc()
        return None


def _claim(obj: Object) -> Claim | None:
    """The model name that a service claims; None of one that is being deleted."""
    meta = obj["metadata"]
    if meta.get("deletionTimestamp"):
        return None
    model = value_at(obj, "spec", "model", "name") or meta["name"]
    created, uid = meta.get("creationTimestamp") or "", meta.get("uid") or ""
    return Claim(meta["namespace"], meta["name"], str(model), created, uid, published(obj))


def _unix(created: str) -> int:
    return int(epoch_s(created) or 0)


def _max_sequences(obj: Object) -> int:
    """`--max-num-seqs` of the user's engine arguments, if it is there."""
    args = value_at(obj, "spec", "engine", "args")
    stated = arguments.stated(args if isinstance(args, list) else ())
    return arguments.count(stated.get("--max-num-seqs", "")) or DEFAULT_MAX_SEQUENCES


def _max_queued(pod: Object) -> int:
    """Sequences that the engine of a pod accepts at once, by the rule of its launcher."""
    stated, limits = arguments.stated(_pod_args(pod)), contract().limits
    if "--max-num-queued-reqs" in stated:
        return arguments.count(stated["--max-num-queued-reqs"]) or MOST_SEQUENCES
    sequences = stated.get("--max-num-seqs", "")
    if not sequences.isdecimal():
        return limits["queued_requests"]
    return max(64, int(sequences) * limits["queued_per_sequence"])


def _pod_args(pod: Object) -> tuple[object, ...]:
    """The engine arguments in a pod's environment, defaults first; what cannot be read is as if it were not there."""
    names = contract().env
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
    """The service key and endpoint of an engine pod; None before it has an address or if it is not one of ours."""
    meta, status = pod["metadata"], pod.get("status", {})
    marks = meta.get("labels") or {}
    service, role, ip = marks.get(labels.SERVICE), marks.get(labels.ROLE), status.get("podIP")
    if not service or role not in set(Role) or not ip or status.get("phase") in ("Succeeded", "Failed"):
        return None
    conditions = status.get("conditions") or ()
    endpoint = Endpoint(
        address=f"[{ip}]:{_api_port(pod)}" if ":" in ip else f"{ip}:{_api_port(pod)}",
        pod=meta["name"],
        role=Role(role),
        revision=marks.get(labels.REVISION, ""),
        ready=any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions),
        terminating=bool(meta.get("deletionTimestamp")),
    )
    return f"{meta['namespace']}/{service}", endpoint


def _api_port(pod: Object) -> int:
    for container in pod.get("spec", {}).get("containers") or ():
        for port in container.get("ports") or ():
            if port.get("name") == "api" and "containerPort" in port:
                return int(port["containerPort"])
    return contract().ports["api"]
