"""What measurement contradicts in the model of a tier, with the measured and the predicted value and what to check.

`explain` and the condition ModelMismatch state the same evidence.
"""

from __future__ import annotations

from typing import Final

from plimsoll.core.autoscaling.observations import Mismatch, SizingResult
from plimsoll.core.engine_model.calibration.estimates import step_time_ratio
from plimsoll.core.engine_model.calibration.posterior_model import Posterior
from plimsoll.core.engine_model.measured_limits import MeasuredLimits
from plimsoll.core.engine_model.step_time import EngineLimits
from plimsoll.core.units import format_seconds

_SLOW_STEPS: Final = 1.25  # times the predicted time


def speed_mismatches(posterior: Posterior | None) -> tuple[Mismatch, ...]:
    """Return how much longer the steps of engines take than their prior predicts, if that is much."""
    ratio = None if posterior is None else step_time_ratio(posterior)
    if ratio is None or ratio < _SLOW_STEPS:
        return ()
    evidence = f"steps of the engines take {ratio:.1f} times as long as predicted before they were measured"
    return (Mismatch(evidence, "Check clocks and power limit of the GPUs, and what else runs on them"),)


def limits_mismatches(measured: MeasuredLimits, announced: EngineLimits | None) -> tuple[Mismatch, ...]:
    """Return what engines hold less than they announced."""
    found: list[Mismatch] = []
    if announced is None:
        return ()
    limits = measured.apply(announced)
    if limits.max_sequences < announced.max_sequences:
        evidence = (
            f"an engine runs {limits.max_sequences} sequences at once while others wait, "
            f"announced {announced.max_sequences} sequences"
        )
        found.append(Mismatch(evidence, "Check --max-num-seqs of the engine"))
    if limits.kv_tokens < announced.kv_tokens:
        evidence = (
            f"the KV cache of an engine holds {limits.kv_tokens:,} tokens by its use, "
            f"announced {announced.kv_tokens:,} tokens"
        )
        found.append(Mismatch(evidence, "Check what else uses the memory of its GPUs"))
    return tuple(found)


def sizing_mismatches(sizing: SizingResult) -> tuple[Mismatch, ...]:
    """Return all that corrects this sizing."""
    found = list(sizing.engine_mismatches)
    correction = f"capacity correction {sizing.capacity_correction:.2f}, because"
    if sizing.itl_limit is not None:
        itl_s, target_s = sizing.itl_limit.itl_s, sizing.itl_limit.target_s
        evidence = f"{correction} p99 itl was {format_seconds(itl_s)}, target {format_seconds(target_s)} (1 predicted)"
        found.append(Mismatch(evidence, "Check --max-num-batched-tokens and the load of the engine's host"))
    elif sizing.capacity_correction > 1.0:
        evidence = f"{correction} requests were rejected with all replicas ready (1 predicted)"
        found.append(Mismatch(evidence, "Check that the engines run as announced"))
    if sizing.ttft_offset_s:
        evidence = (
            f"first tokens take {format_seconds(sizing.ttft_offset_s)} longer than the model predicts, by the share of "
            "them that was late (0 s predicted)"
        )
        found.append(Mismatch(evidence, "Check CPU and network of the engine's host"))
    return tuple(found)
