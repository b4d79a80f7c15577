"""What the GPUs that a spec names can never do, from data sheets. Pure.

It claims nothing of models and GPUs that `resources.hardware` does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from plimsoll.api.conditions import Condition, ConditionReason, ConditionType
from plimsoll.api.message_text import MAX_QUOTE_CHARS, shorten
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.core.planning.latency_floor import impossibilities
from plimsoll.core.types import Role
from plimsoll.resources import hardware

_ADVICE: Final = "give each engine more GPUs, or set a longer target"


def hardware_limits(service: InferenceService, default_args: Sequence[str] = ()) -> tuple[str, ...]:
    """Return one sentence for each target or model that no engine of a tier can serve, whatever the replica count.

    default_args: arguments of `vllm serve` that the chart adds to those of the service.
    """
    shape = hardware.known_shape(service, default_args)
    if shape is None:
        return ()
    model = service.spec.model.uri.removeprefix(hardware.HUB)
    slo = None if service.spec.slo is None else service.spec.slo.to_core()
    found: list[str] = []
    for role, tier in service.spec.tiers.items():
        gpu = hardware.named_accelerator(tier.pod.node_selector)
        if gpu is not None and tier.gpus > 0:
            found += impossibilities(Role(role), model, shape, gpu, tier.replica_gpus, slo)
    return tuple(found)


def infeasible_by_hardware(limits: tuple[str, ...]) -> Condition:
    """Return SLOInfeasible by data sheets. limits: of `hardware_limits`, at least one."""
    message, brief = f"{'; '.join(limits)}; {_ADVICE}", f"{shorten(limits[0], MAX_QUOTE_CHARS)}; {_ADVICE}"
    return Condition(ConditionType.SLO_INFEASIBLE, True, ConditionReason.INFEASIBLE, message, brief)
