"""`spec.admission`: request classes, tenants, and the action for requests that exceed the ready capacity.

Problem: when the ready engines are full, some requests must be queued, sent to a fallback or rejected. Only the
platform knows which of them matter least.

Idea: each request has a class (urgency) and a tenant (owner), both named in headers. This spec gives classes their
priority and share, and tenants their weight and quota. Without it, one class has the service's SLO.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from plimsoll.api.v1alpha1.api_model import (
    ApiModel,
    IntOrString,
    MapList,
    ValidationRule,
    ValidationRules,
    matching,
    with_values,
)
from plimsoll.api.v1alpha1.request_limits import RequestLimitsSpec
from plimsoll.api.v1alpha1.scalars import MAX_DURATION_CHARS, decimal_rule, duration_rules
from plimsoll.api.v1alpha1.service_name import ServiceName
from plimsoll.api.v1alpha1.slo import LatencyTargets, SloSpec
from plimsoll.core import units
from plimsoll.core.admission.cost_model import DEFAULT_CLASS, ClassPolicy
from plimsoll.core.admission.quota import TenantPolicy

WhenFull = Literal["Queue", "Shed", "Downgrade"]

DEFAULT_MAX_QUEUE_TIME: Final = "30s"
MAX_CLASSES: Final = 16
MAX_TENANTS: Final = 256
MAX_PRIORITY: Final = 1000
MAX_WEIGHT: Final = 1000
MAX_TOKENS_PER_MINUTE: Final = 1_000_000_000
MAX_QUEUED_LIMIT: Final = 100_000

_SHARE_PATTERN: Final = "^([0-8]?[0-9]|90)%$"


class RequestClass(ApiModel):
    """Requests of one urgency: their priority, targets and share of the capacity."""

    name: Annotated[
        str,
        Field(min_length=1, max_length=63),
        ValidationRules(
            matching(
                "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
                "must have only lower-case letters, digits and '-', and begin and end with a letter or digit",
            )
        ),
    ] = Field(
        description="Name of the class. A request has the class of its API key, else of the header gateway.classHeader "
        "if gateway.trustIdentityHeaders is set. If unknown or none, it has the class "
        f"`{DEFAULT_CLASS}`, else that of the lowest priority."
    )
    priority: int = Field(
        default=0,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Classes with a higher priority are admitted first: -1000 to 1000.",
    )
    slo: LatencyTargets | None = Field(
        default=None,
        description="Latency targets that replace those of spec.slo; its percentile still applies. They size the tiers "
        "unless the class is one of the smallest, which together are within what the percentile lets miss. Absent: the "
        "targets of spec.slo.",
    )
    max_queue_time: (
        Annotated[
            str, Field(max_length=MAX_DURATION_CHARS), duration_rules("0s", "120s", "must be at most 120 seconds")
        ]
        | None
    ) = Field(
        default=None,
        description="Longest time in the queue for a request that waits for an engine to start, or that cannot meet "
        f"its targets: 0s to 120s. Absent: {DEFAULT_MAX_QUEUE_TIME}, or 0s with whenFull: Shed.",
    )
    guaranteed_share: Annotated[
        str, Field(max_length=8), ValidationRules(matching(_SHARE_PATTERN, "must be a whole percentage from 0% to 90%"))
    ] = Field(
        default="0%",
        description="Share of the admitted work that the class gets before the priority of other classes counts: 0% to "
        "90%. The shares of all classes add up to at most 100%.",
    )
    max_utilization: Annotated[
        str,
        Field(max_length=8),
        ValidationRules(matching("^([1-9][0-9]|100)%$", "must be a whole percentage from 10% to 100%")),
    ] = Field(
        default="100%",
        description="Engine utilization up to which requests of the class are admitted: 10% to 100%.",
    )
    request_limits: RequestLimitsSpec | None = Field(
        default=None,
        description="Limits of each request of the class. A limit that is absent here is that of spec.requestLimits.",
    )

    def to_core(self, slo: SloSpec, when_full: WhenFull) -> ClassPolicy:
        """Convert to the core type; `slo` is the service's SLO, `when_full` the service's action."""
        return ClassPolicy(
            name=self.name,
            priority=self.priority,
            slo=(self.slo or slo).to_core_slo(slo.percentile),
            max_queue_time_s=_max_queue_s(self.max_queue_time, when_full),
            guaranteed_share=units.parse_percent(self.guaranteed_share) / 100,
            max_utilization=units.parse_percent(self.max_utilization) / 100,
        )


def _max_queue_s(max_queue_time: str | None, when_full: WhenFull) -> float:
    return 0.0 if when_full == "Shed" else units.parse_duration(max_queue_time or DEFAULT_MAX_QUEUE_TIME)


class Tenant(ApiModel):
    """Weight and quota of one tenant."""

    name: Annotated[
        str,
        Field(min_length=1, max_length=64),
        ValidationRules(
            matching(
                "^[!-~]*$", "must have only printable ASCII characters without spaces, because it is a header value"
            )
        ),
    ] = Field(
        description="Name of the tenant. A request has the tenant of its API key, else of the header "
        "gateway.tenantHeader if gateway.trustIdentityHeaders is set."
    )
    weight: int = Field(
        default=1,
        ge=1,
        le=MAX_WEIGHT,
        description="Weight of the tenant in fair queueing within a class: 1 to 1000. A tenant that is not listed "
        "has weight 1.",
    )
    requests_per_second: (
        Annotated[
            int | str,
            IntOrString(16, '5 or "0.5"'),
            ValidationRules(
                decimal_rule(
                    "^[0-9]{1,6}([.][0-9]{1,3})?$",
                    'must be above 0 and below a million with at most 3 decimals, such as 5 or "0.5"',
                    allow_zero=False,
                )
            ),
        ]
        | None
    ) = Field(
        default=None,
        description='Rate limit of the tenant in requests per second, over all gateways, such as "0.5": above 0, '
        "below a "
        "million. Absent: no limit.",
    )
    tokens_per_minute: Annotated[int, Field(ge=1, le=MAX_TOKENS_PER_MINUTE)] | None = Field(
        default=None,
        description="Quota of the tenant in prompt and output tokens per minute, over all gateways: 1 to "
        f"{MAX_TOKENS_PER_MINUTE}. Absent: no limit.",
    )

    def to_core(self) -> TenantPolicy:
        rate, tokens = self.requests_per_second, self.tokens_per_minute
        return TenantPolicy(
            weight=float(self.weight),
            requests_per_s=None if rate is None else float(rate),
            tokens_per_min=None if tokens is None else float(tokens),
        )


class FallbackRef(ApiModel):
    """Another InferenceService in the same namespace."""

    name: ServiceName = Field(description="Name of the InferenceService.")


_TOTAL_SHARE: Final = (
    f"self.map(one, has(one.guaranteedShare) && one.guaranteedShare.matches('{_SHARE_PATTERN}')"
    " ? int(one.guaranteedShare.split('%')[0]) : 0).sum()"
)


def _total_share(classes: tuple[RequestClass, ...]) -> int:
    return round(sum(units.parse_percent(one.guaranteed_share) for one in classes))


class AdmissionSpec(ApiModel):
    """Admission control: request classes, tenants, and the action for requests that exceed the capacity."""

    when_full: WhenFull = Field(
        default="Queue",
        description="Action for a request that exceeds the capacity of the ready engines. Queue: the gateway queues it "
        "while it can still meet its targets, then rejects it. Shed: the gateway rejects it at once. Downgrade: the "
        "gateway sends it to the fallback.",
    )
    fallback: FallbackRef | None = Field(
        default=None,
        description="With whenFull: Downgrade, the InferenceService in the same namespace that serves the excess "
        "requests.",
    )
    classes: (
        Annotated[
            tuple[RequestClass, ...],
            Field(max_length=MAX_CLASSES, strict=False),
            MapList(),
            ValidationRules(
                ValidationRule[tuple[RequestClass, ...]](
                    "self.size() > 0",
                    "must have at least one class; omit the field for a single class of all requests",
                    bool,
                ),
                ValidationRule[tuple[RequestClass, ...]](
                    f"{_TOTAL_SHARE} <= 100",
                    "the guaranteedShare values of all classes must add up to at most 100%: lower some of them",
                    lambda classes: _total_share(classes) <= 100,
                    **with_values(
                        "the guaranteedShare values of all classes must add up to at most 100%, not ",
                        (_TOTAL_SHARE, _total_share),
                        "%: lower some of them",
                    ),
                ),
            ),
        ]
        | None
    ) = Field(
        default=None,
        description=f"Request classes. Absent: one class, `{DEFAULT_CLASS}`, for all requests.",
    )
    tenants: Annotated[tuple[Tenant, ...], Field(max_length=MAX_TENANTS, strict=False), MapList()] = Field(
        default=(), description="Tenants with a quota or with a weight other than 1."
    )
    max_queued: int = Field(
        default=1000,
        ge=1,
        le=MAX_QUEUED_LIMIT,
        description=f"Longest queue of the service, in requests: 1 to {MAX_QUEUED_LIMIT}.",
    )

    rules: ClassVar[tuple[ValidationRule[AdmissionSpec], ...]] = (
        ValidationRule(
            "!has(self.whenFull) || self.whenFull != 'Downgrade' || has(self.fallback)",
            "whenFull: Downgrade needs fallback, the InferenceService that serves the excess requests",
            lambda own: own.when_full != "Downgrade" or own.fallback is not None,
            field=".fallback",
            reason="FieldValueRequired",
        ),
        ValidationRule(
            "!has(self.fallback) || (has(self.whenFull) && self.whenFull == 'Downgrade')",
            "fallback is allowed only with whenFull: Downgrade",
            lambda own: own.when_full == "Downgrade" or own.fallback is None,
            field=".fallback",
            reason="FieldValueForbidden",
        ),
        ValidationRule(
            "!has(self.whenFull) || self.whenFull != 'Shed' || !has(self.classes) ||"
            " !self.classes.exists(one, has(one.maxQueueTime))",
            "whenFull: Shed queues no request, so no class may have maxQueueTime",
            lambda own: own.when_full != "Shed" or all(one.max_queue_time is None for one in own.classes or ()),
            field=".classes",
            reason="FieldValueForbidden",
        ),
    )

    def class_policies(self, slo: SloSpec) -> tuple[ClassPolicy, ...]:
        """Convert to the core types, at least one; `slo` is the service's SLO."""
        if self.classes is None:
            return (ClassPolicy(DEFAULT_CLASS, 0, slo.to_core(), max_queue_time_s=_max_queue_s(None, self.when_full)),)
        return tuple(one.to_core(slo, self.when_full) for one in self.classes)

    def tenant_policies(self) -> dict[str, TenantPolicy]:
        """Return the policies of the listed tenants by name."""
        return {tenant.name: tenant.to_core() for tenant in self.tenants}


DEFAULT_ADMISSION: Final = AdmissionSpec()  # of a service without spec.admission
