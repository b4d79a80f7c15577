"""vLLM, and the engine simulator with vLLM's command line and metrics: the engines that the launcher starts.

Their flags and metric names are in `vllm`, because the launcher has a copy of that module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from plimsoll.engines import vllm
from plimsoll.engines.engine import Engine, Feature, MetricMap, Signal, Source
from plimsoll.engines.parallelism import tensor_parallel_size
from plimsoll.engines.vllm import Metric, PromptSource

_ROLE_ARGS: Final = {
    "prefill": (vllm.BLOCK_SIZE, str(vllm.DISAGGREGATED_BLOCK_TOKENS)),
    "decode": (vllm.BLOCK_SIZE, str(vllm.DISAGGREGATED_BLOCK_TOKENS)),
    "serve": (),
}
_TASK_ARGS: Final[dict[str, tuple[str, ...]]] = {
    "generate": (),
    "embed": (vllm.RUNNER, vllm.POOLING_RUNNER),
    "score": (vllm.RUNNER, vllm.POOLING_RUNNER),
    "transcribe": (),
}


def _default_args(role: str, task: str, gpus: int, args: Sequence[object]) -> tuple[str, ...]:
    size = tensor_parallel_size(gpus, args)
    parallel = (vllm.TENSOR_PARALLEL_SIZE, str(size)) if gpus > 1 else ()
    return (*_TASK_ARGS[task], *_ROLE_ARGS[role], *parallel)


def _max_sequences(args: Sequence[object]) -> int | None:
    return vllm.flag_count(args, vllm.MAX_NUM_SEQS)


def _max_model_len(args: Sequence[object]) -> int | None:
    return vllm.flag_count(args, vllm.MAX_MODEL_LEN)


def _token_budget(args: Sequence[object]) -> int | None:
    return vllm.flag_count(args, vllm.MAX_NUM_BATCHED_TOKENS)


def _queue_limit(args: Sequence[object], default: int, per_sequence: int) -> int | None:
    return vllm.queue_limit(args, default=default, per_sequence=per_sequence)


def _prompt_tokens(source: PromptSource) -> Source:
    return Source(Metric.PROMPT_TOKENS_BY_SOURCE, "source", source)


METRICS: Final = MetricMap(
    engine="vLLM",
    prefix=vllm.METRIC_PREFIX,
    signals=(
        (Signal.RUNNING, (Source(Metric.RUNNING),)),
        (Signal.WAITING, (Source(Metric.WAITING),)),
        (Signal.KV_USED, (Source(Metric.KV_USED), Source(Metric.KV_USED_UNTIL_0_10))),
        (Signal.STEPS, (Source(Metric.STEPS),)),
        (Signal.STEP_TOKENS, (Source(Metric.STEP_TOKENS),)),
        (Signal.GENERATED_TOKENS, (Source(Metric.GENERATED_TOKENS),)),
        (Signal.LOCAL_PROMPT_TOKENS, (_prompt_tokens(PromptSource.COMPUTED),)),
        (Signal.CACHED_PROMPT_TOKENS, (_prompt_tokens(PromptSource.CACHED), Source(Metric.LOCAL_CACHE_HITS))),
        (
            Signal.TRANSFERRED_PROMPT_TOKENS,
            (_prompt_tokens(PromptSource.TRANSFERRED), Source(Metric.EXTERNAL_CACHE_HITS)),
        ),
        (Signal.PREEMPTIONS, (Source(Metric.PREEMPTIONS),)),
        (Signal.DRAFT_TOKENS, (Source(Metric.DRAFT_TOKENS),)),
        (Signal.ACCEPTED_DRAFT_TOKENS, (Source(Metric.ACCEPTED_DRAFT_TOKENS),)),
        (Signal.PREFILL_SECONDS, (Source(f"{Metric.PREFILL_TIME}_sum"),)),
        (Signal.POST_SECONDS, (Source(Metric.NIXL_POST_SECONDS),)),
        (Signal.TRANSFER_SECONDS, (Source(Metric.NIXL_TRANSFER_SECONDS),)),
        (Signal.PROMPT_TOKENS, (Source(Metric.PROMPT_TOKENS),)),
        (Signal.OUTPUT_TOKENS, (Source(Metric.OUTPUT_TOKENS),)),
        (Signal.TPOT, (Source(Metric.TPOT),)),
        (Signal.TTFT, (Source(Metric.TTFT),)),
        (Signal.ITL, (Source(Metric.ITL), Source(Metric.ITL_UNTIL_0_12))),
    ),
)

VLLM: Final = Engine(
    name="vllm",
    title="vLLM",
    features=frozenset(Feature) - {Feature.OWN_SERVER},
    metrics=METRICS,
    default_sequences=vllm.DEFAULT_MAX_NUM_SEQS,
    launched=True,
    reserved_flags=vllm.RESERVED_FLAGS,
    reserved_variables=vllm.RESERVED_VARIABLES,
    default_args=_default_args,
    max_sequences=_max_sequences,
    max_model_len=_max_model_len,
    queue_limit=_queue_limit,
    token_budget=_token_budget,
    pixel_bounds=vllm.pixel_bounds,
)
SIMULATED: Final = replace(
    VLLM,
    name="simulated",
    title="the engine simulator",
    features=VLLM.features - {Feature.TUNING, Feature.SPECULATION, Feature.KV_OFFLOAD},
)
