"""Warnings of the webhook: GPUs that an engine has and does not use, and a chart's parallel sizes. Pure.

The schema refuses sizes in `spec.engine.args` that need more GPUs than a tier has. It does not know the chart's.
"""

from __future__ import annotations

from collections.abc import Sequence

from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.api.v1alpha1.parallelism_rules import is_judged
from plimsoll.engines import parallelism


def gpu_warnings(service: InferenceService, default_args: Sequence[str], gpu_resource: str) -> tuple[str, ...]:
    """Return a sentence for each tier whose GPUs are not those that its engines use.

    default_args: arguments that the chart adds to those of an engine. gpu_resource: what an absent gpuResource is.
    """
    engine = service.spec.engine
    if not engine.contract.launched:
        return ()
    own = () if engine.is_simulated else tuple(default_args)
    found = []
    for role, tier in service.spec.tiers.items():
        if not is_judged(tier, gpu_resource):
            continue
        args = (*own, *engine.args)
        text = parallelism.misfit(tier.gpus, args) or parallelism.waste(tier.gpus, args)
        if text is not None:
            found.append(f"spec.tiers.{role}.gpus is {tier.gpus}{text}; change it, or spec.engine.args")
    return tuple(found)
