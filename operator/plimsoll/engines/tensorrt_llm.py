"""TensorRT-LLM (`trtllm-serve`, PyTorch backend), in its own image.

Facts from its documentation and from its sources (`commands/serve.py`, `serve/openai_server.py`,
`metrics/collector.py`); no server was run:

- `/metrics` has statistics of iterations as JSON. Prometheus metrics are at `/prometheus/metrics`, and only with
  `return_perf_metrics` and `enable_iter_perf_stats`, which a YAML file sets: the command writes it. Of several files,
  as `--config` or `--extra_llm_api_options`, the last counts.
- Its gauges change when a request ends, and counters of tokens count requests that ended. Its prompt tokens include
  cached ones.
- The port listens once the model is loaded, and `/health` is 200 from then on. A request's `model` is not checked.
- What SIGTERM does to running requests is not documented.
- Disaggregated engines need its own server in front (`trtllm-serve disaggregated`), which Plimsoll does not run.
- `--revision` is of later releases, as are embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from plimsoll.engines.engine import Engine, Feature, Launch, MetricMap, Signal, Source, last_count

MAX_BATCH: Final = ("--max_batch_size",)
MAX_LENGTH: Final = ("--max_seq_len",)
OPTIONS_FILE: Final = "/tmp/trtllm-serve.yaml"
DEFAULT_BATCH: Final = 256  # Plimsoll's assumption: the default depends on the release
RESERVED_FLAGS: Final = (
    "--host", "--port", "--served_model_name", "--revision", "--server_role", "--disagg_cluster_uri",
    "--metadata_server_config_file", "--grpc",
)  # fmt: skip
_WRITE_OPTIONS: Final = (
    rf"printf 'return_perf_metrics: true\nenable_iter_perf_stats: true\n' > {OPTIONS_FILE} && exec trtllm-serve " '"$@"'
)


def _own_args(launch: Launch) -> tuple[str, ...]:
    return (
        launch.model,
        *("--host", "0.0.0.0", "--port", str(launch.port)),
        *(("--revision", launch.revision) if launch.revision else ()),
        *(("--tp_size", str(launch.gpus)) if launch.gpus > 1 else ()),
        *("--extra_llm_api_options", OPTIONS_FILE),
    )


def _max_batch(args: Sequence[object]) -> int | None:
    return last_count(args, MAX_BATCH)


def _max_length(args: Sequence[object]) -> int | None:
    return last_count(args, MAX_LENGTH)


METRICS: Final = MetricMap(
    engine="TensorRT-LLM",
    prefix="trtllm_",
    signals=(
        (Signal.RUNNING, (Source("trtllm_num_requests_running"),)),
        (Signal.WAITING, (Source("trtllm_num_requests_waiting"),)),
        (Signal.KV_USED, (Source("trtllm_kv_cache_utilization"),)),
        (Signal.GENERATED_TOKENS, (Source("trtllm_generation_tokens_total"),)),
        (Signal.TPOT, (Source("trtllm_time_per_output_token_seconds"),)),
        (Signal.TTFT, (Source("trtllm_time_to_first_token_seconds"),)),
    ),
)

TENSORRT_LLM: Final = Engine(
    name="tensorrt-llm",
    title="TensorRT-LLM",
    features=frozenset({Feature.REVISION}),
    metrics=METRICS,
    metrics_path="/prometheus/metrics",
    default_sequences=DEFAULT_BATCH,
    reserved_flags=RESERVED_FLAGS,
    own_args=_own_args,
    command=("sh", "-c", _WRITE_OPTIONS, "trtllm-serve"),
    max_sequences=_max_batch,
    max_model_len=_max_length,
)
