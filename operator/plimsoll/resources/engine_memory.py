"""Speculative decoding and KV offloading as a pod has them: arguments, and the memory that a pod needs for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from plimsoll.api.contract import engine_contract
from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.api.v1alpha1.model import location_of
from plimsoll.core import units
from plimsoll.engines import vllm
from plimsoll.engines.parallelism import data_parallel_size

Object = dict[str, Any]

_GIB: Final = 2**30


def arguments(service: InferenceService, args: Sequence[str]) -> list[str]:
    """The arguments of the engine for both. They follow those of the chart. args: of chart and user."""
    return [*_speculative_arguments(service), *_offload_arguments(service, args)]


def _speculative_arguments(service: InferenceService) -> list[str]:
    spec = service.spec.engine.speculative
    if spec is None:
        return []
    config: Object = {"method": spec.method, "num_speculative_tokens": spec.tokens}
    if spec.draft is not None:
        claim = spec.draft_claim
        models = engine_contract().paths["models"]
        config["model"] = location_of(spec.draft) if claim is None else f"{models}/claim/{claim[1]}"
    if spec.revision is not None:
        config["revision"] = spec.revision
    if spec.max_batch is not None:  # ranges of batches and their draft tokens; the last one goes on for ever
        first_without = spec.max_batch + 1
        config["num_speculative_tokens_per_batch_size"] = [
            [1, spec.max_batch, spec.tokens],
            [first_without, first_without, 0],
        ]
    return [vllm.SPECULATIVE_CONFIG, json.dumps(config)]


def _offload_arguments(service: InferenceService, args: Sequence[str]) -> list[str]:
    """Each data parallel rank has a cache of its own, so that they share the memory of the pod."""
    if service.spec.kv_offload is None:
        return []
    size = service.spec.kv_offload.memory_bytes / data_parallel_size(args) / _GIB
    return [vllm.KV_OFFLOADING_SIZE, f"{size:.6f}".rstrip("0").rstrip(".")]


def with_offload(service: InferenceService, resources: Mapping[str, Mapping[str, Any]]) -> Object:
    """Resources of the engine container, with the memory of the offloaded cache in the request and in a limit."""
    grown: Object = {part: dict(amounts) for part, amounts in resources.items()}
    if service.spec.kv_offload is None:
        return grown
    has_memory = [part for part in ("requests", "limits") if "memory" in grown.get(part, {})]
    for part in has_memory or ["requests"]:
        amounts = grown.setdefault(part, {})
        amounts["memory"] = grown_size(service, amounts.get("memory", "0"))
    return grown


def grown_size(service: InferenceService, size: int | str) -> int | str:
    """A size with the memory of the offloaded cache, which vLLM has in /dev/shm; the same without one."""
    if service.spec.kv_offload is None:
        return size
    total = int(units.parse_quantity(size)) + service.spec.kv_offload.memory_bytes
    return f"{total // _GIB}Gi" if total % _GIB == 0 else str(total)
