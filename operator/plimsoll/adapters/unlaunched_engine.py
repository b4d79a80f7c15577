"""Properties of an engine without Plimsoll's launcher, from its pod, its metrics and the service's model.

Problem: such an engine reports neither its accelerator nor its model's shape, and it was never benchmarked. Nothing can
be sized without a first step-time model.

Idea: limits are those of its arguments and its metrics page, as its contract says (`plimsoll.engines`). The means of
its requests are a benchmark (`observed_benchmark`), for any model on any accelerator. Where the pod's node selector
names the accelerator and the model is a known one, the roofline is the better prior and is used in their place.
"""

from __future__ import annotations

import re
from typing import Any, Final

from plimsoll.adapters.engine_of_pod import engine_args, engine_container, engine_of
from plimsoll.api import labels
from plimsoll.api.contract import engine_contract
from plimsoll.core.engine_model import roofline
from plimsoll.core.engine_model.observed_benchmark import observed_benchmark
from plimsoll.core.engine_model.self_benchmark import find_accelerator
from plimsoll.core.planning.known_models import find_config
from plimsoll.core.ports import EngineInfo, EngineReading
from plimsoll.core.types import Role
from plimsoll.engines import vllm
from plimsoll.engines.engine import Engine

Object = dict[str, Any]

_HUB: Final = "hf://"
_CACHE_LABELS: Final = re.compile(rb"^%s\{(.*)\}" % vllm.Metric.CACHE_CONFIG.encode(), re.MULTILINE)
_LABEL: Final = re.compile(rb'(\w+)="([^"\\]*)"')


def engine_info(
    page: bytes, reading: EngineReading, first: EngineReading, pod: Object, accelerator: str | None
) -> EngineInfo:
    """The properties of one engine. page: its metrics; reading: the same, parsed; first: its first reading.

    pod: of the service, or the copy of an adopted pod. accelerator: the data sheet's name; None if it is unknown. A
    property that cannot be found is None.
    """
    engine, adopted = engine_of(pod), pod.get(labels.ADOPTED)
    container = engine_container(pod)
    args = engine_args(pod)
    gpus = int(adopted["gpus"]) if adopted else _gpus(container)
    config = find_config(repository) if (repository := _repository(container, adopted)) else None
    block_tokens, kv_tokens = cache_shape(page)
    token_budget = engine.token_budget(args) or engine.default_token_budget
    return EngineInfo(
        engine=engine.name,
        engine_version=str(container.get("image", "")) or engine.name,
        accelerator=accelerator or "unknown",
        gpus=gpus,
        max_sequences=engine.max_sequences(args) or (None if engine.launched else engine.default_sequences),
        kv_tokens=kv_tokens or _kv_tokens(reading, engine, args, config, accelerator, gpus),
        token_budget=token_budget,
        block_tokens=block_tokens or _count_of(reading.block_tokens),
        max_model_len=engine.max_model_len(args),
        config=config,
        self_benchmark=observed_benchmark(reading, first, _role(pod)),
    )


def cache_shape(page: bytes) -> tuple[int | None, int | None]:
    """Tokens of a block and of the whole KV cache, by vLLM's metrics page; None where it does not have them."""
    cache = {name.decode(): value for found in _CACHE_LABELS.findall(page)[:1] for name, value in _LABEL.findall(found)}
    block_tokens, blocks = _count(cache.get("block_size")), _count(cache.get("num_gpu_blocks"))
    return block_tokens, block_tokens * blocks if block_tokens and blocks else None


def _kv_tokens(
    reading: EngineReading,
    engine: Engine,
    args: tuple[object, ...] | list[str],
    config: object,
    accelerator: str | None,
    gpus: int,
) -> int | None:
    """Tokens of the KV cache by the metrics, by the arguments, or by what a known model leaves of known GPUs."""
    known = _count_of(reading.kv_tokens) or engine.kv_tokens(args)
    gpu = find_accelerator(accelerator)
    if known or gpu is None or not isinstance(config, dict):
        return known
    try:
        return roofline.kv_tokens(roofline.model_shape(config), gpu, gpus)
    except ValueError:
        return None


def _role(pod: Object) -> Role:
    own = pod["metadata"].get("labels") or {}
    return Role(own.get(labels.ROLE, Role.SERVE))


def _gpus(container: Object) -> int:
    """Devices that a container of the service requests; 1 for an engine on CPUs."""
    limits = (container.get("resources") or {}).get("limits") or {}
    amounts = [str(amount) for name, amount in limits.items() if "/" in name]
    return max((int(amount) for amount in amounts if amount.isdigit()), default=0) or 1


def _repository(container: Object, adopted: Object | None) -> str:
    """The repository of the model; "" for a model that is a path or of another source."""
    if adopted:
        uri = str(adopted["model"])
        return uri.removeprefix(_HUB) if uri.startswith(_HUB) else ""
    values = {entry.get("name"): str(entry.get("value", "")) for entry in container.get("env") or ()}
    model = values.get(engine_contract().env["model"], "")
    return "" if model.startswith("/") else model


def _count_of(value: float | None) -> int | None:
    return None if value is None or value < 1.0 else int(value)


def _count(value: bytes | None) -> int | None:
    return int(value) if value is not None and value.isdigit() and int(value) > 0 else None
