"""`spec.targets`: engines that exist and that something else manages, in place of `spec.tiers`.

A target is any object with a `scale` subresource. Plimsoll sizes it from the metrics of its pods. It writes nothing but
its replica count, and that only in mode Auto. A target with a port takes the requests of gateways, and then these
report the demand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Final

from pydantic import Field

from plimsoll.api.v1alpha1.api_model import ApiModel, ValidationRule, ValidationRules, matching
from plimsoll.api.v1alpha1.tiers import (
    MAX_TIER_REPLICAS,
    ROLES,
    RoleName,
    fixed_shape_rule,
    replicas_in_order,
    shape_rule,
)

DEFAULT_METRICS_PORT: Final = 8000
MAX_SELECTOR_CHARS: Final = 1024

_NAME_PATTERN: Final = "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"


class ScaleTargetRef(ApiModel):
    """An object with a `scale` subresource in the service's namespace."""

    api_version: Annotated[
        str,
        Field(min_length=1, max_length=317),
        ValidationRules(
            matching("^([a-z0-9][-a-z0-9.]*/)?v[0-9][a-z0-9]*$", "must be GROUP/VERSION or VERSION, such as apps/v1")
        ),
    ] = Field(description="API version, such as apps/v1.")
    kind: Annotated[
        str,
        Field(min_length=1, max_length=63),
        ValidationRules(matching("^[A-Z][A-Za-z0-9]*$", "must be a kind, such as Deployment")),
    ] = Field(description="Kind, such as Deployment, StatefulSet or LeaderWorkerSet.")
    name: Annotated[
        str,
        Field(min_length=1, max_length=253),
        ValidationRules(matching(_NAME_PATTERN, "must be the name of an object: lower-case letters, digits, '-', '.'")),
    ] = Field(description="Name of the object.")

    @property
    def label(self) -> str:
        """KIND NAME, for messages."""
        return f"{self.kind} {self.name}"


class EngineTarget(ApiModel):
    """Existing engines of one role."""

    scale_target_ref: ScaleTargetRef = Field(description="The object whose `scale` subresource has the replica count.")
    pod_selector: (
        Annotated[
            str,
            Field(min_length=1, max_length=MAX_SELECTOR_CHARS),
            ValidationRules(
                matching(
                    "^[A-Za-z0-9][-A-Za-z0-9_./]*( *(=|==|!=) *[-A-Za-z0-9_.]*)?"
                    "( *, *[A-Za-z0-9][-A-Za-z0-9_./]*( *(=|==|!=) *[-A-Za-z0-9_.]*)?)*$",
                    "must be a label selector of equalities, such as app=llm,tier=serve",
                )
            ),
        ]
        | None
    ) = Field(
        default=None,
        description="Label selector of the pods that answer at metricsPort, such as app=llm,tier=serve. Absent: "
        "the selector in the status of the `scale` subresource. Of a group of pods, select the one with the API "
        "server.",
    )
    metrics_port: int = Field(
        default=DEFAULT_METRICS_PORT,
        ge=1,
        le=65535,
        description="Port of the pods at which the engine serves `/metrics`: 1 to 65535.",
    )
    port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None,
        description="Port of the pods at which the engine serves the OpenAI API, and model.name in it: 1 to 65535. "
        "Gateways send the requests of the service to it. Absent: gateways send none, and the engines' counters are "
        "the demand.",
    )
    min_replicas: int = Field(
        default=1,
        ge=1,
        le=MAX_TIER_REPLICAS,
        description="Lower bound of the replica count: 1 to 1000. Targets do not scale to zero.",
    )
    max_replicas: int = Field(
        ge=1,
        le=MAX_TIER_REPLICAS,
        description="Upper bound of the replica count: 1 to 1000.",
    )
    gpus: int = Field(
        default=1,
        ge=0,
        le=64,
        description="GPUs of each replica: 0 to 64. Of a group of pods, those of the whole group.",
    )

    rules: ClassVar[tuple[ValidationRule[EngineTarget], ...]] = (replicas_in_order(),)

    @property
    def replica_gpus(self) -> int:
        """GPUs of one replica."""
        return self.gpus

    @property
    def replica_bounds(self) -> tuple[int, int]:
        """Lower and upper bound of the replica count."""
        return self.min_replicas, self.max_replicas


_OTHER_OBJECT: Final = " || ".join(
    f"self.prefill.scaleTargetRef.{name} != self.decode.scaleTargetRef.{name}"
    for name in ("name", "kind", "apiVersion.find('^.*/')")  # the group: an object has several versions
)


def _not_routed(role: RoleName) -> ValidationRule[EngineTargets]:
    """Return a rule against the port of a pair: only the pair's own router knows how its engines exchange KV caches."""

    def holds(own: EngineTargets) -> bool:
        target = getattr(own, role)
        return target is None or target.port is None

    return ValidationRule(
        f"!has(self.{role}) || !has(self.{role}.port)",
        "is not allowed for prefill and decode: gateways cannot route to pairs that something else manages. Remove it,"
        " and let clients keep their route",
        holds,
        field=f".{role}.port",
        reason="FieldValueForbidden",
    )


class EngineTargets(ApiModel):
    """Targets of a service: `serve` alone, or `prefill` and `decode`."""

    prefill: EngineTarget | None = Field(
        default=None, description="Engines that compute prompts and transfer the KV cache to decode engines."
    )
    decode: EngineTarget | None = Field(
        default=None, description="Engines that receive the KV cache and generate the output."
    )
    serve: EngineTarget | None = Field(default=None, description="Engines that do both prefill and decode.")

    rules: ClassVar[tuple[ValidationRule[EngineTargets], ...]] = (
        shape_rule(),
        fixed_shape_rule("targets"),
        _not_routed("prefill"),
        _not_routed("decode"),
        ValidationRule(
            f"!has(self.prefill) || !has(self.decode) || {_OTHER_OBJECT}",
            "must not be the object of prefill: each role has a replica count of its own",
            lambda own: own.prefill is None or own.decode is None or _ref(own.prefill) != _ref(own.decode),
            field=".decode.scaleTargetRef",
        ),
    )

    @property
    def take_requests(self) -> bool:
        """Whether gateways send requests to the engines."""
        return self.port is not None

    @property
    def port(self) -> int | None:
        """The port at which the engines take requests of gateways; None if they take none."""
        return None if self.serve is None else self.serve.port

    @property
    def metrics_ports(self) -> str:
        """The ports at which the engines report, for messages."""
        ports = {target.metrics_port: role for role, target in self.items()}
        if len(ports) == 1:
            return str(next(iter(ports)))
        return " and ".join(f"{port} ({role})" for port, role in ports.items())

    def items(self) -> Iterator[tuple[RoleName, EngineTarget]]:
        """Yield the targets with their roles, prefill before decode."""
        for role in ROLES:
            target: EngineTarget | None = getattr(self, role)
            if target is not None:
                yield role, target


def _ref(target: EngineTarget) -> tuple[str, str, str]:
    ref = target.scale_target_ref
    return ref.api_version.rpartition("/")[0], ref.kind, ref.name
