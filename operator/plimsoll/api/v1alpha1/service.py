"""The InferenceService object, and `parse`, which converts a manifest to it.

`parse` repeats every check of the API server, because a cluster may have an older CRD than the operator. It reports all
problems at once; each message begins with the full path of the invalid field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, ValidationError

from plimsoll.api.labels import SIZE_PROBLEM
from plimsoll.api.v1alpha1.adapter_rules import ADAPTER_RULES, HAS_LORA, uses_lora
from plimsoll.api.v1alpha1.adapters import AdapterSpec, LoraSpec
from plimsoll.api.v1alpha1.admission import DEFAULT_ADMISSION, DEFAULT_MAX_QUEUE_TIME, AdmissionSpec, WhenFull
from plimsoll.api.v1alpha1.api_model import ApiModel, MapList, ValidationRule, ValidationRules, with_values
from plimsoll.api.v1alpha1.cache_and_draft_rules import CACHE_AND_DRAFT_RULES
from plimsoll.api.v1alpha1.cost import CostSpec
from plimsoll.api.v1alpha1.engine import EngineSpec
from plimsoll.api.v1alpha1.engine_features import needs
from plimsoll.api.v1alpha1.kv_offload import KvOffloadSpec
from plimsoll.api.v1alpha1.model import FETCHED_SCHEMES, ModelSource
from plimsoll.api.v1alpha1.node_rules import NODE_RULES
from plimsoll.api.v1alpha1.parallelism_rules import PARALLELISM_RULES
from plimsoll.api.v1alpha1.prefill_rules import PREFILL_RULES, SERVE_ALONE, serves_alone
from plimsoll.api.v1alpha1.prefix_cache_rules import PREFIX_CACHE_RULES
from plimsoll.api.v1alpha1.request_limits import RequestLimitsSpec
from plimsoll.api.v1alpha1.scaling import ScalingOptions
from plimsoll.api.v1alpha1.schedule import upcoming_windows
from plimsoll.api.v1alpha1.service_name import NAME_RULES
from plimsoll.api.v1alpha1.slo import SloSpec
from plimsoll.api.v1alpha1.status import InferenceServiceStatus
from plimsoll.api.v1alpha1.target_rules import TARGET_RULES
from plimsoll.api.v1alpha1.targets import EngineTarget, EngineTargets
from plimsoll.api.v1alpha1.tiers import DEFAULT_GPU_RESOURCE, NO_TIERS, ROLES, EngineTier, EngineTiers, RoleName
from plimsoll.api.v1alpha1.validation_messages import format_errors
from plimsoll.core.admission.cost_model import ClassPolicy
from plimsoll.core.admission.quota import TenantPolicy
from plimsoll.core.admission.request_limits import NO_LIMITS, RequestLimits
from plimsoll.core.autoscaling.scaling_policy import ScalingMode, ScalingPolicy, ScheduleWindow, TierPolicy
from plimsoll.core.demand.standby_value import MISS_COST
from plimsoll.core.errors import InvalidSpec
from plimsoll.core.routing.model_names import MAX_ADAPTERS
from plimsoll.core.slo import Slo, tightest
from plimsoll.engines.engine import Feature

_ZERO_NEEDS_SLO = "without it a tier at zero replicas is neither woken nor sized"

_GENERATES_CEL = "!has(self.model.task) || self.model.task == 'generate'"
_NEEDS_GENERATE = "is allowed only with task generate: other models have no output tokens"


def _limits_output(limits: RequestLimitsSpec | None) -> bool:
    return limits is not None and limits.max_output_tokens is not None


def _min_zero_cel(role: RoleName) -> str:
    tier = f"self.tiers.{role}"
    return f"(has(self.tiers) && has({tier}) && has({tier}.minReplicas) && {tier}.minReplicas == 0)"


def _is_task(task: str) -> str:
    return f"has(self.model.task) && self.model.task == '{task}'"


def _class_limits_output(spec: InferenceServiceSpec) -> bool:
    classes = () if spec.admission is None else spec.admission.classes or ()
    return any(_limits_output(one.request_limits) for one in classes)


_LIMITS_OUTPUT = "has(self.requestLimits) && has(self.requestLimits.maxOutputTokens)"
_CLASS_LIMITS_OUTPUT = (
    "has(self.admission) && has(self.admission.classes) && self.admission.classes"
    ".exists(one, has(one.requestLimits) && has(one.requestLimits.maxOutputTokens))"
)
_ENGINE_RULES: tuple[ValidationRule[InferenceServiceSpec], ...] = (
    needs(
        Feature.DISAGGREGATION,
        f"!{SERVE_ALONE}",
        lambda own: not serves_alone(own),
        field=".tiers.prefill",
    ),
    needs(Feature.TARGETS, "has(self.targets)", lambda own: own.targets is not None, field=".targets"),
    needs(Feature.LORA, HAS_LORA, uses_lora, field=".adapters"),
    needs(Feature.EMBED, _is_task("embed"), lambda own: own.model.task == "embed", field=".model.task"),
    needs(Feature.SCORE, _is_task("score"), lambda own: own.model.task == "score", field=".model.task"),
    needs(Feature.TRANSCRIBE, _is_task("transcribe"), lambda own: own.model.task == "transcribe", field=".model.task"),
    needs(
        Feature.REVISION,
        "has(self.model.revision)",
        lambda own: own.model.revision is not None,
        field=".model.revision",
    ),
    needs(
        Feature.FETCH,
        f"!has(self.targets) && self.model.uri.matches('^({'|'.join(FETCHED_SCHEMES)})://')",
        lambda own: own.targets is None and own.model.is_fetched,
        field=".model.uri",
        remedy="name a claim or an image (pvc:// or oci://)",
    ),
    needs(
        Feature.DEFAULT_OUTPUT_LIMIT,
        _LIMITS_OUTPUT,
        lambda own: _limits_output(own.request_limits),
        field=".requestLimits.maxOutputTokens",
    ),
    needs(Feature.DEFAULT_OUTPUT_LIMIT, _CLASS_LIMITS_OUTPUT, _class_limits_output, field=".admission.classes"),
)


class InferenceServiceSpec(ApiModel):
    """Desired state of the service."""

    model: ModelSource = Field(description="The model: its weights and its name.")
    adapters: Annotated[tuple[AdapterSpec, ...], Field(max_length=MAX_ADAPTERS, strict=False), MapList()] = Field(
        default=(),
        description="LoRA adapters of the model. A change restarts no engine if the service had adapters before, or "
        "has `engine.lora`.",
    )
    engine: EngineSpec = Field(default=EngineSpec(), description="The engine that serves the model.")
    kv_offload: KvOffloadSpec | None = Field(
        default=None,
        description="KV cache in CPU memory. Absent: none.",
    )
    slo: SloSpec | None = Field(
        default=None,
        description="Latency SLO. The operator sizes the tiers to meet it with the least GPU time. Absent: the "
        "operator sizes nothing, and each tier keeps minReplicas.",
    )
    tiers: EngineTiers = Field(
        default=NO_TIERS,
        description="The tiers: `serve` alone, or `prefill` and `decode`. The shape cannot change. Either tiers or "
        "targets is required.",
    )
    targets: EngineTargets | None = Field(
        default=None,
        description="Existing engines that something else manages, in place of tiers. Plimsoll creates nothing, and "
        "changes nothing but the replica count in mode Auto.",
    )
    when_prefill_unavailable: Literal["Serve", "Reject"] = Field(
        default="Serve",
        description="With prefill and decode tiers, a prompt that no prefill engine can take. Serve: the decode engine "
        "computes it, and its streams stall meanwhile. Reject: 503 `prefill_unavailable`.",
    )
    scaling: ScalingOptions = Field(default=ScalingOptions(), description="Autoscaling options of all tiers.")
    admission: AdmissionSpec | None = Field(
        default=None,
        description="Admission control: request classes, tenants, and the action for requests that exceed the "
        f"capacity. Absent: one class, whose requests are queued for up to {DEFAULT_MAX_QUEUE_TIME}.",
    )
    request_limits: RequestLimitsSpec | None = Field(
        default=None,
        description="Limits of each request, with or without slo. A class of spec.admission may have its own.",
    )
    cost: CostSpec | None = Field(
        default=None, description="Price of GPUs, from which the status computes the price of a million tokens."
    )

    rules: ClassVar[tuple[ValidationRule[InferenceServiceSpec], ...]] = (
        *_ENGINE_RULES,
        *TARGET_RULES,
        *NODE_RULES,
        *PREFIX_CACHE_RULES,
        *PREFILL_RULES,
        *PARALLELISM_RULES,
        *CACHE_AND_DRAFT_RULES,
        *ADAPTER_RULES,
        ValidationRule(
            f"!has(self.model.task) || self.model.task == 'generate' ||"
            f" {SERVE_ALONE} && !(has(self.targets) && has(self.targets.prefill))",
            "task needs the tier serve unless it is generate: only generated text has a decode phase",
            lambda own: own.model.task == "generate" or "prefill" not in own.sized_tiers,
            field=".model.task",
            reason="FieldValueForbidden",
        ),
        ValidationRule(
            f"{_GENERATES_CEL} || !({_LIMITS_OUTPUT})",
            f"maxOutputTokens {_NEEDS_GENERATE}",
            lambda own: own.model.task == "generate" or not _limits_output(own.request_limits),
            field=".requestLimits.maxOutputTokens",
            reason="FieldValueForbidden",
        ),
        ValidationRule(
            f"{_GENERATES_CEL} || !({_CLASS_LIMITS_OUTPUT})",
            f"requestLimits.maxOutputTokens of a class {_NEEDS_GENERATE}",
            lambda own: own.model.task == "generate" or not _class_limits_output(own),
            field=".admission.classes",
            reason="FieldValueForbidden",
        ),
        ValidationRule(
            "has(self.slo) || !has(self.admission)",
            "slo is required with admission: requests are admitted while its targets can be met",
            lambda own: own.slo is not None or own.admission is None,
            field=".slo",
            reason="FieldValueRequired",
        ),
        ValidationRule(
            "has(self.slo) || !has(self.engine) || !has(self.engine.tuning) || self.engine.tuning == 'Off'",
            "slo is required with engine.tuning Auto: the arguments follow from it",
            lambda own: own.slo is not None or own.engine.tuning != "Auto",
            field=".slo",
            reason="FieldValueRequired",
        ),
        ValidationRule(
            f"has(self.slo) || !({' || '.join(_min_zero_cel(role) for role in ROLES)})",
            f"slo is required if a tier has minReplicas 0: {_ZERO_NEEDS_SLO}",
            lambda own: own.slo is not None or all(tier.min_replicas > 0 for _, tier in own.tiers.items()),
            field=".slo",
            reason="FieldValueRequired",
        ),
        ValidationRule(
            "has(self.slo) || !has(self.scaling) || !has(self.scaling.schedule) ||"
            " self.scaling.schedule.all(entry, !has(entry.minReplicas) || entry.minReplicas > 0)",
            f"slo is required if an entry of scaling.schedule has minReplicas 0: {_ZERO_NEEDS_SLO}",
            lambda own: own.slo is not None or all(entry.min_replicas != 0 for entry in own.scaling.schedule),
            field=".slo",
            reason="FieldValueRequired",
        ),
        ValidationRule(
            "!has(self.slo) || !has(self.slo.e2e) || has(self.slo.ttft) ||"
            " !(has(self.tiers) && has(self.tiers.prefill))",
            "ttft is required with e2e if there is a prefill tier, because it sizes that tier",
            lambda own: own.slo is None or own.slo.e2e is None or own.slo.ttft is not None or own.tiers.prefill is None,
            field=".slo.ttft",
            reason="FieldValueRequired",
        ),
    )

    @property
    def sized_tiers(self) -> dict[RoleName, EngineTier | EngineTarget]:
        """The tiers, or the targets in their place, by role."""
        return dict(self.tiers.items() if self.targets is None else self.targets.items())

    @property
    def takes_requests(self) -> bool:
        """Whether gateways send requests to the engines, and so report the demand."""
        return self.targets is None or self.targets.take_requests

    @property
    def mode(self) -> ScalingMode:
        """The scaling mode, with its default."""
        default = ScalingMode.AUTO if self.targets is None else ScalingMode.RECOMMEND
        return default if self.scaling.mode is None else ScalingMode(self.scaling.mode)


class ObjectMeta(ApiModel):
    """The part of ObjectMeta that Plimsoll reads."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, ValidationRules(*NAME_RULES)]
    namespace: str = ""
    uid: str = ""
    generation: int = 0
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] = Field(default={})
    annotations: dict[str, str] = Field(default={})


_MODEL_NAME: Final = "(has(self.spec.model.name) ? self.spec.model.name : self.metadata.name)"


class InferenceService(ApiModel):
    """A model served within a latency SLO by tiers of engines behind one gateway."""

    api_version: Literal["plimsoll.dev/v1alpha1"] = "plimsoll.dev/v1alpha1"
    kind: Literal["InferenceService"] = "InferenceService"
    metadata: ObjectMeta
    spec: InferenceServiceSpec = Field(description="Desired state of the service.")
    status: InferenceServiceStatus = Field(
        default=InferenceServiceStatus(), description="Observed state of the service."
    )

    rules: ClassVar[tuple[ValidationRule[InferenceService], ...]] = (
        ValidationRule(
            "!has(self.spec.admission) || !has(self.spec.admission.fallback) ||"
            " self.spec.admission.fallback.name != self.metadata.name",
            "must be another service: this one is full when it uses its fallback",
            lambda own: own.fallback is None or own.fallback[1] != own.metadata.name,
            field=".spec.admission.fallback.name",
        ),
        ValidationRule(
            f"!has(self.spec.adapters) || self.spec.adapters.all(adapter, adapter.name != {_MODEL_NAME})",
            "an adapter needs another name than the model: rename the adapter, or set model.name",
            lambda own: all(adapter.name != own.model_name for adapter in own.spec.adapters),
            field=".spec.adapters",
            **with_values(
                "an adapter needs another name than the model: rename the adapter ",
                (_MODEL_NAME, lambda own: own.model_name),
                ", or set model.name",
            ),
        ),
    )

    @property
    def key(self) -> str:
        """NAMESPACE/NAME: unique in the cluster, and a model name that clients can always use."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def model_name(self) -> str:
        """Model name that this service claims; another service may own it."""
        return self.spec.model.name or self.metadata.name

    @property
    def lora(self) -> LoraSpec | None:
        """Bounds on LoRA adapters; None if LoRA is not enabled."""
        return self.spec.engine.lora or (LoraSpec() if self.spec.adapters else None)

    @cached_property
    def classes(self) -> tuple[ClassPolicy, ...]:
        """Request classes, at least one; empty without an SLO."""
        return () if self.spec.slo is None else self._admission.class_policies(self.spec.slo)

    @property
    def tightest_slo(self) -> Slo | None:
        """The tightest targets of all request classes, and the ITL target of the service; None without an SLO."""
        slo = self.spec.slo
        return None if slo is None else replace(tightest([one.slo for one in self.classes]), itl_s=slo.itl_seconds)

    @cached_property
    def tenants(self) -> Mapping[str, TenantPolicy]:
        """Policies of the listed tenants by name."""
        return self._admission.tenant_policies()

    @property
    def when_full(self) -> WhenFull:
        """Action for a request that exceeds the capacity of the ready engines."""
        return self._admission.when_full

    @property
    def fallback(self) -> tuple[str, str] | None:
        """Namespace and name of the fallback service; None without one."""
        fallback = self._admission.fallback
        return None if fallback is None else (self.metadata.namespace, fallback.name)

    @property
    def max_queued(self) -> int:
        """Longest queue of the service, in requests."""
        return self._admission.max_queued

    @cached_property
    def request_limits(self) -> Mapping[str, RequestLimits]:
        """Limits of a request by class; "" for requests of other classes. Empty without any limit."""
        spec = self.spec.request_limits
        own = NO_LIMITS if spec is None else spec.to_core()
        classes = self._admission.classes or ()
        by_class = {one.name: one.request_limits.to_core(own) for one in classes if one.request_limits is not None}
        limits = {"": own, **by_class}
        return limits if any(one != NO_LIMITS for one in limits.values()) else {}

    @property
    def _admission(self) -> AdmissionSpec:
        return self.spec.admission or DEFAULT_ADMISSION

    def policy(self, now_s: float) -> ScalingPolicy:
        """Return the scaling policy, with the schedule's windows of the week after `now_s` (seconds since the epoch).

        Call it at every tick: the windows end after a week.
        """
        scaling, slo = self.spec.scaling, self.spec.slo
        ratio = scaling.prefill_per_decode
        schedule_windows = upcoming_windows(scaling.schedule, now_s)
        return ScalingPolicy(
            tiers={role: self._tier_policy(tier, schedule_windows) for role, tier in self.spec.sized_tiers.items()},
            slo=None if slo is None else slo.to_core(),
            mode=self.spec.mode,
            paused=scaling.paused,
            miss_cost=MISS_COST if scaling.slo_miss_cost is None else float(scaling.slo_miss_cost),
            prefill_per_decode=(0.0, math.inf) if ratio is None else ratio.to_core(),
        )

    def _tier_policy(self, tier: EngineTier | EngineTarget, schedule_windows: tuple[ScheduleWindow, ...]) -> TierPolicy:
        scaling = self.spec.scaling
        min_replicas, max_replicas = tier.replica_bounds
        return TierPolicy(
            min_replicas=min_replicas,
            max_replicas=max_replicas,
            warm_replicas=scaling.warm_replicas,
            gpus_per_replica=tier.replica_gpus,
            scale_up_limit=None if scaling.scale_up is None else scaling.scale_up.to_core(),
            scale_down_limit=None if scaling.scale_down is None else scaling.scale_down.to_core(),
            schedule=schedule_windows,
        )


def parse(obj: Mapping[str, Any], gpu_resource: str = DEFAULT_GPU_RESOURCE) -> InferenceService:
    """Return the typed object of a manifest from the API server.

    gpu_resource: what the installation's engines request if a tier has no gpuResource; rules about GPUs follow it.

    Raises InvalidSpec with every problem found. Status fields that this version cannot read count as absent. As in the
    API server, rules across several fields run only if each field is valid on its own. Only the API server checks that
    the shape of the tiers does not change. An object that was too large to keep has a sentence in `SIZE_PROBLEM`.
    """
    if SIZE_PROBLEM in obj:
        raise InvalidSpec((str(obj[SIZE_PROBLEM]),))
    try:
        read = {**obj, "status": _readable_status(obj.get("status"))}
        roles = () if gpu_resource == DEFAULT_GPU_RESOURCE else _roles_without_gpu_resource(obj)
        if not roles:
            return InferenceService.model_validate(read, by_name=False)
        spec, tiers = obj["spec"], obj["spec"]["tiers"]
        named = {role: {**tiers[role], "gpuResource": gpu_resource} for role in roles}
        filled = InferenceService.model_validate({**read, "spec": {**spec, "tiers": {**tiers, **named}}}, by_name=False)
    except ValidationError as error:
        raise InvalidSpec(format_errors(error)) from error
    cleared: dict[str, Any] = {
        role: getattr(filled.spec.tiers, role).model_copy(update={"gpu_resource": None}) for role in roles
    }
    spec = filled.spec.model_copy(update={"tiers": filled.spec.tiers.model_copy(update=cleared)})
    return filled.model_copy(update={"spec": spec})


def _roles_without_gpu_resource(obj: Mapping[str, Any]) -> tuple[RoleName, ...]:
    """Return the tiers of a manifest, of any form, that have no gpuResource."""
    spec = obj.get("spec")
    tiers = spec.get("tiers") if isinstance(spec, Mapping) else None
    found = tiers if isinstance(tiers, Mapping) else {}
    return tuple(one for one in ROLES if isinstance(found.get(one), Mapping) and found[one].get("gpuResource") is None)


def _readable_status(stored: Any) -> InferenceServiceStatus:
    """Return the status without unreadable fields, so that another version's field does not discard the others."""
    try:
        return InferenceServiceStatus.model_validate(stored, by_name=False)
    except ValidationError as error:
        if not isinstance(stored, Mapping):
            return InferenceServiceStatus()
        invalid_fields = {str(details["loc"][0]) for details in error.errors() if details["loc"]}
        return InferenceServiceStatus.model_validate(
            {name: stored[name] for name in stored if name not in invalid_fields}, by_name=False
        )
