"""Properties of an engine without Plimsoll's launcher, from its pod, its metrics and the service's model.

Problem: an engine that exists reports neither its accelerator nor its model's shape, and it was never benchmarked.
Nothing can be sized without a first step-time model.

Idea: vLLM's lifetime means are a benchmark: the time in the prefill phase over the computed prompt tokens, and the time
per output token at the mean batch. They hold for any model on any accelerator. Where the pod's node selector names the
accelerator and the model is a known one, the roofline is the better prior and is used in their place.
"""

from __future__ import annotations

import re
from typing import Any, Final

from plimsoll.api import labels
from plimsoll.core.histogram import total_count
from plimsoll.core.planning.known_models import find_config
from plimsoll.core.ports import BucketCounts, EngineInfo, EngineReading, SelfBenchmark
from plimsoll.engines import vllm

Object = dict[str, Any]

MIN_REQUESTS: Final = 20.0  # completed ones, before their means count as a benchmark
_HUB: Final = "hf://"
_CACHE_LABELS: Final = re.compile(rb"^%s\{(.*)\}" % vllm.Metric.CACHE_CONFIG.encode(), re.MULTILINE)
_LABEL: Final = re.compile(rb'(\w+)="([^"\\]*)"')
_PREFILL_TIME: Final = re.compile(
    rb"^%s_(sum|count)(?:\{[^}]*\})? ([0-9.eE+-]+)" % vllm.Metric.PREFILL_TIME.encode(), re.MULTILINE
)


def engine_info(page: bytes, reading: EngineReading, pod: Object, accelerator: str | None) -> EngineInfo:
    """The properties of one engine. page: its metrics; reading: the same, parsed. pod: the copy of an adopted pod.

    accelerator: the data sheet's name; None if it is unknown. A property that cannot be found is None.
    """
    adopted = pod[labels.ADOPTED]
    container = engine_container(pod)
    args = command_line(container)
    block_tokens, kv_tokens = cache_shape(page)
    model = str(adopted["model"])
    return EngineInfo(
        engine="vllm",
        engine_version=str(container.get("image", "")) or "vllm",
        accelerator=accelerator or "unknown",
        gpus=int(adopted["gpus"]),
        max_sequences=vllm.flag_count(args, vllm.MAX_NUM_SEQS),
        kv_tokens=kv_tokens,
        token_budget=vllm.flag_count(args, vllm.MAX_NUM_BATCHED_TOKENS),
        block_tokens=block_tokens,
        max_model_len=vllm.flag_count(args, vllm.MAX_MODEL_LEN),
        config=find_config(model.removeprefix(_HUB)) if model.startswith(_HUB) else None,
        self_benchmark=observed_benchmark(page, reading),
    )


def cache_shape(page: bytes) -> tuple[int | None, int | None]:
    """Tokens of a block and of the whole KV cache, by vLLM's metrics page; None where it does not have them."""
    cache = {name.decode(): value for found in _CACHE_LABELS.findall(page)[:1] for name, value in _LABEL.findall(found)}
    block_tokens, blocks = _count(cache.get("block_size")), _count(cache.get("num_gpu_blocks"))
    return block_tokens, block_tokens * blocks if block_tokens and blocks else None


def observed_benchmark(page: bytes, reading: EngineReading) -> SelfBenchmark | None:
    """The lifetime means of an engine as a benchmark; None before MIN_REQUESTS or where they are not reported."""
    prompts, outputs, tpot = reading.prompt_tokens, reading.output_tokens, reading.tpot_s
    if prompts is None or outputs is None or tpot is None or not reading.steps or reading.generated_tokens is None:
        return None
    prefill_s = _mean_prefill_s(page)
    requests = total_count(prompts)
    if requests < MIN_REQUESTS or total_count(tpot) < MIN_REQUESTS or prefill_s is None:
        return None
    computed = prompts.value_sum if reading.local_prompt_tokens is None else reading.local_prompt_tokens
    prompt_tokens = max(1, round(computed / requests))
    batch = max(1, round(reading.generated_tokens / reading.steps))
    context = max(1, round(_mean(prompts) + _mean(outputs) / 2.0))
    return SelfBenchmark(((prompt_tokens, prefill_s),), ((batch, context, _mean(tpot)),))


def engine_container(pod: Object) -> Object:
    """The container that runs the engine: the one whose command line or image names vLLM, else the first."""
    containers: list[Object] = (pod.get("spec") or {}).get("containers") or [{}]
    named = (one for one in containers if "vllm" in " ".join((str(one.get("image", "")), *command_line(one))))
    return next(named, containers[0])


def command_line(container: Object) -> list[str]:
    """Command and arguments of a container; those of `sh -c` are split at blanks."""
    words = [str(word) for word in (*(container.get("command") or ()), *(container.get("args") or ()))]
    return [part for word in words for part in (word.split() if "vllm " in word else [word])]


def _mean_prefill_s(page: bytes) -> float | None:
    totals = {"sum": 0.0, "count": 0.0}
    for part, value in _PREFILL_TIME.findall(page):
        totals[part.decode()] += float(value)
    return totals["sum"] / totals["count"] if totals["count"] and totals["sum"] else None


def _mean(histogram: BucketCounts) -> float:
    return histogram.value_sum / total_count(histogram)


def _count(value: bytes | None) -> int | None:
    return int(value) if value is not None and value.isdigit() and int(value) > 0 else None
