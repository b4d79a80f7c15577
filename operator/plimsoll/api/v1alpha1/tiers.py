"""The tiers: how many engines of which kind.

Either one aggregated tier (serve), or a prefill and a decode tier that pass the KV cache on. The shape of a service
cannot change: there is no way from one to the other without a gap.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Final, Literal

from pydantic import Field

from plimsoll.api.v1alpha1.base import IntOrString, Model, Rule, Rules, matching
from plimsoll.api.v1alpha1.pod import Pod
from plimsoll.core import units

Role = Literal["prefill", "decode", "serve"]
ROLES: Final[tuple[Role, ...]] = ("prefill", "decode", "serve")
MAX_REPLICAS: Final = 1000
DEFAULT_GPU_RESOURCE: Final = "nvidia.com/gpu"


def _is_int_or_percent(value: int | str) -> bool:
    if isinstance(value, int):
        return 0 <= value <= MAX_REPLICAS
    try:
        units.parse_percent(value)
    except ValueError:
        return False
    return True


IntOrPercent = Annotated[
    int | str,
    IntOrString(8, "1 or 25%"),
    Rules(
        Rule[int | str](
            f"type(self) == int ? self >= 0 && self <= {MAX_REPLICAS} : self.matches('^([0-9]{{1,2}}|100)%$')",
            f"must be a number of pods from 0 to {MAX_REPLICAS}, or a percentage from 0% to 100%",
            _is_int_or_percent,
        )
    ),
]


class Rollout(Model):
    """How a new revision replaces the old one."""

    max_surge: IntOrPercent = Field(default=1, description="How many pods more than wanted (a number or a percentage).")
    max_unavailable: IntOrPercent = Field(
        default=0, description="How many pods fewer than wanted (a number or a percentage)."
    )

    rules: ClassVar[tuple[Rule[Rollout], ...]] = (
        Rule(
            "!(string(self.maxSurge) in ['0', '0%', '00%'] && string(self.maxUnavailable) in ['0', '0%', '00%'])",
            "maxSurge and maxUnavailable must not both be 0: no pod could ever be replaced",
            lambda own: not (_is_zero(own.max_surge) and _is_zero(own.max_unavailable)),
            field=".maxUnavailable",
        ),
    )


def _is_zero(value: int | str) -> bool:
    return value in (0, "0%", "00%")


def _gpus_not_in(kind: str) -> Rule[Tier]:
    gpu = f"(has(self.gpuResource) ? self.gpuResource : '{DEFAULT_GPU_RESOURCE}')"
    path = f"self.pod.resources.{kind}"
    return Rule(
        f"!has(self.pod) || !has(self.pod.resources) || !has({path}) || !({gpu} in {path})",
        "GPUs are asked for with the tier's gpus, not in pod.resources",
        lambda own: (own.gpu_resource or DEFAULT_GPU_RESOURCE) not in getattr(own.pod.resources, kind),
        field=f".pod.resources.{kind}",
        reason="FieldValueForbidden",
    )


class Tier(Model):
    """A tier: engines that are all alike."""

    min_replicas: int = Field(
        default=1,
        ge=0,
        le=MAX_REPLICAS,
        description="Engines that always run, 0 to 1000; 0: none while nobody asks, and a request wakes the tier.",
    )
    max_replicas: Annotated[int, Field(ge=1, le=MAX_REPLICAS)] | None = Field(
        default=None,
        description="Engines that run at most: up to here replicas follow the load; absent: minReplicas, so that they "
        "never do, and 1 where that is 0. 1 to 1000.",
    )
    gpus: int = Field(default=1, ge=0, le=64, description="GPUs of each engine.")
    gpu_resource: (
        Annotated[
            str,
            Field(max_length=253),
            Rules(
                matching(
                    "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
                    "must be an extended resource: DOMAIN/NAME, such as nvidia.com/gpu",
                )
            ),
        ]
        | None
    ) = Field(default=None, description="Extended resource that GPUs are requested as; absent: the chart's.")
    rollout: Rollout = Field(default=Rollout(), description="How a new revision replaces the old one.")
    pod: Pod = Field(default=Pod(), description="Overrides of the tier's pods.")

    rules: ClassVar[tuple[Rule[Tier], ...]] = (
        Rule(
            "!has(self.maxReplicas) || self.maxReplicas >= self.minReplicas",
            "maxReplicas must not be below minReplicas",
            lambda own: own.max_replicas is None or own.max_replicas >= own.min_replicas,
            field=".maxReplicas",
        ),
        _gpus_not_in("requests"),
        _gpus_not_in("limits"),
    )

    @property
    def bounds(self) -> tuple[int, int]:
        """Least and most replicas; without maxReplicas a tier never grows on its own, but from zero to one."""
        return self.min_replicas, self.max_replicas or max(1, self.min_replicas)


_SHAPES = "write either serve alone, or prefill and decode"


# Nested choices of constants: the API server's cost estimate has no bound for texts that are put together.
_FOUND_CEL = (
    "!has(self.serve) ? (has(self.prefill) ? 'has prefill alone' :"
    " has(self.decode) ? 'has decode alone' : 'has no tier')"
    " : !has(self.decode) ? 'has prefill and serve'"
    " : !has(self.prefill) ? 'has decode and serve' : 'has prefill, decode and serve'"
)


def _found(own: Tiers) -> str:
    match [role for role in ROLES if getattr(own, role) is not None]:
        case []:
            found = "no tier"
        case [one]:
            found = f"{one} alone"
        case [*most, last]:
            found = f"{', '.join(most)} and {last}"
    return f"has {found}: {_SHAPES}"


def _zero_together(resting: Role, running: Role) -> Rule[Tiers]:
    def holds(own: Tiers) -> bool:
        one, other = getattr(own, resting), getattr(own, running)
        return one is None or other is None or one.min_replicas > 0 or other.min_replicas == 0

    return Rule(
        f"!has(self.{resting}) || !has(self.{running}) || self.{resting}.minReplicas > 0 ||"
        f" self.{running}.minReplicas == 0",
        f"must be 0 as {resting}.minReplicas is: both tiers go to zero together, or neither does",
        holds,
        field=f".{running}.minReplicas",
    )


class Tiers(Model):
    """The tiers of a service: `serve` alone, or `prefill` and `decode`."""

    prefill: Tier | None = Field(default=None, description="Engines that read prompts and pass their KV cache on.")
    decode: Tier | None = Field(default=None, description="Engines that take a prompt's KV cache and write the answer.")
    serve: Tier | None = Field(default=None, description="Engines that do both.")

    rules: ClassVar[tuple[Rule[Tiers], ...]] = (
        Rule(
            "has(self.prefill) == has(self.decode) && has(self.serve) != has(self.decode)",
            f"must have exactly one shape: {_SHAPES}",
            lambda own: (own.prefill is None) == (own.decode is None) and (own.serve is None) != (own.decode is None),
            message_cel=f"({_FOUND_CEL}) + ': {_SHAPES}'",
            say=_found,
        ),
        _zero_together("prefill", "decode"),
        _zero_together("decode", "prefill"),
        Rule(
            "has(self.serve) == has(oldSelf.serve)",
            "the shape of tiers cannot change: delete the service and make it anew, or make a second one beside it",
            None,
            reason="FieldValueForbidden",
        ),
    )

    def items(self) -> Iterator[tuple[Role, Tier]]:
        """The tiers that are there, by role; prefill before decode."""
        for role in ROLES:
            tier: Tier | None = getattr(self, role)
            if tier is not None:
                yield role, tier
