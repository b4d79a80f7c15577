"""llama.cpp's server (`llama-server`), in an image whose entry point it is.

Facts from `tools/server` of its repository, and from a running server of build 11549:

- A request's `model` is not checked; answers carry the alias.
- With `--parallel N` each slot has 1/N of `--ctx-size`, unless `--kv-unified` shares it. Without it there are 4 slots.
- `/health` answers 503 until the model is loaded. SIGTERM ends running requests.
- Prompt tokens and their time are counted when a prompt is done, output tokens and theirs when a request ends.
- `n_decode_total` counts calls of llama_decode. Each computes one token of each decoding slot and prompt tokens of
  others, at most `--batch-size` together; a batch that does not fit is tried again in halves (its sources).
  LLAMA_ARG_BATCH is not read.
- Arguments have variables (`--parallel`: LLAMA_ARG_N_PARALLEL), which they override. That of a switch counts if it is
  on, enabled, true or 1.
- Its queue has no limit. Adapters are loaded at its start only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from plimsoll.engines.engine import Engine, Feature, Launch, MetricMap, Signal, Source, last_count

PARALLEL: Final = ("--parallel", "-np")
CONTEXT: Final = ("--ctx-size", "-c")
UNIFIED: Final = ("--kv-unified", "-kvu")
BATCH: Final = ("--batch-size", "-b")
DEFAULT_BATCH: Final = 2048
DEFAULT_SLOTS: Final = 4
RESERVED_FLAGS: Final = (
    "--host", "--port", "--model", "-m", "--model-url", "-mu", "--hf-repo", "-hf", "-hfr", "--docker-repo", "-dr",
    "--alias", "-a", "--metrics", "--api-key", "--api-key-file", "--api-prefix", "--ssl-key-file", "--ssl-cert-file",
    "--models-dir", "--models-preset",
)  # the last two make a router of the server  # fmt: skip
RESERVED_VARIABLES: Final = (
    "LLAMA_API_KEY", "LLAMA_ARG_API_PREFIX", "LLAMA_ARG_SSL_KEY_FILE", "LLAMA_ARG_SSL_CERT_FILE",
    "LLAMA_ARG_MODELS_DIR", "LLAMA_ARG_MODELS_PRESET", "LLAMA_ARG_MODEL", "LLAMA_ARG_MODEL_URL", "LLAMA_ARG_HF_REPO",
    "LLAMA_ARG_DOCKER_REPO",
)  # of the reserved flags that are not always set  # fmt: skip
ARGUMENT_VARIABLES: Final = (
    ("LLAMA_ARG_N_PARALLEL", PARALLEL[0]),
    ("LLAMA_ARG_CTX_SIZE", CONTEXT[0]),
    ("LLAMA_ARG_KV_UNIFIED", UNIFIED[0]),
)
_UNIFIED_ARGS: Final = {*UNIFIED, *(f"{UNIFIED[0]}={value}" for value in ("on", "enabled", "true", "1"))}
_TASK_ARGS: Final[dict[str, tuple[str, ...]]] = {"embed": ("--embeddings",), "score": ("--reranking",)}


def _own_args(launch: Launch) -> tuple[str, ...]:
    model = ("--hf-repo", launch.model) if launch.from_hub else ("--model", launch.model)
    address = ("--host", "0.0.0.0", "--port", str(launch.port))
    return (*model, "--alias", launch.served_name, *address, "--metrics", *_TASK_ARGS.get(launch.task, ()))


def _slots(args: Sequence[object]) -> int | None:
    return last_count(args, PARALLEL)


def _max_model_len(args: Sequence[object]) -> int | None:
    context, slots = last_count(args, CONTEXT), _slots(args)
    if context is None or slots is None or any(argument in _UNIFIED_ARGS for argument in args):
        return context
    return context // slots or None


def _kv_tokens(args: Sequence[object]) -> int | None:
    return last_count(args, CONTEXT)


def _batch(args: Sequence[object]) -> int | None:
    return last_count(args, BATCH)


METRICS: Final = MetricMap(
    engine="llama.cpp",
    prefix="llamacpp:",
    signals=(
        (Signal.RUNNING, (Source("llamacpp:requests_processing"),)),
        (Signal.WAITING, (Source("llamacpp:requests_deferred"),)),
        (Signal.KV_USED, (Source("llamacpp:kv_cache_usage_ratio"),)),  # until the middle of 2025
        (Signal.STEPS, (Source("llamacpp:n_decode_total"),)),
        (Signal.GENERATED_TOKENS, (Source("llamacpp:tokens_predicted_total"),)),
        (Signal.LOCAL_PROMPT_TOKENS, (Source("llamacpp:prompt_tokens_total"),)),
        (Signal.CACHED_PROMPT_TOKENS, (Source("llamacpp:prompt_tokens_cached_total"),)),
        (Signal.PREFILL_SECONDS, (Source("llamacpp:prompt_seconds_total"),)),
        (Signal.DECODE_SECONDS, (Source("llamacpp:tokens_predicted_seconds_total"),)),
    ),
)

LLAMA_CPP: Final = Engine(
    name="llama-cpp",
    title="llama.cpp",
    features=frozenset({Feature.EMBED, Feature.SCORE}),
    metrics=METRICS,
    default_sequences=DEFAULT_SLOTS,
    reserved_flags=RESERVED_FLAGS,
    reserved_variables=RESERVED_VARIABLES,
    argument_variables=ARGUMENT_VARIABLES,
    own_args=_own_args,
    cache_variables=("LLAMA_CACHE",),
    max_sequences=_slots,
    max_model_len=_max_model_len,
    token_budget=_batch,
    default_token_budget=DEFAULT_BATCH,
    kv_tokens=_kv_tokens,
)
