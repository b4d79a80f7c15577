"""Which requests are let in first when not all can be: classes, tenants, and what becomes of the others.

Problem: when the ready engines are full, somebody must wait, go elsewhere or be refused, and only the platform knows
whom that hurts least.

Idea: requests have a class (how urgent) and a tenant (whose). Both are named in headers; what is written here gives
them their rank and their share. Without a word there is one class, which has the service's promise.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from plimsoll.api.v1alpha1.base import IntOrString, Keyed, Model, Rule, Rules, matching
from plimsoll.api.v1alpha1.names import ServiceName
from plimsoll.api.v1alpha1.scalars import DURATION_LENGTH, decimal, duration
from plimsoll.api.v1alpha1.slo import Slo, Targets
from plimsoll.core import units
from plimsoll.core.admission import ClassPolicy, TenantPolicy

WhenFull = Literal["Hold", "Shed", "Downgrade"]

DEFAULT_CLASS: Final = "default"
DEFAULT_HOLD: Final = "30s"
MAX_CLASSES: Final = 16
MAX_TENANTS: Final = 256
MAX_PRIORITY: Final = 1000
MAX_WEIGHT: Final = 1000
MAX_TOKENS: Final = 1_000_000_000
MAX_HELD: Final = 100_000

_SHARE_FORM: Final = "^([0-8]?[0-9]|90)%$"


class RequestClass(Model):
    """Requests that are alike in how urgent they are."""

    name: Annotated[
        str,
        Field(min_length=1, max_length=63),
        Rules(
            matching(
                "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$",
                "must have only lower-case letters, digits and '-', and begin and end with a letter or digit",
            )
        ),
    ] = Field(
        description="What requests of the class have in the header x-gateway-inference-objective (the chart's "
        f"gateway.classHeader). Those with another name, or none, belong to the class `{DEFAULT_CLASS}`, or else to "
        "the one of the lowest priority."
    )
    priority: int = Field(
        default=0,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Classes of a higher priority are let in first: -1000 to 1000.",
    )
    slo: Targets | None = Field(
        default=None,
        description="Targets in place of all those of spec.slo, whose percentile holds; absent: those of spec.slo.",
    )
    hold_for: (
        Annotated[str, Field(max_length=DURATION_LENGTH), duration("0s", "120s", "must be at most 120 seconds")] | None
    ) = Field(
        default=None,
        description="The longest that a request waits for an engine to start, or where its targets are out of reach "
        f"anyway: 0s to 120s; absent: {DEFAULT_HOLD}, with whenFull: Shed nothing.",
    )
    guaranteed_share: Annotated[
        str, Field(max_length=8), Rules(matching(_SHARE_FORM, "must be a whole percentage from 0% to 90%"))
    ] = Field(
        default="0%",
        description="Share of the work let in that the class gets before another's priority counts, 0% to 90%; at most "
        "100% for all classes together.",
    )
    fill: Annotated[
        str, Field(max_length=8), Rules(matching("^([1-9][0-9]|100)%$", "must be a whole percentage from 10% to 100%"))
    ] = Field(
        default="100%",
        description="How full engines may be for the class to be let in: below 100%, room is left to the other "
        "classes. 10% to 100%.",
    )

    def to_core(self, promise: Slo, when_full: WhenFull) -> ClassPolicy:
        """The class as the core sees it. promise: the service's."""
        return ClassPolicy(
            name=self.name,
            priority=self.priority,
            slo=(self.slo or promise).promised(promise.percentile),
            hold_s=_hold_s(self.hold_for, when_full),
            guaranteed_share=units.parse_percent(self.guaranteed_share) / 100,
            fill=units.parse_percent(self.fill) / 100,
        )


def _hold_s(written: str | None, when_full: WhenFull) -> float:
    return 0.0 if when_full == "Shed" else units.parse_duration(written or DEFAULT_HOLD)


class Tenant(Model):
    """What one tenant may use."""

    name: Annotated[
        str,
        Field(min_length=1, max_length=64),
        Rules(
            matching("^[!-~]*$", "must have only letters, digits and signs of ASCII, without spaces: it is a header")
        ),
    ] = Field(
        description="What the tenant's requests have in the header x-gateway-inference-fairness-id (the chart's "
        "gateway.tenantHeader)."
    )
    weight: int = Field(
        default=1,
        ge=1,
        le=MAX_WEIGHT,
        description="Of its turns while requests of a class wait, where a tenant that is not listed has 1: 1 to 1000.",
    )
    requests_per_second: (
        Annotated[
            int | str,
            IntOrString(16, '5 or "0.5"'),
            Rules(
                decimal(
                    "^[0-9]{1,6}([.][0-9]{1,3})?$",
                    'must be above 0 and below a million with at most 3 decimals, such as 5 or "0.5"',
                    zero=False,
                )
            ),
        ]
        | None
    ) = Field(
        default=None,
        description='Requests a second that it may send through each gateway, such as "0.5": above 0, below a million; '
        "absent: any number.",
    )
    tokens_per_minute: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = Field(
        default=None,
        description=f"Tokens a minute, of prompts and answers, that it may use through each gateway: 1 to "
        f"{MAX_TOKENS}; absent: any number.",
    )

    def to_core(self) -> TenantPolicy:
        rate, tokens = self.requests_per_second, self.tokens_per_minute
        return TenantPolicy(
            weight=float(self.weight),
            requests_per_s=None if rate is None else float(rate),
            tokens_per_min=None if tokens is None else float(tokens),
        )


class Fallback(Model):
    """Another InferenceService of the same namespace."""

    name: ServiceName = Field(description="Name of the InferenceService.")


def _shared_out(classes: tuple[RequestClass, ...]) -> bool:
    return sum(units.parse_percent(one.guaranteed_share) for one in classes) <= 100


class Admission(Model):
    """Which requests are let in first when not all can be, and what becomes of the others."""

    when_full: WhenFull = Field(
        default="Hold",
        description="What becomes of a request that no engine has room for. Hold: it waits while it can still be "
        "served within its targets, and is refused then. Shed: it is refused at once. Downgrade: it goes to the "
        "fallback.",
    )
    fallback: Fallback | None = Field(
        default=None,
        description="With Downgrade: the InferenceService, of the same namespace, that takes what this one cannot.",
    )
    classes: (
        Annotated[
            tuple[RequestClass, ...],
            Field(max_length=MAX_CLASSES, strict=False),
            Keyed(),
            Rules(
                Rule[tuple[RequestClass, ...]](
                    "self.size() > 0", "must have a class; leave it out for one class of all requests", bool
                ),
                Rule[tuple[RequestClass, ...]](
                    f"self.map(one, has(one.guaranteedShare) && one.guaranteedShare.matches('{_SHARE_FORM}')"
                    " ? int(one.guaranteedShare.split('%')[0]) : 0).sum() <= 100",
                    "guaranteedShare of all classes together must be at most 100%",
                    _shared_out,
                ),
            ),
        ]
        | None
    ) = Field(
        default=None,
        description=f"Classes of requests; absent: one, called `{DEFAULT_CLASS}`, of all requests.",
    )
    tenants: Annotated[tuple[Tenant, ...], Field(max_length=MAX_TENANTS, strict=False), Keyed()] = Field(
        default=(), description="Tenants that have another weight than the others, or a quota."
    )
    max_held: int = Field(
        default=1000,
        ge=1,
        le=MAX_HELD,
        description=f"Requests that each gateway lets wait at most: 1 to {MAX_HELD}.",
    )

    rules: ClassVar[tuple[Rule[Admission], ...]] = (
        Rule(
            "self.whenFull != 'Downgrade' || has(self.fallback)",
            "whenFull: Downgrade needs fallback, the InferenceService that takes what this one cannot",
            lambda own: own.when_full != "Downgrade" or own.fallback is not None,
            field=".fallback",
            reason="FieldValueRequired",
        ),
        Rule(
            "self.whenFull == 'Downgrade' || !has(self.fallback)",
            "fallback is only for whenFull: Downgrade",
            lambda own: own.when_full == "Downgrade" or own.fallback is None,
            field=".fallback",
            reason="FieldValueForbidden",
        ),
        Rule(
            "self.whenFull != 'Shed' || !has(self.classes) || !self.classes.exists(one, has(one.holdFor))",
            "whenFull: Shed holds nothing, so no class may have holdFor",
            lambda own: own.when_full != "Shed" or all(one.hold_for is None for one in own.classes or ()),
            field=".classes",
            reason="FieldValueForbidden",
        ),
    )

    def class_policies(self, promise: Slo) -> tuple[ClassPolicy, ...]:
        """The classes as the core sees them, at least one. promise: the service's."""
        if self.classes is None:
            return (ClassPolicy(DEFAULT_CLASS, 0, promise.to_core(), hold_s=_hold_s(None, self.when_full)),)
        return tuple(one.to_core(promise, self.when_full) for one in self.classes)

    def tenant_policies(self) -> dict[str, TenantPolicy]:
        """The tenants that are listed, by name."""
        return {tenant.name: tenant.to_core() for tenant in self.tenants}


OPEN: Final = Admission()  # of a service that says nothing about it
