"""What the gateway's catalog reads of the EndpointSlices of a service's engines.

Problem: a slice says where engines are and whether they are ready, not what they are. Any Service may have the labels
of one that the operator makes.

Idea: only slices of the Services that the operator makes count, by their names: a service with targets has another one
than a service with tiers. Each engine is then joined with what the operator publishes of its template. One of which
nothing is published takes no requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from plimsoll.api import labels
from plimsoll.api.contract import engine_tls_name
from plimsoll.core.routing.endpoint import Endpoint, Leaving
from plimsoll.core.routing.published_engines import EngineTemplate, PodState, PublishedEngines
from plimsoll.core.types import Role
from plimsoll.resources import object_meta

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SliceEngine:
    """One engine as its slice has it. uid: of the pod. is_target: whether its Service is that of a target."""

    pod: str
    uid: str
    address: str
    role: Role
    serving: bool
    terminating: bool
    is_target: bool


@dataclass(frozen=True, slots=True)
class JoinedEngine:
    """An engine of a service, with the template of its pod."""

    endpoint: Endpoint
    template: EngineTemplate


def service_of(obj: Object) -> tuple[str, Role] | None:
    """Returns the service key and role of a slice, None for one of a Service that the operator does not make."""
    meta = obj["metadata"]
    found = meta.get("labels") or {}
    service, role = found.get(labels.SERVICE), found.get(labels.ROLE)
    if not service or role not in set(Role):
        return None
    own = {object_meta.tier_name(service, role), object_meta.targets_name(service)}
    return (f"{meta['namespace']}/{service}", Role(role)) if found.get(labels.SLICE_SERVICE) in own else None


def engines_of(obj: Object) -> tuple[str, tuple[SliceEngine, ...]] | None:
    """Returns the service key and engines of a slice, None for another slice."""
    found, port = service_of(obj), _port(obj)
    if found is None or port is None:
        return None
    key, role = found
    name = obj["metadata"]["labels"][labels.SLICE_SERVICE]
    is_target = name == object_meta.targets_name(obj["metadata"]["labels"][labels.SERVICE])
    return key, tuple(_engines(obj.get("endpoints") or (), role, port, is_target))


def has_engines(obj: Object) -> bool:
    """Whether a slice of a service has an engine."""
    return _port(obj) is not None and any(map(_is_engine, obj.get("endpoints") or ()))


def _port(obj: Object) -> int | None:
    ports = (port["port"] for port in obj.get("ports") or () if port.get("name") == "api" and port.get("port"))
    return next(ports, None)


def _is_engine(one: Object) -> bool:
    return bool(one.get("addresses")) and "name" in (one.get("targetRef") or {})


def _engines(endpoints: Iterable[Object], role: Role, port: int, is_target: bool) -> Iterator[SliceEngine]:
    for one in endpoints:
        if not _is_engine(one):
            continue
        pod, ip, conditions = one["targetRef"], one["addresses"][0], one.get("conditions") or {}
        yield SliceEngine(
            pod=pod["name"],
            uid=pod.get("uid", ""),
            address=f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}",
            role=role,
            serving=bool(conditions.get("serving")),  # `ready` is false for one that leaves
            terminating=bool(conditions.get("terminating")),
            is_target=is_target,
        )


def joined(namespace: str, engine: SliceEngine, published: PublishedEngines) -> JoinedEngine | None:
    """Returns an engine with its template, None for one of an earlier service or without a template."""
    template, state = published.template_of(engine.role, engine.pod, engine.uid), published.pods.get(engine.uid)
    if template is None or state == PodState.EARLIER:
        return None
    endpoint = Endpoint(
        address=engine.address,
        pod=engine.pod,
        role=engine.role,
        revision=template.revision,
        ready=engine.serving,
        leaving=_leaving(engine, template, state),
        tls_name=engine_tls_name(namespace) if template.tls else "",
    )
    return JoinedEngine(endpoint, template)


def _leaving(engine: SliceEngine, template: EngineTemplate, state: str | None) -> Leaving:
    if not engine.terminating:
        return Leaving.NO
    if not template.hands_over or state == PodState.AT_ONCE:
        return Leaving.AT_ONCE
    return Leaving.HANDS_OVER_ON_DRAINED_NODE if state == PodState.DRAINED_NODE else Leaving.HANDS_OVER
