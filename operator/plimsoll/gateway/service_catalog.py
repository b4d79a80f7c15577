"""The catalog of services and their engines, computed from the API objects alone.

Problem: the catalog must not depend on what this process saw earlier. A model without engines still exists, and a
restarted picker must respond like one that ran all the time.

Idea: level-triggered. A `ServiceCatalog` is computed from all objects, and then marks the endpoints that Envoy reports
as healthy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

from plimsoll.adapters.normalize import epoch_s, value_at
from plimsoll.api import labels
from plimsoll.api.conditions import POD_PROBLEMS, ConditionReason, ConditionType
from plimsoll.api.starting_pods import parse_starting
from plimsoll.core import codec, units
from plimsoll.core.admission.request import MAX_REQUEST_SEQUENCES
from plimsoll.core.admission.request_limits import NO_LIMITS, RequestLimits
from plimsoll.core.routing.endpoint import Endpoint, Leaving
from plimsoll.core.routing.model_names import NameClaim, read_claims, resolve_owners, served_names
from plimsoll.core.routing.published_engines import PublishedEngines
from plimsoll.core.types import Role, Task
from plimsoll.engines.registry import DEFAULT_ENGINE, engine_named
from plimsoll.gateway.adapters import AdapterEntry, not_loaded_on
from plimsoll.gateway.admission_policy import AdmissionPolicy, PolicyCache, admission_of
from plimsoll.gateway.api_routes import ApiRoute
from plimsoll.gateway.engine_slices import JoinedEngine, SliceEngine, engines_of, joined
from plimsoll.gateway.handover import keep_last, wanted_roles
from plimsoll.gateway.picture_tokens import DEFAULT_RULE, PictureRule, picture_rule
from plimsoll.resources import object_meta
from plimsoll.telemetry import gateway_metrics

Object = Mapping[str, Any]
T = TypeVar("T")

log = logging.getLogger(__name__)

ENGINES: Final = "engines"  # field of an InferenceServiceAdmission
_START_PROBLEMS: Final = frozenset({*POD_PROBLEMS, ConditionReason.APPLY_REJECTED})


@dataclass(frozen=True, slots=True)
class ServiceEntry:
    """One InferenceService as the gateway serves it.

    `key` is NAMESPACE/NAME. `task` says which routes its engines serve, `pictures` how its model counts pictures.
    `names` are the model names that it serves, the preferred one first; none if others hold all of them. `created` is
    in Unix seconds.
    `max_sequences` is how many sequences one engine runs at once, and so how many its failure aborts.
    `max_queued` is how many sequences one engine accepts at once, running and queued; a request cannot have more.
    `max_model_len` is the longest sequence in tokens by the engines' arguments, None if these leave it to the model.
    `policy` is None without an SLO. `request_limits` are those of single requests by class, "" for all others; empty
    without any. `next_ready_s` is when the operator expects the next ready engine, in Unix seconds.
    `recovery_s` is how long a failed engine is usually away. Both are None if unknown. `deleted` means that no engine
    can start: its namespace is being deleted. `stopped` means that it has 0 replicas, which no request changes.
    `problem` is the reason of its condition Ready if that tells why engines do not start, else "". `resource_version`
    is that of its object, `limits_version` that of its InferenceServiceAdmission, "" without one. `parse_error` says
    what of them cannot be parsed, and why, else "".
    `adapters` are its LoRA adapters by model name. `needs_certificate` means that ready engines require TLS, for which
    this gateway has no client certificate. `isolates_tenants` means that its tenants share no KV blocks.
    `requires_prefill` means that no decode engine may compute a prompt of at least one KV block.
    """

    namespace: str
    name: str
    names: tuple[str, ...]
    created: int
    task: Task = Task.GENERATE
    pictures: PictureRule = DEFAULT_RULE
    endpoints: tuple[Endpoint, ...] = ()
    max_sequences: int = DEFAULT_ENGINE.default_sequences
    max_queued: int = MAX_REQUEST_SEQUENCES
    max_model_len: int | None = None
    policy: AdmissionPolicy | None = None
    request_limits: Mapping[str, RequestLimits] = field(default_factory=dict)
    next_ready_s: float | None = None
    recovery_s: float | None = None
    deleted: bool = False
    stopped: bool = False
    problem: str = ""
    resource_version: str = ""
    limits_version: str = ""
    parse_error: str = ""
    adapters: Mapping[str, AdapterEntry] = field(default_factory=dict)
    needs_certificate: bool = False
    isolates_tenants: bool = False
    requires_prefill: bool = False
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", f"{self.namespace}/{self.name}")

    @property
    def preferred_name(self) -> str:
        """The first of its names; `key` if it has none, which is no name that clients can send."""
        return self.names[0] if self.names else self.key

    def limits_of(self, request_class: bytes) -> RequestLimits:
        """Returns the limits of a request whose header names this class."""
        if not self.request_limits:
            return NO_LIMITS
        name = "" if self.policy is None else self.policy.class_of(request_class).name
        return self.request_limits.get(name) or self.request_limits[""]

    @property
    def is_asleep(self) -> bool:
        """Whether no engine runs or starts before a request comes that takes capacity."""
        is_starting = bool(self.endpoints) or self.next_ready_s is not None
        return self.policy is not None and not is_starting and not self.deleted and not self.stopped

    @property
    def serving_endpoints(self) -> tuple[Endpoint, ...]:
        """Available endpoints that serve clients. Envoy knows only these."""
        return tuple(e for e in self.endpoints if e.available and e.role is not Role.PREFILL)


@dataclass(frozen=True, slots=True)
class ServiceCatalog:
    """All services by `NAMESPACE/NAME`, and by every model name that the gateway serves."""

    services: Mapping[str, ServiceEntry]
    by_name: Mapping[str, ServiceEntry]

    def fallback_of(self, service: ServiceEntry, route: ApiRoute) -> str | None:
        """Returns the key of the fallback service, or None if there is none that serves the route."""
        fallback = self.services.get((service.policy and service.policy.fallback) or "")
        is_usable = fallback is not None and fallback is not service and fallback.task in route.tasks
        return fallback.key if fallback is not None and is_usable else None


EMPTY_CATALOG = ServiceCatalog({}, {})


class RoutableCatalog:
    """Marks the endpoints of a catalog that Envoy can reach. Only services that changed are made again."""

    def __init__(self) -> None:
        self._services: dict[str, tuple[ServiceEntry, frozenset[str], ServiceEntry]] = {}

    def update(
        self,
        catalog: ServiceCatalog,
        known: Mapping[str, frozenset[str]],
        unhealthy: frozenset[str] = frozenset(),
    ) -> ServiceCatalog:
        """Returns `catalog`; endpoints that Envoy knows, by service key, and has not ejected are routable."""
        updated = {}
        for key, service in catalog.services.items():
            healthy = known.get(key, frozenset())
            if not healthy.isdisjoint(unhealthy):
                healthy -= unhealthy
            cached = self._services.get(key)
            if cached is None or cached[0] is not service or cached[1] != healthy:
                cached = service, healthy, _mark_routable(service, healthy)
            updated[key] = cached
        self._services = updated
        services = {key: cached[2] for key, cached in updated.items()}
        return ServiceCatalog(services, {name: services[service.key] for name, service in catalog.by_name.items()})


@dataclass(slots=True)
class _ServiceState:
    """What the builder knows of one service key. Slices and limits may come before their service."""

    obj: Object | None = None
    admission: Object | None = None
    published: tuple[str, PublishedEngines] | None = None  # the last readable ones, with the uid of their service
    claims: tuple[NameClaim, ...] = ()  # its own, then those of its adapters
    slices: dict[str, tuple[SliceEngine, ...]] = field(default_factory=dict)  # the last changed is the last
    names: tuple[tuple[str, ...], ...] = ()  # of each claim
    entry: ServiceEntry | None = None

    def engines_of(self, obj: Object) -> tuple[list[JoinedEngine], list[Role]]:
        """Returns the engines of the service, and the roles of which a pod waits for room.

        A pod is in two slices while it moves. Without a publication for this very service it has no engines: those of
        an earlier one of the name may still run. The Service of a target counts for a service with targets alone.
        """
        if self.published is None or self.published[0] != obj["metadata"].get("uid"):
            return [], []
        _, published = self.published
        has_targets, namespace = bool(value_at(obj, "spec", "targets")), obj["metadata"]["namespace"]
        own = (one for engines in self.slices.values() for one in engines if one.is_target == has_targets)
        by_pod = {engine.pod: engine for engine in own}
        found = (joined(namespace, engine, published) for engine in by_pod.values())
        return [one for one in found if one is not None], [Role(one) for one in published.unplaced if one in set(Role)]


class CatalogBuilder:
    """Keeps the catalog of all objects. The work of an update is proportional to what changed.

    The exception is a changed name claim: then all names are resolved again.
    """

    def __init__(self, has_engine_tls: bool = True) -> None:
        """`has_engine_tls`: this gateway has a client certificate for the engines that require one."""
        self._has_engine_tls = has_engine_tls
        self._states: dict[str, _ServiceState] = {}
        self._service_by_slice: dict[str, str] = {}
        self._claim_by_name: dict[str, NameClaim] = {}
        self._policies = PolicyCache()
        self._refusing: set[str] = set()  # addresses of leaving engines
        self._stale: set[str] = set()  # services to build again at the next update
        self._objectives: Mapping[str, Mapping[str, int]] = {}
        self._without_certificate: set[str] = set()  # services whose engines need one

    def update(
        self,
        services: Mapping[str, Object | None],
        slices: Mapping[str, Object | None],
        admissions: Mapping[str, Object | None],
    ) -> ServiceCatalog:
        """Apply changed objects by NAMESPACE/NAME, None for one that is gone, and return the catalog.

        `slices` are EndpointSlices, `admissions` InferenceServiceAdmissions. Services that are being deleted are not in
        the catalog.
        """
        dirty = {key for name, obj in slices.items() for key in self._update_slice(name, obj)} | self._stale
        self._stale = set()
        for key, admission in admissions.items():
            state = self._state(key)
            state.admission = admission
            if admission is not None and ENGINES in admission:
                state.published = _read(_published, labels.ADMISSION_KIND, admission) or state.published
        claims_before = {key: self._state(key).claims for key in services}
        for key, obj in services.items():
            claims = (None if obj is None else _read(read_claims, labels.KIND, obj)) or ()
            state = self._states[key]
            state.obj = obj if claims else None
            if state.claims != claims:  # equal ones stay the same objects, as `served_names` requires
                state.claims = claims
        dirty |= services.keys() | admissions.keys()
        if any(self._states[key].claims is not before for key, before in claims_before.items()):
            dirty |= self._resolve_names()
        for key in dirty:
            self._build_entry(key)
        entries = {key: state.entry for key, state in self._states.items() if state.entry is not None}
        owners = ((name, "/".join(claim.service)) for name, claim in self._claim_by_name.items())
        return ServiceCatalog(entries, {name: entries[key] for name, key in owners if key in entries})

    def _state(self, key: str) -> _ServiceState:
        return self._states.setdefault(key, _ServiceState())

    def _update_slice(self, name: str, obj: Object | None) -> set[str]:
        """Returns the keys of the services whose engines change."""
        dirty, former = set(), tuple[SliceEngine, ...]()
        if (previous := self._service_by_slice.pop(name, None)) is not None:
            former = self._states[previous].slices.pop(name)
            dirty.add(previous)
        found = None if obj is None else _read(engines_of, "EndpointSlice", obj)
        if found is not None:
            key, engines = found
            self._state(key).slices[name] = engines
            self._service_by_slice[name] = key
            dirty.add(key)
        others = (engines for key in dirty for engines in self._states[key].slices.values())
        present = {(one.uid, one.address) for engines in others for one in engines}
        gone = {one.address for one in former if (one.uid, one.address) not in present}
        self._refusing -= gone  # another engine may get the address
        return dirty

    def mark_refusing(self, address: str) -> None:
        """The leaving engine at this address takes no requests any more; the next update leaves it alone.

        One that is gone is not marked: another engine may get its address.
        """
        keys = {
            key
            for key, state in self._states.items()
            if any(engine.address == address for engines in state.slices.values() for engine in engines)
        }
        if keys:
            self._refusing.add(address)
            self._stale |= keys

    def set_objectives(self, objectives: Mapping[str, Mapping[str, int]]) -> None:
        """Set the priorities of InferenceObjectives, by service and name, as of the next update."""
        keys = self._objectives.keys() | objectives.keys()
        changed = {key for key in keys if self._objectives.get(key) != objectives.get(key)}
        self._stale |= changed & self._states.keys()
        self._objectives = objectives

    def _as_answered(self, engine: JoinedEngine) -> Endpoint:
        endpoint = engine.endpoint
        if endpoint.tls_name and not self._has_engine_tls:
            return replace(endpoint, ready=False)  # it would refuse each request
        return replace(endpoint, leaving=Leaving.AT_ONCE) if endpoint.address in self._refusing else endpoint

    def _resolve_names(self) -> set[str]:
        """Returns the keys of the services that serve other names than before."""
        claims = {key: state.claims for key, state in self._states.items() if state.claims}
        self._claim_by_name = resolve_owners([claim for found in claims.values() for claim in found])
        names = {key: self._served_names(found) for key, found in claims.items()}
        return {key for key, served in names.items() if served != self._states[key].names}

    def _served_names(self, claims: tuple[NameClaim, ...]) -> tuple[tuple[str, ...], ...]:
        return tuple(served_names(claim, self._claim_by_name) for claim in claims)

    def _build_entry(self, key: str) -> None:
        state = self._states[key]
        state.entry = None if state.obj is None else _read(partial(self._entry, key), labels.KIND, state.obj)
        if state.entry is None:
            self._policies.remove(key)
            self._without_certificate.discard(key)
        if state.obj is None and state.admission is None and not state.slices:
            del self._states[key]

    def _entry(self, key: str, obj: Object) -> ServiceEntry:
        state = self._states[key]
        claim, reason = state.claims[0], _not_ready_reason(obj)
        deleted = _is_namespace_terminating(obj)
        state.names = self._served_names(state.claims)
        next_ready_s, recovery_s = _startup(obj)
        admission = admission_of(obj, state.admission)
        policy = self._policies.get(key, obj, admission, self._objectives.get(key))
        if next_ready_s is None and policy is not None and policy.limits is not None:
            next_ready_s = policy.limits.ready_at_s
        all_engines, waiting = state.engines_of(obj)
        engines = [one for one in all_engines if one.endpoint.role is not Role.PREFILL]
        lengths = [one.template.max_model_len for one in engines]
        endpoints = sorted(map(self._as_answered, all_engines), key=lambda e: e.pod)
        return ServiceEntry(
            namespace=claim.namespace,
            name=claim.name,
            names=state.names[0],
            adapters=_adapters(obj, state.claims[1:], state.names[1:]),
            created=_unix(claim.created),
            task=_task(obj),
            pictures=picture_rule(obj),
            endpoints=tuple(endpoints if deleted else keep_last(endpoints, waiting, wanted_roles(obj))),
            max_sequences=_max_sequences(obj),
            max_queued=max((one.template.max_queued for one in engines), default=MAX_REQUEST_SEQUENCES),
            max_model_len=max(lengths) if lengths and all(lengths) else None,
            policy=policy.without_starts if policy is not None and deleted else policy,
            request_limits=self._policies.request_limits(key),
            next_ready_s=None if deleted else next_ready_s,
            recovery_s=recovery_s,
            deleted=deleted,
            stopped=reason == ConditionReason.SCALED_TO_ZERO,
            problem=reason if reason in _START_PROBLEMS else "",
            resource_version=obj["metadata"].get("resourceVersion", ""),
            limits_version="" if admission is None else admission["metadata"].get("resourceVersion", ""),
            parse_error=self._policies.parse_error(key),
            needs_certificate=self._needs_certificate(key, engines),
            isolates_tenants=value_at(obj, "spec", "engine", "prefixCache") == "PerTenant",
            requires_prefill=value_at(obj, "spec", "whenPrefillUnavailable") == "Reject",
        )

    def _needs_certificate(self, key: str, engines: Iterable[JoinedEngine]) -> bool:
        """Whether ready engines require a client certificate, and this gateway has none; logs once that they do."""
        found = not self._has_engine_tls and any(e.endpoint.available and e.endpoint.tls_name for e in engines)
        if found and key not in self._without_certificate:
            log.error("engines of InferenceService %s require TLS, but internalTls.secretName is not set", key)
        (self._without_certificate.add if found else self._without_certificate.discard)(key)
        return found


def _mark_routable(service: ServiceEntry, healthy_addresses: Collection[str]) -> ServiceEntry:
    """Returns the service with its routable endpoints. The last one stays so until Envoy knows its successor."""
    endpoints = tuple(
        replace(e, routable=e.available and e.role is not Role.PREFILL and e.address in healthy_addresses)
        for e in service.endpoints
    )
    if not any(e.routable for e in endpoints):
        endpoints = tuple(
            replace(e, last=True, routable=True)
            if e.ready and e.leaving.hands_over and e.role is not Role.PREFILL and e.address in healthy_addresses
            else e
            for e in endpoints
        )
    return service if endpoints == service.endpoints else replace(service, endpoints=endpoints)


def _read(reader: Callable[[Object], T | None], kind: str, obj: Object) -> T | None:
    """Returns `reader(obj)`, or None if it raises, so that one invalid object affects no other service."""
    try:
        return reader(obj)
    except Exception:
        log.exception("cannot read an object; it is ignored", extra={"kind": kind, "object": obj.get("metadata")})
        gateway_metrics.GATEWAY_UNREADABLE.labels(kind).inc()
        return None


def _published(admission: Object) -> tuple[str, PublishedEngines]:
    """Returns the published engines of an InferenceServiceAdmission, and the uid of its service. Raises ValueError."""
    return object_meta.owner_uid(admission) or "", codec.decode(PublishedEngines, admission[ENGINES])


def _unix(created: str) -> int:
    return int(epoch_s(created) or 0)


def _not_ready_reason(obj: Object) -> str:
    """Returns the reason of the operator's condition Ready, "" while that is not false."""
    conditions = value_at(obj, "status", "conditions")
    for one in conditions if isinstance(conditions, list) else ():
        if value_at(one, "type") == ConditionType.READY and value_at(one, "status") == "False":
            return str(value_at(one, "reason") or "")
    return ""


def _is_namespace_terminating(obj: Object) -> bool:
    """Whether the operator says so in any condition: the service may still be ready when its pods are deleted first."""
    conditions = value_at(obj, "status", "conditions")
    reasons = (value_at(one, "reason") for one in (conditions if isinstance(conditions, list) else ()))
    return ConditionReason.NAMESPACE_TERMINATING in reasons


def _startup(obj: Object) -> tuple[float | None, float | None]:
    """Returns the Unix time of the next ready engine, and how many seconds a failed one is away; None if unknown."""
    tiers = value_at(obj, "status", "tiers")
    role = Role.SERVE if value_at(tiers, Role.SERVE) is not None else Role.DECODE
    starting = parse_starting(value_at(tiers, role, "startingPods"))
    next_ready_s = None if starting is None else epoch_s(starting.next_ready)
    try:
        return next_ready_s, units.parse_duration(value_at(obj, "status", "recovery"))
    except (AttributeError, TypeError, ValueError):
        return next_ready_s, None


def _adapters(
    obj: Object, claims: tuple[NameClaim, ...], names: tuple[tuple[str, ...], ...]
) -> dict[str, AdapterEntry]:
    """Returns the adapters of a service by each of their model names."""
    missing = not_loaded_on(obj) if claims else {}
    entries = [
        AdapterEntry(claim.adapter, own, missing.get(claim.adapter, frozenset()))
        for claim, own in zip(claims, names, strict=True)
    ]
    return {name: entry for entry in entries for name in entry.names}


def _task(obj: Object) -> Task:
    """Returns `spec.model.task`, and the default for a value that a newer release may know."""
    value = value_at(obj, "spec", "model", "task")
    return Task(value) if value in set(Task) else Task.GENERATE


def _max_sequences(obj: Object) -> int:
    """Returns how many sequences an engine runs at once by its arguments and variables, else the default."""
    args, env, runtime = (value_at(obj, "spec", "engine", name) for name in ("args", "env", "runtime"))
    engine = engine_named(runtime if isinstance(runtime, str) else None)
    words = engine.all_args(args if isinstance(args, list) else (), env)
    return engine.max_sequences(words) or engine.default_sequences
