"""The engine contract: what Plimsoll knows of a program that serves a model.

Problem: operator, gateway and validation ask the same questions about every engine: how it is started, which arguments
are taken, what its metrics are called, what it cannot do. Answers that are spread over them hold for one engine only.

Idea: one frozen record per engine, in a module of its own. `registry` finds it by the value of `spec.engine.runtime`.
An engine with a launcher runs in Plimsoll's engine image, where the launcher starts it, warms it up and drains it.
Any other runs in the user's image, and Kubernetes probes and stops it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple


class Feature(StrEnum):
    """Something that an engine may or may not have. The value completes "engine X has no ..."."""

    DISAGGREGATION = "prefill and decode tiers"
    LORA = "LoRA adapters that are loaded while it runs"
    EMBED = "task embed"
    SCORE = "task score"
    TRANSCRIBE = "task transcribe"
    REVISION = "choice of a model revision"
    FETCH = "download of s3://, gs:// and https:// models"
    DEFAULT_OUTPUT_LIMIT = "output limit for requests that state none"
    SEVERAL_NODES = "engines of several nodes"
    TARGETS = "metrics by which targets are sized"
    BUNDLED_IMAGE = "bundled image"
    OWN_SERVER = "command, port, health path and metric names of your own"
    TUNING = "arguments that the operator tunes"
    SPECULATION = "speculative decoding"
    KV_OFFLOAD = "KV cache in CPU memory"
    CACHE_SALT = "prefix cache for each tenant"
    DRAIN_ON_TERM = "drain on SIGTERM"


class Signal(StrEnum):
    """A signal of an engine's metrics page. The value is the field of `core.ports.EngineReading` that it fills."""

    RUNNING = "running"
    WAITING = "waiting"
    KV_USED = "kv_used"
    STEPS = "steps"
    STEP_TOKENS = "step_tokens"  # tokens of all steps; releases may count cached prompt tokens too
    GENERATED_TOKENS = "generated_tokens"
    LOCAL_PROMPT_TOKENS = "local_prompt_tokens"
    CACHED_PROMPT_TOKENS = "cached_prompt_tokens"
    TRANSFERRED_PROMPT_TOKENS = "transferred_prompt_tokens"
    PREEMPTIONS = "preemptions"
    DRAFT_TOKENS = "draft_tokens"
    ACCEPTED_DRAFT_TOKENS = "accepted_draft_tokens"
    ALL_PROMPT_TOKENS = "all_prompt_tokens"  # cached ones included
    PREFILL_SECONDS = "prefill_s"  # of requests, or of steps that prefill
    DECODE_SECONDS = "decode_s"  # of requests, between first and last token, counted with GENERATED_TOKENS
    BUSY_SECONDS = "busy_s"  # of steps
    KV_TOKENS = "kv_tokens"  # that the KV cache holds
    KV_BLOCKS = "kv_blocks"  # the same in blocks
    BLOCK_TOKENS = "block_tokens"
    POST_SECONDS = "post_s"
    TRANSFER_SECONDS = "transfer_s"
    PROMPT_TOKENS = "prompt_tokens"
    OUTPUT_TOKENS = "output_tokens"
    TPOT = "tpot_s"
    TTFT = "ttft_s"
    ITL = "itl_s"


HISTOGRAMS: Final = frozenset({Signal.PROMPT_TOKENS, Signal.OUTPUT_TOKENS, Signal.TPOT, Signal.TTFT, Signal.ITL})


class Source(NamedTuple):
    """A metric that has a signal: its name and, if only one value of a label counts, label and value.

    A histogram is named without `_bucket`, `_sum` and `_count`.
    """

    metric: str
    label: str = ""
    value: str = ""


@dataclass(frozen=True)
class MetricMap:
    """Where a metrics page has the signals.

    engine: the program's name in messages. signals: for each the metrics that may have it, the best first; label sets
    of one metric are summed. prefix: what the names of the engine's metrics begin with, "" if nothing is known.
    """

    engine: str
    signals: tuple[tuple[Signal, tuple[Source, ...]], ...]
    prefix: str = ""

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of all metrics, sorted."""
        return tuple(sorted({source.metric for _, sources in self.signals for source in sources}))


# What sizing needs of an engine without a benchmark: of each entry one of the sets of signals.
_SIZING_SIGNALS: Final = (
    ("output tokens", ({Signal.GENERATED_TOKENS}, {Signal.OUTPUT_TOKENS})),
    ("prompt tokens", ({Signal.LOCAL_PROMPT_TOKENS}, {Signal.ALL_PROMPT_TOKENS}, {Signal.PROMPT_TOKENS})),
    (
        "inter-token latency or time per output token",
        ({Signal.ITL}, {Signal.TPOT}, {Signal.DECODE_SECONDS}, {Signal.STEPS, Signal.BUSY_SECONDS}),
    ),
    ("time to first token", ({Signal.TTFT}, {Signal.PREFILL_SECONDS})),
)


def missing_for_sizing(metrics: MetricMap | None) -> tuple[str, ...]:
    """What sizing needs of an engine without a benchmark, and its metrics do not have."""
    found = set() if metrics is None else {signal for signal, sources in metrics.signals if sources}
    return tuple(name for name, choices in _SIZING_SIGNALS if not any(choice <= found for choice in choices))


@dataclass(frozen=True)
class Launch:
    """What a server is started with.

    model: a Hugging Face repository if `from_hub`, else a path in the container. revision: "" for the default one.
    served_name: the model name that answers carry. task: `spec.model.task`.
    """

    model: str
    from_hub: bool
    served_name: str
    task: str
    gpus: int
    port: int
    revision: str = ""


def last_value(args: Sequence[object], flags: Sequence[str]) -> str:
    """The value of the last of several spellings of one flag, as `--flag value` or `--flag=value`; "" without one."""
    found, texts = "", [*map(str, args), ""]
    for argument, following in itertools.pairwise(texts):
        name, equals, value = argument.partition("=")
        if name in flags:
            found = value if equals else following
    return found


def last_count(args: Sequence[object], flags: Sequence[str]) -> int | None:
    """The value of a flag as a count of at least 1; None if it is absent or no such count."""
    value = last_value(args, flags)
    return int(value) or None if value.isascii() and value.isdigit() else None


PROGRESS_SECONDS: Final = 20  # SGLang's HEALTH_CHECK_TIMEOUT


def _no_count(args: Sequence[object]) -> int | None:
    return None


@dataclass(frozen=True)
class Engine:
    """One engine.

    name: value of `spec.engine.runtime`. title: its name in text. metrics: None if the user names the metrics.
    launched: whether Plimsoll's launcher starts it. reserved_flags: flags that Plimsoll sets or relies on.
    reserved_variables: environment variables that set such a flag where Plimsoll does not. argument_variables: those
    that set a flag which is read here, with the flag; an argument overrides its variable.
    default_args: arguments before the user's, by role, task, GPUs, and the user's. own_args: those of an engine
    without a launcher that place model, port and name; command: its entry point, () for that of the image.
    health_path: answers 200 once the engine serves, and never before. progress_path: answers 200 while it computes, and
    another status after at most PROGRESS_SECONDS if it hangs; None if it has none. metrics_path: of its metrics page.
    cache_variables: environment variables that take a folder for downloads, besides HF_HOME. variables: others that
    it is started with, which the user's override. default_sequences: sequences that it runs at once if its arguments do
    not set it. max_sequences, max_model_len: these and the longest sequence in tokens by its arguments, None if they do
    not set it. queue_limit: sequences that it accepts at once, running and queued, by its arguments, a default, and
    queued ones per running one; None: no limit. token_budget, kv_tokens: tokens that it computes in a step, and that
    its KV cache holds, by its arguments, None if they do not set it. default_token_budget: for the former.
    pixel_bounds: pixels to which its arguments have pictures scaled, at least and at most, None if they do not say;
    raises ValueError for arguments with which it does not start.
    """

    name: str
    title: str
    features: frozenset[Feature]
    metrics: MetricMap | None
    default_sequences: int
    launched: bool = False
    reserved_flags: tuple[str, ...] = ()
    reserved_variables: tuple[str, ...] = ()
    argument_variables: tuple[tuple[str, str], ...] = ()
    default_args: Callable[[str, str, int, Sequence[object]], tuple[str, ...]] = lambda role, task, gpus, args: ()
    own_args: Callable[[Launch], tuple[str, ...]] = lambda launch: ()
    command: tuple[str, ...] = ()
    health_path: str = "/health"
    progress_path: str | None = None
    metrics_path: str = "/metrics"
    cache_variables: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    max_sequences: Callable[[Sequence[object]], int | None] = _no_count
    max_model_len: Callable[[Sequence[object]], int | None] = _no_count
    queue_limit: Callable[[Sequence[object], int, int], int | None] = lambda args, default, per_sequence: None
    token_budget: Callable[[Sequence[object]], int | None] = _no_count
    default_token_budget: int | None = None
    kv_tokens: Callable[[Sequence[object]], int | None] = _no_count
    pixel_bounds: Callable[[Sequence[object]], tuple[int | None, int | None]] = lambda args: (None, None)

    def all_args(self, args: Sequence[object], env: object) -> tuple[object, ...]:
        """The arguments, after those that environment variables set; of two equal flags the last counts.

        env: the variables as in a manifest. What has another form, or no literal value, sets nothing.
        """
        entries = [entry for entry in env if isinstance(entry, Mapping)] if isinstance(env, Sequence) else []
        values = {entry.get("name"): entry.get("value") for entry in entries}
        found = ((flag, values.get(name)) for name, flag in self.argument_variables)
        return (*(f"{flag}={value}" for flag, value in found if isinstance(value, str)), *args)
