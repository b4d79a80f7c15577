"""What the outside tells about a fleet, as values: one reading of one source at one moment.

Problem: sources differ in what they export, restart, fall silent and come in any number; a sum over them that does not
say so lies.

Idea: adapters put what they read into these records and judge nothing. Counts are since the source's start; `born`
names that start, so that a new one is seen. What a source does not export is None, never 0. All times are seconds, all
points in time seconds since the epoch by the reader's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class BucketCounts(NamedTuple):
    """A histogram since its source's start: ascending upper edges, the last infinite; counts in each; sum of values.

    counts are not cumulated and have one entry an edge.
    """

    edges: tuple[float, ...]
    counts: tuple[float, ...]
    value_sum: float


class SloCounts(NamedTuple):
    """Answers that a gateway has held against what was promised of each, by its class and the length of its prompt.

    missed: those too late with their first token or with their last one; ttft, e2e: with the one, and with the other.
    """

    responses: float
    missed: float
    ttft_missed: float
    e2e_missed: float


class GatewayConfigState(NamedTuple):
    """What a gateway goes by of a service. version: of the object, as the API server counts. gated: whether requests
    are let in by the model in it. unread: what of it cannot be read, and why; "" where nothing is."""

    version: str
    admission_enabled: bool
    parse_error: str = ""


@dataclass(frozen=True, slots=True)
class EngineReading:
    """One engine's own metrics at one moment.

    kv_used: share of the KV cache. steps, computed_tokens: engine steps and the tokens that they computed, prompts and
    outputs. local_prompt_tokens: prompt tokens computed here; cached_prompt_tokens: those that a prefix hit saved;
    moved_prompt_tokens: those whose KV came from another engine. post_s, transfer_s: time spent in posting KV reads and
    in KV transfers. prompt_tokens, output_tokens, tpot_s, ttft_s: histograms over ended requests. gaps_s: over all gaps
    between two tokens of an answer.
    """

    pod: str
    at_s: float
    instance_id: str
    running: float | None = None
    waiting: float | None = None
    kv_used: float | None = None
    steps: float | None = None
    computed_tokens: float | None = None
    generated_tokens: float | None = None
    local_prompt_tokens: float | None = None
    cached_prompt_tokens: float | None = None
    transferred_prompt_tokens: float | None = None
    preemptions: float | None = None
    post_s: float | None = None
    transfer_s: float | None = None
    prompt_tokens: BucketCounts | None = None
    output_tokens: BucketCounts | None = None
    tpot_s: BucketCounts | None = None
    ttft_s: BucketCounts | None = None
    itl_s: BucketCounts | None = None


@dataclass(frozen=True, slots=True)
class ServiceReading:
    """What one gateway replica counted of one service.

    arrived: first attempts, before anything was refused; arrived_tokens: their prompt tokens as estimated from bytes.
    retried: further attempts of the same requests. ended: answered, failed or cancelled. refused: by reason.
    ttft_s, e2e_s: from a request's receipt to the first and to the last byte of its answer, of those answered; judged:
    those of these of which something was promised; paced: how many of those were promised which time per output token
    (s), the rest none. waiting: requests held now, and held_work_s their GPU-seconds.
    ticket_work_s: GPU-seconds of those told to come back, until they are due. units: sequences that it may have at each
    engine; in_use: the most that it has at one. outcomes: of admission, by name. inflight: requests at each engine now,
    by pod. taken: what it goes by. A gateway of an older release tells neither tokens nor ttft_s, e2e_s, judged, paced
    or taken nor anything of admission.
    """

    arrived: float
    arrived_tokens: float | None
    retried: float
    succeeded: float
    failed: float
    cancelled: float
    rejected: Mapping[str, float]
    ttft_s: BucketCounts | None
    queued: float = 0.0
    queued_work_s: float = 0.0
    reserved_work_s: float = 0.0
    slot_limit: int = 0
    slots_in_use: int = 0
    outcomes: Mapping[str, float] = field(default_factory=dict)
    inflight: Mapping[str, int] = field(default_factory=dict)
    e2e_s: BucketCounts | None = None
    slo_counts: SloCounts | None = None
    by_tpot_target: Mapping[float, float] | None = None
    config_state: GatewayConfigState | None = None


@dataclass(frozen=True, slots=True)
class GatewayReading:
    """One gateway replica at one moment. services: by NAMESPACE/NAME. born: "" where it is not told."""

    gateway: str
    at_s: float
    instance_id: str
    services: Mapping[str, ServiceReading]


class SelfBenchmark(NamedTuple):
    """What an engine's own warm-up measured, idle but for itself.

    prefill: (prompt tokens, seconds to the first token) of single requests. decode: (sequences, context tokens of each,
    seconds for each further token) of batches.
    """

    prefill: tuple[tuple[int, float], ...]
    decode: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is, as its launcher says; None where it does not know.

    config: the model's config.json. max_model_len: longest prompt and output together, tokens.
    """

    engine: str
    engine_version: str
    accelerator: str
    gpus: int
    max_sequences: int | None = None
    kv_tokens: int | None = None
    token_budget: int | None = None
    block_tokens: int | None = None
    max_model_len: int | None = None
    config: Mapping[str, object] | None = None
    self_benchmark: SelfBenchmark | None = None


class MetricsHistory(Protocol):
    """What came to services before this process, from a store of metrics; slow, and absent in most installations."""

    def request_rate(self, service: str, start_s: float, end_s: float) -> Sequence[tuple[float, float]]:
        """First attempts of a service (NAMESPACE/NAME), by minute, oldest first: the minute's end and requests per s.

        start_s, end_s: seconds since the epoch. Minutes of which nothing is known are absent. Blocks; raises
        Unavailable.
        """
        ...
