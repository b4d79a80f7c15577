"""`spec.tiers`: one aggregated tier (serve), or a prefill and a decode tier.

The shape of a service cannot change, because a change would interrupt the service.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from plimsoll.api.v1alpha1.api_model import (
    ApiModel,
    IntOrString,
    ValidationRule,
    ValidationRules,
    matching,
    with_values,
)
from plimsoll.api.v1alpha1.pod_overrides import PodOverrides
from plimsoll.core import units

RoleName = Literal["prefill", "decode", "serve"]
ROLES: Final[tuple[RoleName, ...]] = ("prefill", "decode", "serve")
MAX_TIER_REPLICAS: Final = 1000
DEFAULT_GPU_RESOURCE: Final = "nvidia.com/gpu"
UNKNOWN_GPU_RESOURCE: Final = "plimsoll.dev/unknown"  # for readers that do not know the installation's


def _is_int_or_percent(value: int | str) -> bool:
    if isinstance(value, int):
        return 0 <= value <= MAX_TIER_REPLICAS
    try:
        units.parse_percent(value)
    except ValueError:
        return False
    return True


IntOrPercent = Annotated[
    int | str,
    IntOrString(8, "1 or 25%"),
    ValidationRules(
        ValidationRule[int | str](
            f"type(self) == int ? self >= 0 && self <= {MAX_TIER_REPLICAS} : self.matches('^([0-9]{{1,2}}|100)%$')",
            f"must be a number of pods from 0 to {MAX_TIER_REPLICAS}, or a percentage from 0% to 100%",
            _is_int_or_percent,
        )
    ),
]


class RolloutSpec(ApiModel):
    """Rolling update of a tier's pods."""

    max_surge: IntOrPercent = Field(
        default=1, description="Most pods above the desired count (a number or a percentage)."
    )
    max_unavailable: IntOrPercent = Field(
        default=0, description="Most unavailable pods below the desired count (a number or a percentage)."
    )

    rules: ClassVar[tuple[ValidationRule[RolloutSpec], ...]] = (
        ValidationRule(
            "!has(self.maxSurge) || !(string(self.maxSurge) in ['0', '0%', '00%']) ||"
            " (has(self.maxUnavailable) && !(string(self.maxUnavailable) in ['0', '0%', '00%']))",
            "maxSurge and maxUnavailable must not both be 0, because no pod could be replaced",
            lambda own: not (_is_zero(own.max_surge) and _is_zero(own.max_unavailable)),
            field=".maxUnavailable",
        ),
    )


def _is_zero(value: int | str) -> bool:
    return value in (0, "0%", "00%")


def gpu_resource_cel(tier: str) -> str:
    """Return the CEL of what the gpus of the tier at this path count. The chart replaces the default by its own."""
    return f"(has({tier}.gpuResource) ? {tier}.gpuResource : '{DEFAULT_GPU_RESOURCE}')"


def _gpus_not_in(kind: str) -> ValidationRule[EngineTier]:
    gpu = gpu_resource_cel("self")
    path = f"self.pod.resources.{kind}"
    return ValidationRule(
        f"!has(self.pod) || !has(self.pod.resources) || !has({path}) || !({gpu} in {path})",
        "set the tier's gpus instead of GPUs in pod.resources",
        lambda own: (own.gpu_resource or DEFAULT_GPU_RESOURCE) not in getattr(own.pod.resources, kind),
        field=f".pod.resources.{kind}",
        reason="FieldValueForbidden",
    )


def replicas_in_order() -> ValidationRule[Any]:
    """Return the rule that maxReplicas is at least minReplicas, where both are set."""
    advice = ": raise maxReplicas, or lower minReplicas"
    return ValidationRule(
        "!has(self.maxReplicas) || !has(self.minReplicas) || self.maxReplicas >= self.minReplicas",
        f"maxReplicas must not be below minReplicas{advice}",
        lambda own: own.max_replicas is None or own.min_replicas is None or own.max_replicas >= own.min_replicas,
        field=".maxReplicas",
        **with_values(
            "maxReplicas ",
            ("self.maxReplicas", lambda own: own.max_replicas),
            " must not be below minReplicas ",
            ("self.minReplicas", lambda own: own.min_replicas),
            advice,
        ),
    )


class EngineTier(ApiModel):
    """A tier of identical engines."""

    min_replicas: int = Field(
        default=1,
        ge=0,
        le=MAX_TIER_REPLICAS,
        description="Lower bound of the number of engines: 0 to 1000. With 0, the tier scales to zero when idle; a "
        "request wakes it.",
    )
    max_replicas: Annotated[int, Field(ge=1, le=MAX_TIER_REPLICAS)] | None = Field(
        default=None,
        description="Upper bound of the number of engines: 1 to 1000. Absent: minReplicas, or 1 if that is 0. The "
        "count then does not follow the load.",
    )
    gpus: int = Field(default=1, ge=0, le=64, description="GPUs of each pod of an engine: 0 to 64.")
    nodes: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Pods of each engine, one per node: 1 to 16. Above 1 the tier is a LeaderWorkerSet. Cannot change.",
    )
    exclusive_topology: (
        Annotated[
            str,
            Field(max_length=317),
            ValidationRules(
                matching(
                    "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
                    "must be the name of a node label, such as example.com/rack",
                )
            ),
        ]
        | None
    ) = Field(
        default=None,
        description="Node label, such as a rack's. Each engine of several nodes gets one of its values for itself.",
    )
    gpu_resource: (
        Annotated[
            str,
            Field(max_length=253),
            ValidationRules(
                matching(
                    "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
                    "must be an extended resource of the form DOMAIN/NAME, such as nvidia.com/gpu",
                )
            ),
        ]
        | None
    ) = Field(default=None, description="Extended resource that gpus counts. Absent: the chart's default.")
    rollout: RolloutSpec = Field(default=RolloutSpec(), description="Rolling update of the tier's pods.")
    pod: PodOverrides = Field(default=PodOverrides(), description="Overrides of the tier's pods.")

    rules: ClassVar[tuple[ValidationRule[EngineTier], ...]] = (
        replicas_in_order(),
        _gpus_not_in("requests"),
        _gpus_not_in("limits"),
        ValidationRule(
            "!has(self.exclusiveTopology) || (has(self.nodes) && self.nodes > 1)",
            "exclusiveTopology is allowed only with nodes above 1",
            lambda own: own.exclusive_topology is None or own.nodes > 1,
            field=".exclusiveTopology",
            reason="FieldValueForbidden",
        ),
        ValidationRule(
            "(has(self.nodes) ? self.nodes : 1) == (has(oldSelf.nodes) ? oldSelf.nodes : 1)",
            "nodes cannot change: delete the service and create it again, or create a second service",
            None,
            reason="FieldValueForbidden",
        ),
    )

    @property
    def replica_gpus(self) -> int:
        """GPUs of one engine, over all its nodes."""
        return self.gpus * self.nodes

    @property
    def replica_bounds(self) -> tuple[int, int]:
        """Lower and upper bound of the replica count. Without maxReplicas, only a change from 0 to 1 is possible."""
        return self.min_replicas, self.max_replicas or max(1, self.min_replicas)


_SHAPE_HINT = "use either serve alone, or prefill and decode"


# Nested choices of constants: the API server cannot bound the cost of concatenated strings.
_SHAPE_CEL = (
    "!has(self.serve) ? (has(self.prefill) ? 'has prefill alone' :"
    " has(self.decode) ? 'has decode alone' : 'has no tier')"
    " : !has(self.decode) ? 'has prefill and serve'"
    " : !has(self.prefill) ? 'has decode and serve' : 'has prefill, decode and serve'"
)


def _shape_message(own: Any) -> str:
    match [role for role in ROLES if getattr(own, role) is not None]:
        case []:
            shape = "no tier"
        case [only]:
            shape = f"{only} alone"
        case [*others, last]:
            shape = f"{', '.join(others)} and {last}"
    return f"has {shape}: {_SHAPE_HINT}"


def shape_rule() -> ValidationRule[Any]:
    """Return the rule that an object has serve alone, or prefill and decode."""
    return ValidationRule(
        "has(self.prefill) == has(self.decode) && has(self.serve) != has(self.decode)",
        f"must have exactly one shape: {_SHAPE_HINT}",
        lambda own: (own.prefill is None) == (own.decode is None) and (own.serve is None) != (own.decode is None),
        message_cel=f"({_SHAPE_CEL}) + ': {_SHAPE_HINT}'",
        format_message=_shape_message,
    )


def fixed_shape_rule(name: str) -> ValidationRule[Any]:
    """Return the rule that the shape stays. name: of the object."""
    return ValidationRule(
        "has(self.serve) == has(oldSelf.serve)",
        f"the shape of {name} cannot change: delete the service and create it again, or create a second service",
        None,
        reason="FieldValueForbidden",
    )


def _zero_together(role: RoleName, other_role: RoleName) -> ValidationRule[EngineTiers]:
    def holds(own: EngineTiers) -> bool:
        tier, other_tier = getattr(own, role), getattr(own, other_role)
        return tier is None or other_tier is None or tier.min_replicas > 0 or other_tier.min_replicas == 0

    return ValidationRule(
        f"!has(self.{role}) || !has(self.{other_role}) || !has(self.{role}.minReplicas) ||"
        f" self.{role}.minReplicas > 0 || (has(self.{other_role}.minReplicas) && self.{other_role}.minReplicas == 0)",
        f"must be 0 because {role}.minReplicas is 0: both tiers scale to zero together",
        holds,
        field=f".{other_role}.minReplicas",
    )


def _one_node(role: RoleName) -> ValidationRule[EngineTiers]:
    def holds(own: EngineTiers) -> bool:
        tier = getattr(own, role)
        return tier is None or tier.nodes == 1

    return ValidationRule(
        f"!has(self.{role}) || !has(self.{role}.nodes) || self.{role}.nodes == 1",
        "nodes above 1 is allowed only for the tier serve",
        holds,
        field=f".{role}.nodes",
        reason="FieldValueForbidden",
    )


class EngineTiers(ApiModel):
    """Tiers of a service: `serve` alone, or `prefill` and `decode`."""

    prefill: EngineTier | None = Field(
        default=None, description="Engines that compute prompts and transfer the KV cache to decode engines."
    )
    decode: EngineTier | None = Field(
        default=None, description="Engines that receive the KV cache and generate the output."
    )
    serve: EngineTier | None = Field(default=None, description="Engines that do both prefill and decode.")

    rules: ClassVar[tuple[ValidationRule[EngineTiers], ...]] = (
        shape_rule(),
        _zero_together("prefill", "decode"),
        _zero_together("decode", "prefill"),
        _one_node("prefill"),
        _one_node("decode"),
        fixed_shape_rule("tiers"),
    )

    def items(self) -> Iterator[tuple[RoleName, EngineTier]]:
        """Yield the existing tiers with their roles, prefill before decode."""
        for role in ROLES:
            tier: EngineTier | None = getattr(self, role)
            if tier is not None:
                yield role, tier


NO_TIERS: Final = EngineTiers.model_construct()  # of a service with targets
