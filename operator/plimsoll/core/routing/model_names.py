"""Ownership of model names.

Problem: a rule that compares the objects as they are now moves a name when any object is edited, and two processes that
see different versions disagree about its owner.

Idea: the operator grants a model name to one service and records the grant in that service's status. The grant lasts as
long as the service claims the name in its spec. Gateways serve granted names, so no edit of another object can move a
name. `NAMESPACE/NAME` needs no grant. A name that its owner dropped is served until another service is granted it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

MAX_ADAPTERS: Final = 256  # of one service


@dataclass(frozen=True, slots=True)
class NameClaim:
    """One service's claim of a model name.

    `model` is the name in the spec. `granted` is the name in the record, "" without one, and `since` is when it was
    recorded. `published` are the names in the status, including those that the spec has dropped. Times are in RFC 3339,
    UTC. `names` are all names that the service has, had or wants. The claim of a service's adapter has the `name`
    SERVICE/ADAPTER, so that NAMESPACE/SERVICE/ADAPTER always names it.
    """

    namespace: str
    name: str
    model: str
    created: str
    granted: str = ""
    since: str = ""
    published: tuple[str, ...] = ()
    names: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = {self.model, self.qualified_name, self.granted, *self.published} - {""}
        object.__setattr__(self, "names", frozenset(names))

    @property
    def qualified_name(self) -> str:
        return f"{self.namespace}/{self.name}"

    @property
    def service(self) -> tuple[str, str]:
        """Namespace and name of the service."""
        return self.namespace, self.name.partition("/")[0]

    @property
    def adapter(self) -> str:
        """The adapter that has the claim, "" for the claim of the service itself."""
        return self.name.partition("/")[2]

    @property
    def holder_text(self) -> str:
        """Return the holder of the claim as text."""
        service = "/".join(self.service)
        return f"adapter {self.adapter} of service {service}" if self.adapter else f"service {service}"

    @property
    def is_granted(self) -> bool:
        """Whether the record is of the name in the spec."""
        return self.granted == self.model

    @property
    def _grant_order(self) -> tuple[str, str, str]:
        return self.since, self.created, self.qualified_name

    @property
    def _claim_order(self) -> tuple[bool, str, str]:
        """The order in which unrecorded claims of one name are granted.

        A service that already serves the name comes first: its record was lost, or an earlier release wrote its status.
        """
        return self.model not in self.published, self.created, self.qualified_name


class NameRejection(StrEnum):
    """Why a service may not have the model name in its spec, independent of other claims."""

    RESTRICTED = "restricted"  # its namespace may not claim short names
    RESERVED = "reserved"  # the name begins with another namespace of services


@dataclass(frozen=True, slots=True)
class NameRules:
    """Which names a namespace may claim.

    `short_name_namespaces` are the namespaces that may claim names other than NAMESPACE/NAME; empty stands for all.
    `service_namespaces` are the namespaces that have or had a service.
    """

    short_name_namespaces: frozenset[str] = frozenset()
    service_namespaces: frozenset[str] = frozenset()

    def rejection(self, claim: NameClaim) -> NameRejection | None:
        """Returns why the claim is rejected, or None. A namespace that appears later takes no accepted name."""
        if claim.model == claim.qualified_name:
            return None
        if self.short_name_namespaces and claim.namespace not in self.short_name_namespaces:
            return NameRejection.RESTRICTED
        prefix, slash, _ = claim.model.partition("/")
        is_foreign = bool(slash) and prefix != claim.namespace and prefix in self.service_namespaces
        is_accepted = claim.is_granted or claim.model in claim.published
        return NameRejection.RESERVED if is_foreign and not is_accepted else None


def format_record(name: str, since: str) -> str:
    """Returns `status.nameClaim`: one line of `kubectl describe`, such as `chat since 2026-01-01T00:00:00Z`."""
    return f"{name} since {since}"


def parse_record(record: object) -> tuple[str, str]:
    """Returns name and time of the output of `format_record`; ("", "") for anything else."""
    name, _, since = record.rpartition(" since ") if isinstance(record, str) else ("", "", "")
    return (name, since) if name and since else ("", "")


def read_claim(inference_service: Mapping[str, Any]) -> NameClaim | None:
    """Returns the claim of an InferenceService, or None if it is being deleted. Ignores an invalid record."""
    meta = inference_service["metadata"]
    if meta.get("deletionTimestamp"):
        return None
    granted, since = parse_record((inference_service.get("status") or {}).get("nameClaim"))
    return NameClaim(
        meta["namespace"],
        meta["name"],
        claimed_name(inference_service),
        meta.get("creationTimestamp") or "",
        granted,
        since,
        published(inference_service),
    )


def read_claims(inference_service: Mapping[str, Any]) -> tuple[NameClaim, ...]:
    """Returns the claims of an InferenceService: its own, then one for each adapter. None if it is being deleted.

    Invalid entries are ignored, and so is an adapter with the name of another one.
    """
    claim = read_claim(inference_service)
    if claim is None:
        return ()
    since_by_name = {
        str(entry["name"]): str(entry["since"])
        for entry in _entries(inference_service.get("status"))
        if isinstance(entry.get("name"), str) and isinstance(entry.get("since"), str) and entry["since"]
    }
    found = {}
    for name in adapter_names(inference_service):
        since = since_by_name.get(name, "")
        found[name] = NameClaim(
            claim.namespace, f"{claim.name}/{name}", name, claim.created, name if since else "", since
        )
    return (claim, *found.values())


def adapter_names(inference_service: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the adapters in the spec of an InferenceService, at most MAX_ADAPTERS."""
    names = (entry.get("name") for entry in _entries(inference_service.get("spec")))
    return tuple(name for name in names if isinstance(name, str) and name)


def _entries(part: Any) -> list[dict[str, Any]]:
    """Return the entries of `adapters` in a spec or a status. Ignores invalid ones."""
    found = part.get("adapters") if isinstance(part, dict) else None
    return [one for one in found[:MAX_ADAPTERS] if isinstance(one, dict)] if isinstance(found, list) else []


def claimed_name(inference_service: Mapping[str, Any]) -> str:
    """Returns the model name in the spec of an InferenceService; without one, the name of the object."""
    model = (inference_service.get("spec") or {}).get("model")
    name = model.get("name") if isinstance(model, dict) else None
    return str(name or inference_service["metadata"]["name"])


def published(inference_service: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the model names in the status of an InferenceService. Ignores invalid entries."""
    names = (inference_service.get("status") or {}).get("modelNames")
    return tuple(name for name in names if isinstance(name, str) and name) if isinstance(names, list) else ()


def resolve_owners(claims: Collection[NameClaim]) -> dict[str, NameClaim]:
    """Returns every served name with the claim that owns it: granted, then qualified, then dropped names."""
    claim_by_name: dict[str, NameClaim] = {}
    for claim in sorted((c for c in claims if c.is_granted), key=lambda c: c._grant_order):
        claim_by_name.setdefault(claim.model, claim)
    for claim in claims:
        claim_by_name.setdefault(claim.qualified_name, claim)
    for claim in sorted(claims, key=lambda c: (c.created, c.qualified_name)):
        for name in claim.published:
            claim_by_name.setdefault(name, claim)
    return claim_by_name


def find_holder(claim: NameClaim, claims: Iterable[NameClaim], rules: NameRules) -> NameClaim | None:
    """Returns the claim of another service that keeps `claim` from its model name, or None.

    A record keeps its name until the operator removes it, also when the spec names another model already.
    """
    others = [c for c in claims if c.qualified_name != claim.qualified_name]
    granted = [c for c in others if c.granted == claim.model]
    if claim.is_granted:
        earlier = [c for c in granted if c.is_granted and c._grant_order < claim._grant_order]
        return min(earlier, key=lambda c: c._grant_order, default=None)
    if granted:
        return min(granted, key=lambda c: (not c.is_granted, c._grant_order))
    qualified = next((c for c in others if c.qualified_name == claim.model), None)
    if qualified is not None or claim.model == claim.qualified_name:
        return qualified
    competitors = [c for c in others if c.model == claim.model and rules.rejection(c) is None]
    return min(
        (c for c in competitors if c._claim_order < claim._claim_order), key=lambda c: c._claim_order, default=None
    )


def is_grantable(claim: NameClaim, claims: Iterable[NameClaim], rules: NameRules) -> bool:
    """Whether the operator records the claim, or keeps its record. NAMESPACE/NAME needs none."""
    if claim.model == claim.qualified_name or rules.rejection(claim) is not None:
        return False
    return find_holder(claim, claims, rules) is None


def served_names(claim: NameClaim, claim_by_name: Mapping[str, NameClaim]) -> tuple[str, ...]:
    """Returns the names that `claim` owns: the name in the spec first, dropped names last."""
    names = dict.fromkeys((claim.model, claim.qualified_name, *claim.published))
    return tuple(name for name in names if claim_by_name.get(name) is claim)
