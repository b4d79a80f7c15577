"""The admission policy of a service, read from its InferenceService and its InferenceServiceAdmission.

Problem: the gateway must serve every object in the API server, including one that a newer release wrote. Parsing a
whole object costs a hundred times as much as a pick. The two objects arrive by two watches, in any order.

Idea: one place parses an object, and only after it changes. A spec that cannot be parsed leaves the service without
admission. Limits that are missing, belong to a deleted service of the same name, or cannot be parsed are not used: the
last usable ones apply for as long as the service has an SLO. What cannot be parsed is logged once and reported to the
operator until it is fixed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from plimsoll.api import labels
from plimsoll.api.v1alpha1 import UNKNOWN_GPU_RESOURCE, InferenceService, parse
from plimsoll.core import codec
from plimsoll.core.admission.cost_model import ClassPolicy, default_class
from plimsoll.core.admission.publication import AdmissionLimits
from plimsoll.core.admission.quota import TenantPolicy
from plimsoll.core.admission.request_limits import RequestLimits
from plimsoll.core.errors import InvalidSpec
from plimsoll.resources import object_meta

log = logging.getLogger(__name__)

Object = Mapping[str, Any]


@dataclass(frozen=True)
class AdmissionPolicy:
    """The admission policy of one service.

    `fallback` is the NAMESPACE/NAME of the service that receives requests which this one cannot serve. `max_queued` is
    the number of requests that may wait at one gateway. `limits` are the last published limits that could be read, None
    before the first. `objectives` are the priorities of InferenceObjectives by name: further names of classes.
    `max_loras` is the number of LoRA adapters that one engine runs at once, 0 without LoRA.
    """

    classes: tuple[ClassPolicy, ...]
    tenants: Mapping[str, TenantPolicy] = field(default_factory=dict)
    fallback: str | None = None
    max_queued: int = 1000
    limits: AdmissionLimits | None = None
    objectives: Mapping[str, int] = field(default_factory=dict)
    max_loras: int = 0

    @property
    def has_cost_model(self) -> bool:
        """Whether the published limits have a cost model that matches these classes."""
        limits = self.limits
        return (
            limits is not None
            and limits.cost_model is not None
            and limits.classes == tuple(c.name for c in self.classes)
        )

    @cached_property
    def without_starts(self) -> AdmissionPolicy:
        """This policy for a service none of whose engines will start again."""
        if self.limits is None:
            return self
        return replace(self, limits=replace(self.limits, starting=False, ready_at_s=None, capacity_steps=()))

    @property
    def token_ratios(self) -> Mapping[str, float]:
        """The learned ratios of estimated prompt tokens, by kind of content. Empty before they are published."""
        return {} if self.limits is None else self.limits.token_ratios

    @cached_property
    def default_class(self) -> ClassPolicy:
        """The class of requests that name none: `default`, else the class with the lowest priority."""
        found = default_class(self.classes)
        assert found is not None  # a policy has at least one class
        return found

    def class_of(self, name: bytes) -> ClassPolicy:
        """Returns the class that a request's header names, by its own name or an objective's, else the default."""
        return self._by_header.get(name, self.default_class)

    @cached_property
    def _by_header(self) -> Mapping[bytes, ClassPolicy]:
        named = {name.encode(): self._class_up_to(priority) for name, priority in self.objectives.items()}
        return named | {c.name.encode(): c for c in self.classes}

    def is_unknown(self, name: bytes) -> bool:
        """Whether a request names a class that the service does not have."""
        return bool(name) and name not in self._by_header

    def _class_up_to(self, priority: int) -> ClassPolicy:
        """Returns the class of the highest priority that is not above `priority`, else that of the lowest.

        Of several, it is the default class, else the first.
        """
        within = [c for c in self.classes if c.priority <= priority]
        wanted = max(c.priority for c in within) if within else min(c.priority for c in self.classes)
        found = [c for c in self.classes if c.priority == wanted]
        return self.default_class if self.default_class in found else found[0]


def _parse_spec(obj: Object) -> InferenceService:
    return parse({**obj, "status": {}}, UNKNOWN_GPU_RESOURCE)


def _policy_of(service: InferenceService) -> AdmissionPolicy | None:
    if not service.classes:
        return None
    return AdmissionPolicy(
        classes=service.classes,
        tenants=service.tenants,
        fallback=None if service.fallback is None else "/".join(service.fallback),
        max_queued=0 if service.when_full == "Shed" else service.max_queued,
        max_loras=0 if service.lora is None else service.lora.loras,
    )


def read_limits(admission: Object) -> AdmissionLimits:
    """Returns the limits in an InferenceServiceAdmission. Raises ValueError."""
    return codec.decode(AdmissionLimits, admission.get("limits"))


def admission_of(service: Object, admission: Object | None) -> Object | None:
    """Returns the InferenceServiceAdmission if it belongs to this very service, not to a deleted one of its name."""
    if admission is None or object_meta.owner_uid(admission) != service["metadata"].get("uid"):
        return None
    return admission


@dataclass(frozen=True)
class _ReadPolicy:
    """A policy, and the versions of the objects that it was read from."""

    service: Object
    admission: Object | None
    objectives: Mapping[str, int]
    policy: AdmissionPolicy | None
    request_limits: Mapping[str, RequestLimits]


class PolicyCache:
    """The policies of all services. Each pair of objects is parsed once per version."""

    def __init__(self) -> None:
        self._policies: dict[str, _ReadPolicy] = {}
        self._errors: dict[str, str] = {}

    def get(
        self, key: str, obj: Object, admission: Object | None = None, objectives: Mapping[str, int] | None = None
    ) -> AdmissionPolicy | None:
        """Returns the policy of a service. `key` is its NAMESPACE/NAME, `admission` what `admission_of` returns."""
        cached, objectives = self._policies.get(key), objectives or {}
        is_same = cached is not None and cached.service is obj and cached.admission is admission
        if cached is not None and is_same and cached.objectives == objectives:
            return cached.policy
        policy, request_limits = self._read(key, obj, admission, cached)
        if policy is not None:
            policy = replace(policy, objectives=objectives)
        if cached is not None and cached.policy == policy:
            policy = cached.policy
        self._policies[key] = _ReadPolicy(obj, admission, objectives, policy, request_limits)
        return policy

    def request_limits(self, key: str) -> Mapping[str, RequestLimits]:
        """Returns the limits of single requests of a service that `get` has read, as its API object has them."""
        return self._policies[key].request_limits

    def parse_error(self, key: str) -> str:
        """Returns what cannot be parsed, and why. "" if all can."""
        return self._errors.get(key, "")

    def remove(self, key: str) -> None:
        """Drop the policy of one service."""
        self._policies.pop(key, None)
        self._errors.pop(key, None)

    def _read(
        self, key: str, obj: Object, admission: Object | None, cached: _ReadPolicy | None
    ) -> tuple[AdmissionPolicy | None, Mapping[str, RequestLimits]]:
        policy, part, request_limits = None, "spec", {} if cached is None else cached.request_limits
        try:
            service = _parse_spec(obj)
            policy, request_limits, part = _policy_of(service), service.request_limits, labels.ADMISSION_KIND
            if policy is not None:
                policy = replace(policy, limits=_last_limits(obj, cached))
                if admission is not None and admission.get("limits", {}) != {}:
                    policy = replace(policy, limits=read_limits(admission))
        except (InvalidSpec, ValueError, TypeError, AttributeError) as error:
            message = f"{part}: {error}"
            if self._errors.get(key) != message:
                log.warning("cannot parse the admission of InferenceService %s: %s", key, message)
            self._errors[key] = message
        else:
            self._errors.pop(key, None)
        return policy, request_limits


def _last_limits(obj: Object, cached: _ReadPolicy | None) -> AdmissionLimits | None:
    """Returns the limits that were read last for this very service, while it had an SLO."""
    if cached is None or cached.policy is None:
        return None
    return cached.policy.limits if cached.service["metadata"].get("uid") == obj["metadata"].get("uid") else None
