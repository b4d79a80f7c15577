"""What the GPUs that a spec names can never do, from data sheets. Pure.

It claims nothing of models and GPUs that `resources.hardware` does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from plimsoll.api.conditions import Condition, ConditionReason, ConditionType
from plimsoll.api.message_text import MAX_QUOTE_CHARS, shorten
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.core.planning.latency_floor import LatencyTarget, impossibilities
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
    targets = _tightest_targets(service)
    found: list[str] = []
    for role, tier in service.spec.tiers.items():
        gpu = hardware.named_accelerator(tier.pod.node_selector)
        if gpu is not None and tier.gpus > 0:
            found += impossibilities(Role(role), model, shape, gpu, tier.replica_gpus, targets)
    return tuple(found)


def _tightest_targets(service: InferenceService) -> Mapping[str, LatencyTarget]:
    """Return the tightest target of each kind that requests have: of their class, else of spec.slo.

    With ttftPerKToken, no TTFT target holds for prompts of all lengths.
    """
    if service.spec.slo is None:
        return {}
    of_service = service.spec.slo.to_core()
    classes = () if service.spec.admission is None else service.spec.admission.classes or ()
    own = [(f"spec.admission.classes[{one.name}].slo", one.slo) for one in classes if one.slo is not None]
    slos = [(field, targets.to_core_slo(service.spec.slo.percentile)) for field, targets in own]
    if len(own) < max(1, len(classes)):
        slos.insert(0, ("spec.slo", of_service))
    found = [] if of_service.itl_s is None else [("itl", LatencyTarget(of_service.itl_s, "spec.slo.itl"))]
    for field, slo in slos:
        for name, seconds in slo.targets:
            if seconds is not None and not (name == "TTFT" and slo.ttft_per_1k_tokens_s > 0):
                found.append((name, LatencyTarget(seconds, f"{field}.{name.lower()}")))
    return dict(sorted(found, key=lambda one: one[1].seconds, reverse=True))  # of one name, the last one stays


def infeasible_by_hardware(limits: tuple[str, ...]) -> Condition:
    """Return SLOInfeasible by data sheets. limits: of `hardware_limits`, at least one."""
    message, brief = f"{'; '.join(limits)}; {_ADVICE}", f"{shorten(limits[0], MAX_QUOTE_CHARS)}; {_ADVICE}"
    return Condition(ConditionType.SLO_INFEASIBLE, True, ConditionReason.INFEASIBLE, message, brief)
