"""From an InferenceService object to what decides about its requests at the gateway.

Problem: the gateway must serve whatever objects the API server has, also one that a newer release wrote, and reading
one whole costs a hundred times a pick.

Idea: one place reads an object, and only when it is another one than before. What cannot be read makes a service
without a gate, as it was before admission, and is said: once in the log, and to the operator for as long as it lasts.
Where only the operator's own word cannot be read, what the user promised is known all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from plimsoll.api.v1alpha1 import parse
from plimsoll.core.admission import ClassPolicy, TenantPolicy
from plimsoll.core.admission.published import Published, from_dict
from plimsoll.core.errors import InvalidSpec

log = logging.getLogger(__name__)

Object = Mapping[str, Any]

DEFAULT_CLASS: Final = "default"


@dataclass(frozen=True)
class Policy:
    """What one service's gate decides by.

    fallback: NAMESPACE/NAME of the service that takes what this one cannot. max_held: requests that may wait at one
    gateway. published: what the operator has told last, None if nothing.
    """

    classes: tuple[ClassPolicy, ...]
    tenants: Mapping[str, TenantPolicy] = field(default_factory=dict)
    fallback: str | None = None
    max_held: int = 1000
    published: Published | None = None

    @property
    def gated(self) -> bool:
        """Whether there is a model to decide by, and it was made for these classes."""
        told = self.published
        return told is not None and told.limits is not None and told.classes == tuple(c.name for c in self.classes)

    @cached_property
    def default(self) -> ClassPolicy:
        """The class of requests that name none: the one called so, else the least."""
        called = (c for c in self.classes if c.name == DEFAULT_CLASS)
        return next(called, None) or min(self.classes, key=lambda c: c.priority)

    def class_of(self, told: bytes) -> ClassPolicy:
        """The class of a request, by what its header says."""
        return self._by_header.get(told, self.default)

    @cached_property
    def _by_header(self) -> Mapping[bytes, ClassPolicy]:
        return {c.name.encode(): c for c in self.classes}


def read(obj: Object) -> Policy | None:
    """The policy of a service before the operator's first word; None where nothing is promised. Raises InvalidSpec."""
    service = parse({**obj, "status": {}})
    if not service.classes:
        return None
    return Policy(
        classes=service.classes,
        tenants=service.tenants,
        fallback=None if service.fallback is None else "/".join(service.fallback),
        max_held=0 if service.when_full == "Shed" else service.max_held,
    )


def read_published(obj: Object) -> Published | None:
    """The operator's word; None before the first. Raises ValueError."""
    told = (obj.get("status") or {}).get("admission")
    return None if told is None else from_dict(told)


class Policies:
    """Policies of all services, each read once for as long as its object stays the same."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[Object, Policy | None]] = {}
        self._said: dict[str, str] = {}

    def of(self, key: str, obj: Object) -> Policy | None:
        """key: NAMESPACE/NAME of the object."""
        known = self._read.get(key)
        if known is not None and known[0] is obj:
            return known[1]
        policy = self._try(key, obj)
        if known is not None and known[1] == policy:
            policy = known[1]
        self._read[key] = obj, policy
        return policy

    def unread(self, key: str) -> str:
        """What of the object of that name cannot be read, and why; "" where all of it was."""
        return self._said.get(key, "")

    def keep(self, keys: set[str]) -> None:
        """Forget all others."""
        for gone in self._read.keys() - keys:
            del self._read[gone]
            self._said.pop(gone, None)

    def _try(self, key: str, obj: Object) -> Policy | None:
        policy, part = None, "spec"
        try:
            policy, part = read(obj), "status.admission"
            if policy is not None:
                policy = replace(policy, published=read_published(obj))
        except (InvalidSpec, ValueError, TypeError, AttributeError) as error:
            words = f"{part}: {error}"
            if self._said.get(key) != words:
                log.warning("no admission for %s, its object cannot be read: %s", key, words)
            self._said[key] = words
        else:
            self._said.pop(key, None)
        return policy
