"""What Plimsoll knows of vLLM: flags, the syntax of their values, defaults, environment variables and metric names.

Problem: operator, gateway, command line, launcher and engine simulator read the same command lines and metrics. If each
has its own reader, they disagree about `8k`.

Idea: one module without imports beyond the standard library. `make generate` copies it to
`engine-image/launcher/vllm.py`, because the image of an engine with vLLM has no part of the operator.

In a flag `_` equals `-`. Its value is the next argument or follows `=`, and the last occurrence of a flag counts
(vLLM's `FlexibleArgumentParser`). Units are accepted for every flag here; vLLM does not start if a flag that takes none
has one. Short names of flags are not read.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

MAX_NUM_SEQS: Final = "--max-num-seqs"
MAX_NUM_BATCHED_TOKENS: Final = "--max-num-batched-tokens"
MAX_NUM_QUEUED_REQS: Final = "--max-num-queued-reqs"
MAX_NUM_QUEUED_TOKENS: Final = "--max-num-queued-tokens"
MAX_MODEL_LEN: Final = "--max-model-len"
SCHEDULING_POLICY: Final = "--scheduling-policy"
BY_PRIORITY: Final = "priority"  # of a request; the lowest number first
BLOCK_SIZE: Final = "--block-size"
NUM_GPU_BLOCKS: Final = "--num-gpu-blocks-override"
KV_CACHE_BYTES: Final = "--kv-cache-memory-bytes"
PREFIX_CACHING: Final = "--enable-prefix-caching"
TENSOR_PARALLEL_SIZE: Final = "--tensor-parallel-size"
PIPELINE_PARALLEL_SIZE: Final = "--pipeline-parallel-size"
PREFILL_CONTEXT_PARALLEL_SIZE: Final = "--prefill-context-parallel-size"
EXPERT_PARALLEL: Final = "--enable-expert-parallel"
EXECUTOR_BACKEND: Final = "--distributed-executor-backend"
NODES: Final = "--nnodes"  # pods of one engine
NODE_RANK: Final = "--node-rank"
MASTER_ADDRESS: Final = "--master-addr"  # host of the pod with rank 0
HEADLESS: Final = "--headless"  # of the other pods: they have no API server
DATA_PARALLEL_SIZE: Final = "--data-parallel-size"
DECODE_CONTEXT_PARALLEL_SIZE: Final = "--decode-context-parallel-size"
SPECULATIVE_CONFIG: Final = "--speculative-config"
KV_OFFLOADING_SIZE: Final = "--kv-offloading-size"  # GiB in CPU memory, of each data parallel rank
CPU_OFFLOAD: Final = "--cpu-offload-gb"
CHUNKED_PREFILL: Final = "--enable-chunked-prefill"
NO_CHUNKED_PREFILL: Final = "--no-enable-chunked-prefill"
CUDA_GRAPH_SIZES: Final = "--cudagraph-capture-sizes"  # of vLLM 0.26; each size is an argument of its own
CUDA_GRAPH_SIZES_UNTIL_0_11: Final = "--cuda-graph-sizes"
MAX_CUDA_GRAPH_SIZE: Final = "--max-cudagraph-capture-size"
COMPILATION_CONFIG: Final = "--compilation-config"
OPTIMIZATION_LEVEL: Final = "--optimization-level"
ENFORCE_EAGER: Final = "--enforce-eager"
QUIET_ENDPOINTS: Final = "--disable-access-log-for-endpoints"
HOST: Final = "--host"
PORT: Final = "--port"
SERVED_MODEL_NAME: Final = "--served-model-name"
REVISION: Final = "--revision"
RUNNER: Final = "--runner"
POOLING_RUNNER: Final = "pooling"  # embeddings and scores in place of text
KV_TRANSFER_CONFIG: Final = "--kv-transfer-config"
MIDDLEWARE: Final = "--middleware"
SHUTDOWN_TIMEOUT: Final = "--shutdown-timeout"
SSL_KEY_FILE: Final = "--ssl-keyfile"
SSL_CERTIFICATE_FILE: Final = "--ssl-certfile"
SSL_AUTHORITY_FILE: Final = "--ssl-ca-certs"
SSL_CLIENT_CERTIFICATE: Final = "--ssl-cert-reqs"
SSL_REFRESH: Final = "--enable-ssl-refresh"  # reads the files again when they are written
ENABLE_LORA: Final = "--enable-lora"
MAX_LORAS: Final = "--max-loras"
MAX_LORA_RANK: Final = "--max-lora-rank"
MAX_CPU_LORAS: Final = "--max-cpu-loras"
PROCESSOR_KWARGS: Final = "--mm-processor-kwargs"  # a JSON object: how pictures are scaled
_PIXEL_KEYS: Final = (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))  # the latter in `size`
RESERVED_FLAGS: Final = (
    HOST, PORT, "--uds", "--model", SERVED_MODEL_NAME, REVISION, KV_TRANSFER_CONFIG, MIDDLEWARE, SHUTDOWN_TIMEOUT,
    SSL_KEY_FILE, SSL_CERTIFICATE_FILE, "--root-path", "--api-key", HEADLESS,
)  # the launcher sets them or relies on their defaults; users may not  # fmt: skip
RESERVED_VARIABLES: Final = ("VLLM_API_KEY",)  # what --api-key is: the engine would refuse the gateway
# Flags, by their first letters, that say how an engine spans GPUs, nodes and API servers; -n and -r are short names.
GROUP_FLAGS: Final = (
    "^(-[nr]([=0-9]|$)|--?((tensor|pipeline|data|prefill.context).parallel|tp|pp|dp|pcp|nnodes|node.rank|master|"
    "distributed.executor|api.server|asc))"
)

# Defaults of `vllm serve` on GPUs of 70 GiB and more, but not on an A100; below them those of all others.
DEFAULT_MAX_NUM_SEQS: Final = 1024
DEFAULT_MAX_NUM_BATCHED_TOKENS: Final = 8192
DEFAULT_MAX_NUM_SEQS_OTHERS: Final = 256
DEFAULT_MAX_NUM_BATCHED_TOKENS_OTHERS: Final = 2048
_LARGE_GPU_BYTES: Final = 70 * 2**30
DISAGGREGATED_BLOCK_TOKENS: Final = 128  # Plimsoll's choice for prefill and decode engines
MIN_QUEUE_LIMIT: Final = 64  # sequences; Plimsoll's choice
MAX_PIXELS: Final = 10**9  # of a picture; a million tokens for Qwen-VL

KV_CONNECTOR: Final = "NixlConnector"
KV_PRODUCER: Final = "kv_producer"
KV_CONSUMER: Final = "kv_consumer"
KV_BOTH: Final = "kv_both"

LOAD_LORA_PATH: Final = "/v1/load_lora_adapter"
UNLOAD_LORA_PATH: Final = "/v1/unload_lora_adapter"
SAGEMAKER_LORA_PATH: Final = "/adapters"  # loads with POST; /adapters/NAME unloads with DELETE

RUNTIME_LORA_VARIABLE: Final = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"  # without it an engine has no LOAD_LORA_PATH
CACHE_ROOT_VARIABLE: Final = "VLLM_CACHE_ROOT"
STARTUP_PLAN_VARIABLE: Final = "VLLM_ENABLE_STARTUP_PLAN"  # keeps in the cache root what memory profiling has found
NIXL_HOST_VARIABLE: Final = "VLLM_NIXL_SIDE_CHANNEL_HOST"
NIXL_PORT_VARIABLE: Final = "VLLM_NIXL_SIDE_CHANNEL_PORT"

METRIC_PREFIX: Final = "vllm:"
PROCESS_START_METRIC: Final = "process_start_time_seconds"


class Metric(StrEnum):
    """Names of the metrics that Plimsoll reads. A histogram is named without `_bucket`, `_sum` and `_count`."""

    RUNNING = "vllm:num_requests_running"
    WAITING = "vllm:num_requests_waiting"
    KV_USED = "vllm:kv_cache_usage_perc"
    KV_USED_UNTIL_0_10 = "vllm:gpu_cache_usage_perc"
    STEPS = "vllm:iteration_tokens_total_count"
    STEP_TOKENS = "vllm:iteration_tokens_total_sum"
    GENERATED_TOKENS = "vllm:generation_tokens_total"
    PROMPT_TOKENS_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
    LOCAL_CACHE_HITS = "vllm:prefix_cache_hits_total"
    EXTERNAL_CACHE_HITS = "vllm:external_prefix_cache_hits_total"
    PREEMPTIONS = "vllm:num_preemptions_total"
    DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
    ACCEPTED_DRAFT_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"
    NIXL_POST_SECONDS = "vllm:nixl_post_time_seconds_sum"
    NIXL_TRANSFER_SECONDS = "vllm:nixl_xfer_time_seconds_sum"
    PROMPT_TOKENS = "vllm:request_prompt_tokens"
    OUTPUT_TOKENS = "vllm:request_generation_tokens"
    TPOT = "vllm:request_time_per_output_token_seconds"
    TTFT = "vllm:time_to_first_token_seconds"
    ITL = "vllm:inter_token_latency_seconds"
    ITL_UNTIL_0_12 = "vllm:time_per_output_token_seconds"
    PREFILL_TIME = "vllm:request_prefill_time_seconds"
    CACHE_CONFIG = "vllm:cache_config_info"


class PromptSource(StrEnum):
    """Values of the label `source` of Metric.PROMPT_TOKENS_BY_SOURCE."""

    COMPUTED = "local_compute"
    CACHED = "local_cache_hit"
    TRANSFERRED = "external_kv_transfer"


_COUNT_PATTERN: Final = re.compile(r"([0-9](?:_?[0-9]){0,14})(?:\.([0-9]{1,15}))?([kmgtKMGT]?)")
_UNIT_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_count(text: str) -> int | None:
    """An integer with an optional unit: `k` is 1,000 and `K` is 1,024 (vLLM's `human_readable_int`).

    Decimal units allow a fraction; without a unit, `_` may separate digits. None for a negative number, and for text
    that vLLM rejects.
    """
    parsed = _COUNT_PATTERN.fullmatch(text.strip())
    if parsed is None:
        return None
    number, decimals, unit = parsed.groups()
    if "_" in number and (decimals or unit):
        return None
    if unit.lower() == unit and unit:
        return int(float(f"{number}.{decimals or 0}") * 1000 ** _UNIT_POWERS[unit])
    return None if decimals else int(number) * 1024 ** _UNIT_POWERS[unit.lower()]


def flag_name(argument: str) -> str:
    """The flag that an argument sets: `--a_b=4` and `--a-b.c` are both `--a-b`; empty for a value."""
    if not argument.startswith("--"):
        return ""
    return argument.split("=", 1)[0].split(".", 1)[0].replace("_", "-")


def flag_values(args: Iterable[object]) -> dict[str, str]:
    """The flags that have a value, spelled with `-`, and their values."""
    values: dict[str, str] = {}
    for argument, following in itertools.pairwise([*map(str, args), "--"]):
        _, equals, value = argument.partition("=")
        if (name := flag_name(argument)) and (equals or not following.startswith("--")):
            values[name] = value if equals else following
    return values


def flag_count(args: Iterable[object], flag: str) -> int | None:
    """The value of a flag as a count of at least 1; None if it is absent or no such count."""
    return parse_count(flag_values(args).get(flag, "")) or None


def _is_large_gpu(name: str, memory_bytes: float) -> bool:
    return memory_bytes >= _LARGE_GPU_BYTES and "a100" not in name.lower()


def default_sequences(gpu: str, memory_bytes: float) -> int:
    """MAX_NUM_SEQS of `vllm serve` on a GPU with this name and memory, without an argument."""
    return DEFAULT_MAX_NUM_SEQS if _is_large_gpu(gpu, memory_bytes) else DEFAULT_MAX_NUM_SEQS_OTHERS


def default_batched_tokens(gpu: str, memory_bytes: float) -> int:
    """MAX_NUM_BATCHED_TOKENS of `vllm serve` on a GPU with this name and memory, without an argument."""
    large = _is_large_gpu(gpu, memory_bytes)
    return DEFAULT_MAX_NUM_BATCHED_TOKENS if large else DEFAULT_MAX_NUM_BATCHED_TOKENS_OTHERS


def queue_limit(args: Sequence[object], *, default: int, per_sequence: int) -> int | None:
    """Sequences that an engine accepts at once, running and queued.

    It is MAX_NUM_QUEUED_REQS if the arguments have it, None if its value is no count. Otherwise it is `per_sequence`
    times MAX_NUM_SEQS, at least MIN_QUEUE_LIMIT, and `default` if the arguments leave MAX_NUM_SEQS to vLLM.
    """
    if has_flag(args, MAX_NUM_QUEUED_REQS):
        return flag_count(args, MAX_NUM_QUEUED_REQS)
    sequences = flag_count(args, MAX_NUM_SEQS)
    return default if sequences is None else max(MIN_QUEUE_LIMIT, sequences * per_sequence)


def schedules_by_priority(args: Iterable[object]) -> bool:
    """Whether an engine with these arguments schedules requests by their priority; others reject one that is not 0."""
    return flag_values(args).get(SCHEDULING_POLICY) == BY_PRIORITY


def has_flag(args: Iterable[object], flag: str) -> bool:
    """Whether the arguments set a flag, with or without a value."""
    return any(flag_name(str(argument)) == flag for argument in args)


def processor_kwargs(args: Iterable[object]) -> Mapping[str, Any]:
    """The value of PROCESSOR_KWARGS; `--mm-processor-kwargs.KEY VALUE` replaces that of the flag itself, as in vLLM.

    Raises ValueError if it is no JSON object.
    """
    whole: object = {}
    by_key: dict[str, Any] = {}
    for argument, following in itertools.pairwise([*map(str, args), "--"]):
        if flag_name(argument) != PROCESSOR_KWARGS:
            continue
        name, equals, value = argument.partition("=")
        text = value if equals else following
        _, *keys = name.split(".")
        if not keys:
            whole = _json(text, f"{PROCESSOR_KWARGS} must be a JSON object")
            continue
        inner = by_key
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise ValueError(f"{PROCESSOR_KWARGS}.{key} has a value and keys")
        inner[keys[-1]] = _json_or_text(text)
    if not isinstance(whole, dict):
        raise ValueError(f"{PROCESSOR_KWARGS} must be a JSON object, not {_shown(whole)}")
    return by_key or whole


def pixel_bounds(args: Iterable[object]) -> tuple[int | None, int | None]:
    """The fewest and the most pixels to which an engine with these arguments scales a picture; None for the model's.

    Raises ValueError that names the key and its value.
    """
    kwargs = processor_kwargs(args)
    images = kwargs.get("images_kwargs")
    scopes = [scope for scope in (kwargs, images) if isinstance(scope, dict)]
    found: list[int | None] = []
    for key, edge in _PIXEL_KEYS:
        bound = None
        for scope in scopes:  # the later and the first key of a scope win
            size = scope.get("size")
            bound = _pixels(f"size.{edge}", size.get(edge) if isinstance(size, dict) else None) or bound
            bound = _pixels(key, scope.get(key)) or bound
        found.append(bound)
    return found[0], found[1]


def _pixels(key: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_PIXELS:
        raise ValueError(
            f"{key} in {PROCESSOR_KWARGS} must be a whole number from 1 to {MAX_PIXELS}, not {_shown(value)}"
        )
    return value


def _shown(value: object) -> str:
    """A value of JSON in a message. A list or an object may be nested deeper than json can write."""
    if isinstance(value, list):
        return "a list"
    return "an object" if isinstance(value, dict) else json.dumps(value)[:80]


def _json(text: str, says: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{says}, not {text[:80]}: {error}") from error


def _json_or_text(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text if (count := parse_count(text)) is None else count
