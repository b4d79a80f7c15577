"""The part of a manifest that a plan recommends: the engine's arguments, or the tuning that chooses the same."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from plimsoll.api.v1alpha1.adapters import DEFAULT_MAX_LORA_RANK, LoraRank
from plimsoll.core.engine_model.roofline import ACCELERATORS, LoraSlots
from plimsoll.core.planning.engine_tuning import EngineHardware, TunedArgument, tune_engine
from plimsoll.core.planning.fleet_plan import FleetPlan
from plimsoll.core.planning.known_models import find_shape
from plimsoll.core.routing.model_names import MAX_ADAPTERS
from plimsoll.core.types import Role, Unavailable
from plimsoll.engines import vllm
from plimsoll.sim.errors import BadInput


def lora_slots(arguments: argparse.Namespace) -> LoraSlots | None:
    """The places of adapters that the options ask for. Raises BadInput."""
    loras, rank = arguments.max_loras, arguments.max_lora_rank
    if loras is None:
        if rank is not None:
            raise BadInput("--max-lora-rank needs --max-loras")
        return None
    if not 1 <= loras <= MAX_ADAPTERS:
        raise BadInput(f"--max-loras: {loras} must be from 1 to {MAX_ADAPTERS}")
    if rank is not None and rank not in get_args(LoraRank):
        raise BadInput(f"--max-lora-rank: {rank} must be one of {', '.join(map(str, get_args(LoraRank)))}")
    return LoraSlots(loras, rank or DEFAULT_MAX_LORA_RANK)


def engine_manifest(plan: FleetPlan, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """`spec.engine` for a plan; None where the defaults are as good."""
    lora = lora_slots(arguments)
    bounds = {} if lora is None else {"lora": {"maxLoras": lora.loras, "maxLoraRank": lora.rank}}
    return {**bounds, **_tuning(plan, arguments)} or None


def _tuning(plan: FleetPlan, arguments: argparse.Namespace) -> dict[str, Any]:
    """The part that tunes the engines of one tier; empty for two tiers, and where vLLM's own arguments are as good.

    The chunk is part of it if gaps between tokens are limited. `max_num_seqs` is not: admission control bounds the
    batch by the present requests.
    """
    if plan.chosen.disaggregated:
        return {}
    settings, words = plan.settings[0], list[str]()
    if plan.request.slo.itl_s is not None or plan.request.itl_limit_s is not None:
        words += [vllm.MAX_NUM_BATCHED_TOKENS, str(settings.max_num_batched_tokens)]
    words += [] if settings.cuda_graphs is None else settings.cuda_graphs.args
    if not words:
        return {}
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
    parts = []
    if "lora" in manifest:
        parts.append(f"lora: {{{', '.join(f'{key}: {value}' for key, value in manifest['lora'].items())}}}")
    parts += ["tuning: Auto"] * ("tuning" in manifest)
    parts += [f"args: [{', '.join(manifest['args'])}]"] if "args" in manifest else []
    selector = ", with a nodeSelector that names the GPU" if "tuning" in manifest else ""
    lines = ["", f"manifest: engine: {{{', '.join(parts)}}}{selector}"]
    if "lora" in manifest:
        lines.append("Step times are without adapters: LoRA halved the speed of an 8B on one H200.")
    return lines
