"""TensorRT-LLM (`trtllm-serve`, PyTorch backend), in its own image.

Facts from its documentation and from its sources (`commands/serve.py`, `serve/openai_server.py`,
`metrics/collector.py`); no server was run:

- `/metrics` has statistics of iterations as JSON. Prometheus metrics are at `/prometheus/metrics`, and only with
  `return_perf_metrics` and `enable_iter_perf_stats`, which a YAML file sets. Of several files, as `--config` or
  `--extra_llm_api_options`, the last counts, and its options override arguments. The command writes the file: the
  user's options, and these two.
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
MAX_TOKENS: Final = ("--max_num_tokens",)
DEFAULT_TOKENS: Final = 8192  # its documentation
OPTIONS_FLAGS: Final = ("--config", "--extra_llm_api_options")
OPTIONS_FILE: Final = "/tmp/trtllm-serve.yaml"
DEFAULT_BATCH: Final = 256  # Plimsoll's assumption: the default depends on the release
RESERVED_FLAGS: Final = (
    "--host", "--port", "--served_model_name", "--revision", "--server_role", "--disagg_cluster_uri",
    "--metadata_server_config_file", "--grpc",
)  # fmt: skip
_SERVE: Final = f"""
import os, sys, yaml
flag, path, kept, words = "", "", [], iter(sys.argv[1:])
for word in words:
    name, equals, value = word.partition("=")
    if name in {OPTIONS_FLAGS}:
        flag, path = name, value if equals else next(words, "")
    else:
        kept.append(word)
try:
    options = (yaml.safe_load(open(path, encoding="utf-8")) or {{}}) if flag else {{}}
except OSError as error:
    sys.exit(f"spec.engine.args: {{flag}} {{path}}: {{error.strerror}}: mount the file with tiers.*.pod.volumeMounts")
except (yaml.YAMLError, UnicodeDecodeError) as error:
    sys.exit(f"spec.engine.args: {{flag}} {{path}}: is no YAML: {{error}}")
if not isinstance(options, dict):
    sys.exit(f"spec.engine.args: {{flag}} {{path}}: is no mapping of options")
options.update(return_perf_metrics=True, enable_iter_perf_stats=True)
with open({OPTIONS_FILE!r}, "w", encoding="utf-8") as file:
    yaml.safe_dump(options, file, sort_keys=False)
os.execvp("trtllm-serve", ["trtllm-serve", *kept, {OPTIONS_FLAGS[1]!r}, {OPTIONS_FILE!r}])
"""


def _own_args(launch: Launch) -> tuple[str, ...]:
    return (
        launch.model,
        *("--host", "0.0.0.0", "--port", str(launch.port)),
        *(("--revision", launch.revision) if launch.revision else ()),
        *(("--tp_size", str(launch.gpus)) if launch.gpus > 1 else ()),
    )


def _max_batch(args: Sequence[object]) -> int | None:
    return last_count(args, MAX_BATCH)


def _max_length(args: Sequence[object]) -> int | None:
    return last_count(args, MAX_LENGTH)


def _max_tokens(args: Sequence[object]) -> int | None:
    return last_count(args, MAX_TOKENS)


METRICS: Final = MetricMap(
    engine="TensorRT-LLM",
    prefix="trtllm_",
    signals=(
        (Signal.RUNNING, (Source("trtllm_num_requests_running"),)),
        (Signal.WAITING, (Source("trtllm_num_requests_waiting"),)),
        (Signal.KV_USED, (Source("trtllm_kv_cache_utilization"),)),
        (Signal.KV_BLOCKS, (Source("trtllm_kv_cache_max_blocks"),)),
        (Signal.BLOCK_TOKENS, (Source("trtllm_kv_cache_tokens_per_block"),)),
        (Signal.ALL_PROMPT_TOKENS, (Source("trtllm_prompt_tokens_total"),)),
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
    command=("python3", "-c", _SERVE),
    max_sequences=_max_batch,
    max_model_len=_max_length,
    token_budget=_max_tokens,
    default_token_budget=DEFAULT_TOKENS,
)
