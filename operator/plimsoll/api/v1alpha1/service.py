"""The object itself, and the one way from a manifest to it.

`parse` repeats every check of the API server, because a cluster may have an older CRD than the operator. It lists all
problems at once, each as a sentence that begins with the full path of the field at fault.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationError

from plimsoll.api.v1alpha1.admission import DEFAULT_HOLD, OPEN, Admission, WhenFull
from plimsoll.api.v1alpha1.base import Model, Rule, Rules
from plimsoll.api.v1alpha1.cost import Cost
from plimsoll.api.v1alpha1.engine import Engine
from plimsoll.api.v1alpha1.model import ModelSource
from plimsoll.api.v1alpha1.names import NAME_RULES
from plimsoll.api.v1alpha1.problems import sentences
from plimsoll.api.v1alpha1.scaling import Scaling
from plimsoll.api.v1alpha1.schedule import windows
from plimsoll.api.v1alpha1.slo import Slo
from plimsoll.api.v1alpha1.status import Status
from plimsoll.api.v1alpha1.tiers import ROLES, Role, Tier, Tiers
from plimsoll.core.admission import ClassPolicy, TenantPolicy
from plimsoll.core.errors import InvalidSpec
from plimsoll.core.forecast import MISS_COST
from plimsoll.core.scaling.policy import Mode, Policy, TierPolicy, Window

_WAKES = "without it no tier at zero would be woken or sized"


def _rests_cel(role: Role) -> str:
    return f"(has(self.tiers.{role}) && self.tiers.{role}.minReplicas == 0)"


class Spec(Model):
    """What is wanted."""

    model: ModelSource = Field(description="The model: its weights and its name.")
    engine: Engine = Field(default=Engine(), description="The engine that serves the model.")
    slo: Slo | None = Field(
        default=None,
        description="The latency promise: tiers are sized so that it is kept at the least GPU time. Absent: nothing is "
        "sized, and each tier keeps minReplicas.",
    )
    tiers: Tiers = Field(description="The tiers: `serve` alone, or `prefill` and `decode`. The shape cannot change.")
    scaling: Scaling = Field(default=Scaling(), description="How replicas follow the load, alike in all tiers.")
    admission: Admission | None = Field(
        default=None,
        description="Which requests are let in first when not all can be, and what becomes of the others; absent: they "
        f"are all alike, and wait for up to {DEFAULT_HOLD}.",
    )
    cost: Cost | None = Field(
        default=None, description="What GPUs cost, so that the status shows the price of a million tokens."
    )

    rules: ClassVar[tuple[Rule[Spec], ...]] = (
        Rule(
            "!has(self.scaling) || !has(self.scaling.prefillPerDecode) || !has(self.tiers.serve)",
            "prefillPerDecode is only for prefill and decode tiers, not for serve",
            lambda own: own.scaling.prefill_per_decode is None or own.tiers.serve is None,
            field=".scaling.prefillPerDecode",
            reason="FieldValueForbidden",
        ),
        Rule(
            "has(self.slo) || !has(self.admission)",
            "slo is needed with admission: requests are let in while its targets can be kept",
            lambda own: own.slo is not None or own.admission is None,
            field=".slo",
            reason="FieldValueRequired",
        ),
        Rule(
            f"has(self.slo) || !({' || '.join(_rests_cel(role) for role in ROLES)})",
            f"slo is needed where a tier has minReplicas 0: {_WAKES}",
            lambda own: own.slo is not None or all(tier.min_replicas > 0 for _, tier in own.tiers.items()),
            field=".slo",
            reason="FieldValueRequired",
        ),
        Rule(
            "has(self.slo) || !has(self.scaling) || !has(self.scaling.schedule) ||"
            " self.scaling.schedule.all(entry, !has(entry.minReplicas) || entry.minReplicas > 0)",
            f"slo is needed where an entry of scaling.schedule has minReplicas 0: {_WAKES}",
            lambda own: own.slo is not None or all(entry.min_replicas != 0 for entry in own.scaling.schedule),
            field=".slo",
            reason="FieldValueRequired",
        ),
        Rule(
            "!has(self.slo) || !has(self.slo.e2e) || has(self.slo.ttft) || !has(self.tiers.prefill)",
            "ttft is needed beside e2e where there is a prefill tier, which is sized by it",
            lambda own: own.slo is None or own.slo.e2e is None or own.slo.ttft is not None or own.tiers.prefill is None,
            field=".slo.ttft",
            reason="FieldValueRequired",
        ),
    )


class Meta(Model):
    """The part of ObjectMeta that Plimsoll reads."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Rules(*NAME_RULES)]
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = Field(default={})
    annotations: dict[str, str] = Field(default={})


class InferenceService(Model):
    """A model served within a latency promise, by tiers of engines behind one gateway."""

    api_version: Literal["plimsoll.dev/v1alpha1"] = "plimsoll.dev/v1alpha1"
    kind: Literal["InferenceService"] = "InferenceService"
    metadata: Meta
    spec: Spec = Field(description="What is wanted.")
    status: Status = Field(default=Status(), description="What was last observed.")

    rules: ClassVar[tuple[Rule[InferenceService], ...]] = (
        Rule(
            "!has(self.spec.admission) || !has(self.spec.admission.fallback) ||"
            " self.spec.admission.fallback.name != self.metadata.name",
            "must be another service: this one is full when its fallback is asked",
            lambda own: own.fallback is None or own.fallback[1] != own.metadata.name,
            field=".spec.admission.fallback.name",
        ),
    )

    @property
    def key(self) -> str:
        """NAMESPACE/NAME: unique in the cluster, and the name clients can always use."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def model_name(self) -> str:
        """The name this service claims for clients; another service may own it."""
        return self.spec.model.name or self.metadata.name

    @cached_property
    def classes(self) -> tuple[ClassPolicy, ...]:
        """The classes of requests, at least one; none where nothing is promised."""
        return () if self.spec.slo is None else self._admission.class_policies(self.spec.slo)

    @cached_property
    def tenants(self) -> Mapping[str, TenantPolicy]:
        """The tenants that have another weight than the others, or a quota, by name."""
        return self._admission.tenant_policies()

    @property
    def when_full(self) -> WhenFull:
        """What becomes of a request that no engine has room for."""
        return self._admission.when_full

    @property
    def fallback(self) -> tuple[str, str] | None:
        """Namespace and name of the service that takes what this one cannot; None without one."""
        named = self._admission.fallback
        return None if named is None else (self.metadata.namespace, named.name)

    @property
    def max_held(self) -> int:
        """Requests that each gateway lets wait at most."""
        return self._admission.max_held

    @property
    def _admission(self) -> Admission:
        return self.spec.admission or OPEN

    def policy(self, now_s: float) -> Policy:
        """What the user wants of scaling, with the schedule's windows from now_s (seconds since the epoch) on.

        It holds for a week; made again at each tick, it follows the schedule and the clocks for ever.
        """
        scaling, slo = self.spec.scaling, self.spec.slo
        ratio = scaling.prefill_per_decode
        ahead = windows(scaling.schedule, now_s)
        return Policy(
            tiers={role: self._tier_policy(tier, ahead) for role, tier in self.spec.tiers.items()},
            slo=None if slo is None else slo.to_core(),
            mode=Mode(scaling.mode),
            paused=scaling.paused,
            miss_cost=MISS_COST if scaling.miss_cost is None else float(scaling.miss_cost),
            prefill_per_decode=(0.0, math.inf) if ratio is None else ratio.to_core(),
        )

    def _tier_policy(self, tier: Tier, ahead: tuple[Window, ...]) -> TierPolicy:
        scaling = self.spec.scaling
        least, most = tier.bounds
        return TierPolicy(
            min_replicas=least,
            max_replicas=most,
            warm_replicas=scaling.warm_replicas,
            gpus=tier.gpus,
            up=None if scaling.scale_up is None else scaling.scale_up.to_core(),
            down=None if scaling.scale_down is None else scaling.scale_down.to_core(),
            schedule=ahead,
        )


def parse(obj: Mapping[str, Any]) -> InferenceService:
    """The typed object for a manifest as the API server sends it.

    Raises InvalidSpec with every problem found. What this version cannot read of a status counts as absent: it is not
    the user's. Rules that span fields of an object are judged once each of these fields is right by itself, as in the
    API server; that the shape of tiers never changes is judged by the API server alone.
    """
    try:
        return InferenceService.model_validate({**obj, "status": _status(obj.get("status"))}, by_name=False)
    except ValidationError as error:
        raise InvalidSpec(sentences(error)) from error


def _status(found: Any) -> Status:
    """The fields that can be read: one that another version wrote must not cost what was learned."""
    try:
        return Status.model_validate(found, by_name=False)
    except ValidationError as error:
        if not isinstance(found, Mapping):
            return Status()
        unread = {str(details["loc"][0]) for details in error.errors() if details["loc"]}
        return Status.model_validate({name: found[name] for name in found if name not in unread}, by_name=False)
