"""Text Generation Inference (`text-generation-launcher`), in its own image. Its project only maintains it since 2025.

Facts from its documentation of launcher arguments and metrics, and from its sources (`launcher`, `router`,
`backends/v3` of 3.3.6); no server was run:

- A request's `model` chooses an adapter; an unknown name is the base model. Answers carry the model's id.
- Above `--max-concurrent-requests` it answers 429.
- `/health` is served once the shards are warm. On SIGTERM the router finishes running requests, for 90 s or
  `--graceful-termination-timeout`.
- An argument that is given twice ends it at its start. Each has a variable (`--max-total-tokens`: MAX_TOTAL_TOKENS),
  which it overrides.
- Adapters are loaded at its start only. It has no route for embeddings.
- A step is an inference call, for the prefill of new requests or for a token of each; their durations are counted.
- Its mean time per token includes the prefill, so it is no TPOT, and no metric has a TTFT.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from plimsoll.engines.engine import Engine, Feature, Launch, MetricMap, Signal, Source, last_count

MAX_CONCURRENT: Final = ("--max-concurrent-requests",)
MAX_BATCH: Final = ("--max-batch-size",)
MAX_PREFILL: Final = ("--max-batch-prefill-tokens",)
MAX_TOTAL_TOKENS: Final = ("--max-total-tokens",)
DEFAULT_CONCURRENT: Final = 128
RESERVED_FLAGS: Final = ("--model-id", "--revision", "--hostname", "--port", "-p", "--api-key", "--num-shard")
RESERVED_VARIABLES: Final = ("API_KEY", "REVISION", "NUM_SHARD")  # the other flags are always set
ARGUMENT_VARIABLES: Final = (
    ("MAX_CONCURRENT_REQUESTS", MAX_CONCURRENT[0]),
    ("MAX_BATCH_SIZE", MAX_BATCH[0]),
    ("MAX_TOTAL_TOKENS", MAX_TOTAL_TOKENS[0]),
)


def _own_args(launch: Launch) -> tuple[str, ...]:
    return (
        *("--model-id", launch.model),
        *(("--revision", launch.revision) if launch.revision else ()),
        *(("--num-shard", str(launch.gpus)) if launch.gpus > 1 else ()),
        *("--hostname", "0.0.0.0", "--port", str(launch.port)),
    )


def _max_batch(args: Sequence[object]) -> int | None:
    return last_count(args, MAX_BATCH)


def _max_length(args: Sequence[object]) -> int | None:
    return last_count(args, MAX_TOTAL_TOKENS)


def _max_prefill(args: Sequence[object]) -> int | None:
    return last_count(args, MAX_PREFILL)


def _queue_limit(args: Sequence[object], default: int, per_sequence: int) -> int | None:
    return last_count(args, MAX_CONCURRENT) or DEFAULT_CONCURRENT


METRICS: Final = MetricMap(
    engine="TGI",
    prefix="tgi_",
    signals=(
        (Signal.RUNNING, (Source("tgi_batch_current_size"),)),
        (Signal.WAITING, (Source("tgi_queue_size"),)),
        (Signal.STEPS, (Source("tgi_batch_inference_count"),)),
        (Signal.BUSY_SECONDS, (Source("tgi_batch_inference_duration_sum"),)),
        (Signal.PREFILL_SECONDS, (Source("tgi_batch_inference_duration_sum", "method", "prefill"),)),
        (Signal.PROMPT_TOKENS, (Source("tgi_request_input_length"),)),
        (Signal.OUTPUT_TOKENS, (Source("tgi_request_generated_tokens"),)),
    ),
)

TGI: Final = Engine(
    name="tgi",
    title="TGI",
    features=frozenset({Feature.REVISION, Feature.DRAIN_ON_TERM}),
    metrics=METRICS,
    default_sequences=DEFAULT_CONCURRENT,
    reserved_flags=RESERVED_FLAGS,
    reserved_variables=RESERVED_VARIABLES,
    argument_variables=ARGUMENT_VARIABLES,
    own_args=_own_args,
    command=("text-generation-launcher",),
    max_sequences=_max_batch,
    max_model_len=_max_length,
    queue_limit=_queue_limit,
    token_budget=_max_prefill,
)
