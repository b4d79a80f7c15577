"""The part of a manifest that a plan recommends: the engine's arguments, or the tuning that chooses the same."""

from __future__ import annotations

import argparse
from typing import Any

from plimsoll.core.engine_model.roofline import ACCELERATORS
from plimsoll.core.planning.engine_tuning import EngineHardware, TunedArgument, tune_engine
from plimsoll.core.planning.fleet_plan import FleetPlan
from plimsoll.core.planning.known_models import find_shape
from plimsoll.core.types import Role, Unavailable
from plimsoll.engines import vllm


def engine_manifest(plan: FleetPlan, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """`spec.engine` for a plan with one tier; None for two tiers, and where vLLM's own arguments are as good.

    The chunk is part of it if gaps between tokens are limited. `max_num_seqs` is not: admission control bounds the
    batch by the present requests.
    """
    if plan.chosen.disaggregated:
        return None
    settings, words = plan.settings[0], list[str]()
    if plan.request.slo.itl_s is not None or plan.request.itl_limit_s is not None:
        words += [vllm.MAX_NUM_BATCHED_TOKENS, str(settings.max_num_batched_tokens)]
    words += [] if settings.cuda_graphs is None else settings.cuda_graphs.args
    if not words:
        return None
    automatic = _automatic(plan, arguments)
    if not isinstance(automatic, Unavailable) and [word for one in automatic for word in one.args] == words:
        return {"tuning": "Auto"}
    return {"args": words}


def _automatic(plan: FleetPlan, arguments: argparse.Namespace) -> tuple[TunedArgument, ...] | Unavailable:
    """What the operator chooses for the planned engines, with a nodeSelector that names their GPU."""
    if arguments.hardware is not None or arguments.weights is not None or arguments.kv_cache == "fp8":
        return Unavailable("the operator knows data sheets and published weights only")
    try:
        shape = find_shape(arguments.model)
    except ValueError:
        return Unavailable("the operator knows the model by no name")
    hardware = EngineHardware(shape, ACCELERATORS[arguments.gpu], plan.chosen.machines[0].gpus)
    return tune_engine(Role.SERVE, hardware, plan.request.slo, ())


def manifest_lines(manifest: dict[str, Any] | None) -> list[str]:
    """The part as one line of YAML, after an empty line."""
    if manifest is None:
        return []
    if "tuning" in manifest:
        return ["", "manifest: engine: {tuning: Auto}, with a nodeSelector that names the GPU"]
    return ["", f"manifest: engine: {{args: [{', '.join(manifest['args'])}]}}"]
