"""What a GPU's data sheet rules out before an engine has run: weights that do not fit, and targets below one step.

Problem: an SLO that no replica count meets shows only after engines have started and were measured.
Idea: each token takes at least one step, and a step reads all weights that a token passes. A target below the time of
that read at the data sheet's bandwidth is missed by every request. Above it nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from plimsoll.core import units
from plimsoll.core.engine_model.roofline import Accelerator, ModelShape, physical_floor
from plimsoll.core.types import Role

_GIB = 1024.0**3
# Targets that a tier alone can miss, by their names in `Slo.targets`.
_TARGETS_BY_ROLE = {
    Role.PREFILL: ("TTFT", "e2e"),
    Role.DECODE: ("TPOT", "e2e", "itl"),
    Role.SERVE: ("TTFT", "TPOT", "e2e", "itl"),
}


class LatencyTarget(NamedTuple):
    """A target in seconds, and the field of the spec that sets it."""

    seconds: float
    field: str


def impossibilities(
    role: Role, model: str, shape: ModelShape, gpu: Accelerator, gpus: int, targets: Mapping[str, LatencyTarget]
) -> Iterator[str]:
    """Yield one sentence for each thing that no engine of a tier can do on `gpus` GPUs.

    model: the name for the sentences. targets: for prompts of any length, by their names in `Slo.targets`. The bounds
    hold for engines that generate one token a step and do not narrow the weights. Nothing is yielded for a number of
    GPUs that does not divide the attention heads.
    """
    count = f"{gpus} GPU of type {gpu.name}" if gpus == 1 else f"{gpus} GPUs of type {gpu.name}"
    if shape.memory_bytes > gpus * gpu.memory_bytes:
        weights, memory = shape.memory_bytes / _GIB, gpus * gpu.memory_bytes / _GIB
        yield (
            f"spec.tiers.{role.value}.gpus: the weights of {model} have {weights:.0f} GiB, and {count} {memory:.0f} GiB"
        )
        return
    if shape.heads % gpus:
        return
    floor = physical_floor(shape, gpu, gpus)
    step_s = floor.base_s + floor.sequence_s
    for name in _TARGETS_BY_ROLE[role]:
        if name in targets and targets[name].seconds < step_s:
            target, step = units.format_seconds(targets[name].seconds), units.format_seconds(step_s, 2)
            yield (
                f"{targets[name].field}: tier {role.value} cannot meet {target}, because reading the weights of"
                f" {model} takes {count} at least {step} (data sheet)"
            )
