"""SGLang (`sglang.launch_server`), in its own image.

Measured on a server of 0.5.23 on the CPU, unless a line says otherwise:

- Metrics need `--enable-metrics`. `time_per_output_token_seconds` of older releases has inter-token latencies (its
  documentation), `request_time_per_output_token_seconds` the mean of each request.
- `prompt_tokens_total` includes cached tokens; `realtime_tokens_total` separates them by its label `mode`. Its decode
  tokens lack the first of each request, which the prefill makes.
- A prefill is a step of its own; inter-token latencies count at once, a request's mean when it ends.
- Running and queued requests are counted again at each prefill and every 40 decode steps (`--decode-log-interval`).
  With `--enable-priority-scheduling` they have a line for each priority, and their sum with an empty one (its source).
- `/health` computes a token, unless a variable says no: the answer takes a second, and as long as a prefill that runs.
- `/health_generate` always does. It answers 503 if nothing was computed for any request within 20 seconds.
- On SIGTERM it finishes running requests, and `/health` answers 503.
- Disaggregated engines need its own bootstrap server and router, which Plimsoll does not run (its documentation).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from plimsoll.engines.engine import Engine, Feature, Launch, MetricMap, Signal, Source, last_count

MAX_RUNNING: Final = "--max-running-requests"
MAX_QUEUED: Final = "--max-queued-requests"
CONTEXT: Final = "--context-length"
CHUNK: Final = "--chunked-prefill-size"
DEFAULT_CHUNK: Final = 8192  # its documentation: by the GPU's memory, this on 80 GB
DEFAULT_RUNNING: Final = 256  # Plimsoll's assumption: SGLang derives it from the free memory
HEALTH_COMPUTES: Final = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"
RESERVED_FLAGS: Final = (
    "--host", "--port", "--model-path", "--model", "--served-model-name", "--revision", "--enable-metrics", "--api-key",
    "--ssl-keyfile", "--ssl-certfile", "--config", "--disaggregation-mode",
)  # fmt: skip


def _own_args(launch: Launch) -> tuple[str, ...]:
    return (
        *("--model-path", launch.model, "--served-model-name", launch.served_name),
        *(("--revision", launch.revision) if launch.revision else ()),
        *(("--tp-size", str(launch.gpus)) if launch.gpus > 1 else ()),
        *(("--is-embedding",) if launch.task == "embed" else ()),
        *("--host", "0.0.0.0", "--port", str(launch.port), "--enable-metrics"),
    )


def _max_running(args: Sequence[object]) -> int | None:
    return last_count(args, (MAX_RUNNING,))


def _max_model_len(args: Sequence[object]) -> int | None:
    return last_count(args, (CONTEXT,))


def _chunk(args: Sequence[object]) -> int | None:
    return last_count(args, (CHUNK,))


def _queue_limit(args: Sequence[object], default: int, per_sequence: int) -> int | None:
    queued = last_count(args, (MAX_QUEUED,))
    return None if queued is None else queued + (_max_running(args) or DEFAULT_RUNNING)


def _tokens(mode: str) -> Source:
    return Source("sglang:realtime_tokens_total", "mode", mode)


def _total(metric: str) -> Source:
    return Source(metric, "priority", "")


METRICS: Final = MetricMap(
    engine="SGLang",
    prefix="sglang:",
    signals=(
        (Signal.RUNNING, (_total("sglang:num_running_reqs"),)),
        (Signal.WAITING, (_total("sglang:num_queue_reqs"),)),
        (Signal.KV_USED, (Source("sglang:token_usage"),)),
        (Signal.KV_TOKENS, (Source("sglang:max_total_num_tokens"),)),
        (Signal.GENERATED_TOKENS, (_tokens("decode"), Source("sglang:generation_tokens_total"))),
        (Signal.LOCAL_PROMPT_TOKENS, (_tokens("prefill_compute"),)),
        (Signal.CACHED_PROMPT_TOKENS, (_tokens("prefill_cache"), Source("sglang:cached_tokens_total"))),
        (Signal.PROMPT_TOKENS, (Source("sglang:prompt_tokens_histogram"),)),
        (Signal.OUTPUT_TOKENS, (Source("sglang:generation_tokens_histogram"),)),
        (Signal.TTFT, (Source("sglang:time_to_first_token_seconds"),)),
        (Signal.TPOT, (Source("sglang:request_time_per_output_token_seconds"),)),
        (
            Signal.ITL,
            (Source("sglang:inter_token_latency_seconds"), Source("sglang:time_per_output_token_seconds")),
        ),
    ),
)

SGLANG: Final = Engine(
    name="sglang",
    title="SGLang",
    features=frozenset({Feature.EMBED, Feature.REVISION, Feature.DRAIN_ON_TERM}),
    metrics=METRICS,
    default_sequences=DEFAULT_RUNNING,
    reserved_flags=RESERVED_FLAGS,
    own_args=_own_args,
    command=("python3", "-m", "sglang.launch_server"),
    progress_path="/health_generate",
    variables=((HEALTH_COMPUTES, "false"),),
    max_sequences=_max_running,
    max_model_len=_max_model_len,
    queue_limit=_queue_limit,
    token_budget=_chunk,
    default_token_budget=DEFAULT_CHUNK,
)
