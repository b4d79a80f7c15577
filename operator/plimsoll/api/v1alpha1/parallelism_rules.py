"""Rules about parallel sizes in `engine.args`: a tier has the GPUs that its engines use."""

from __future__ import annotations

from typing import Any, Final

from plimsoll.api.v1alpha1.api_model import ValidationRule, quote
from plimsoll.api.v1alpha1.engine_features import runtime_in
from plimsoll.api.v1alpha1.tiers import DEFAULT_GPU_RESOURCE, ROLES, gpu_resource_cel
from plimsoll.engines import parallelism
from plimsoll.engines.registry import ENGINES

_LAUNCHED: Final = tuple(name for name, engine in ENGINES.items() if engine.launched)
_SAYS: Final = (
    "parallel sizes must fit the gpus of each tier: their product is at most gpus, and divides gpus if "
    "--tensor-parallel-size is absent; if gpus counts a unit of another resource, set the tier's gpuResource"
)


def misfits(spec: Any) -> tuple[str, ...]:
    """Return a sentence for each tier whose GPUs do not fit the parallel sizes in the arguments."""
    if spec.engine.runtime not in _LAUNCHED:
        return ()
    judged = [(role, tier) for role, tier in spec.tiers.items() if is_judged(tier)]
    found = ((role, tier, parallelism.misfit(tier.gpus, spec.engine.args)) for role, tier in judged)
    return tuple(f"tiers.{role}.gpus is {tier.gpus}{text}" for role, tier, text in found if text)


def is_judged(tier: Any, gpu_resource: str = DEFAULT_GPU_RESOURCE) -> bool:
    """Whether a tier's `gpus` counts the devices of an engine: those of one pod, and whole GPUs.

    gpu_resource: what an absent `gpuResource` is.
    """
    return tier.nodes == 1 and (tier.gpu_resource or gpu_resource) in parallelism.WHOLE_GPUS


_HAS_ONE_GPU: Final = " || ".join(
    f"(has(self.tiers.{role}) && (!has(self.tiers.{role}.gpus) || self.tiers.{role}.gpus == 1)"
    f" && (!has(self.tiers.{role}.nodes) || self.tiers.{role}.nodes == 1)"
    f" && {gpu_resource_cel(f'self.tiers.{role}')} in {list(parallelism.WHOLE_GPUS)})"
    for role in ROLES
)

PARALLELISM_RULES: Final[tuple[ValidationRule[Any], ...]] = (
    ValidationRule(
        # One GPU, which is the default. A product would cost the API server more than it allows for a schema.
        "!has(self.tiers) || !has(self.engine) || !has(self.engine.args) ||"
        f" !({runtime_in('self.engine', _LAUNCHED)}) || !({_HAS_ONE_GPU}) ||"
        f" !self.engine.args.join('\\n').matches({quote(parallelism.SIZE_ABOVE_1)}) ||"
        f" self.engine.args.exists(arg, arg.matches({quote(parallelism.PLACED_BY_USER)}))",
        _SAYS,
        lambda own: not misfits(own),
        field=".engine.args",
        format_message=lambda own: f"{_SAYS}: {'; '.join(misfits(own))}",
    ),
)
