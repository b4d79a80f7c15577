"""Readings of engines and gateways: one source at one moment.

Problem: sources differ in what they export. They restart, stop responding and change in number, and a sum over them
must not hide that.

Idea: adapters fill these records and interpret nothing. Counts are since the source's start, which `instance_id`
identifies, so that a restart is detected. What a source does not export is None, never 0. Durations are in seconds.
Times are Unix times in seconds by the reader's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

# Reasons of a gateway's rejections that no capacity would cure. Such a request is no demand and violates no SLO.
NO_DEMAND_REASONS: Final = frozenset(
    {
        "body_too_large",
        "deadline_too_short",
        "duplicate_key",
        "expired_api_key",
        "gateway_busy",
        "gateway_full",
        "invalid_api_key",
        "invalid_encoding",
        "invalid_form",
        "invalid_json",
        "invalid_timeout",
        "invalid_token",
        "missing_api_key",
        "model_not_allowed",
        "model_not_found",
        "model_required",
        "quota_exceeded",
        "rate_limit_exceeded",
        "request_too_large",
        "route_not_served",
        "unsupported_field",
    }
)


class BucketCounts(NamedTuple):
    """A histogram since its source's start.

    edges: ascending upper bounds, the last infinite. counts: not cumulative, one per edge. value_sum: sum of values.
    """

    edges: tuple[float, ...]
    counts: tuple[float, ...]
    value_sum: float


class SloCounts(NamedTuple):
    """Responses that a gateway compared with the targets of their class and prompt length.

    missed: those that missed TTFT or the end-to-end latency; ttft_missed, e2e_missed: those that missed each.
    """

    responses: float
    missed: float
    ttft_missed: float
    e2e_missed: float


class GatewayConfigState(NamedTuple):
    """The configuration of a service that a gateway uses.

    version: resourceVersion of the InferenceService. admission_enabled: whether admission uses a cost model that the
    operator published. parse_error: what cannot be parsed, and why; "" if all can. limits_version: resourceVersion of
    the InferenceServiceAdmission, "" without one, None from a release that does not read it.
    """

    version: str
    admission_enabled: bool
    parse_error: str = ""
    limits_version: str | None = None


@dataclass(frozen=True, slots=True)
class EngineReading:
    """One engine's metrics at one moment.

    kv_used: share of the KV cache. steps, computed_tokens: engine steps, and the prompt and output tokens that they
    computed. local_prompt_tokens: prompt tokens computed here; cached_prompt_tokens: those that a prefix hit saved;
    transferred_prompt_tokens: those whose KV came from another engine or from CPU memory. draft_tokens,
    accepted_draft_tokens: tokens that speculative decoding drafted, and those accepted. post_s, transfer_s: time
    spent in posting KV reads and in KV transfers. all_prompt_tokens: prompt tokens, cached ones included. prefill_s,
    decode_s: time that requests spent in prefill, and between their first and last token. busy_s: time in which steps
    ran. prompt_tokens, output_tokens, tpot_s, ttft_s: histograms over completed requests. itl_s: histogram over all
    inter-token latencies. kv_tokens, block_tokens: tokens that the KV cache and one of its blocks hold.
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
    draft_tokens: float | None = None
    accepted_draft_tokens: float | None = None
    all_prompt_tokens: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    busy_s: float | None = None
    kv_tokens: float | None = None
    block_tokens: float | None = None
    prompt_tokens: BucketCounts | None = None
    output_tokens: BucketCounts | None = None
    tpot_s: BucketCounts | None = None
    ttft_s: BucketCounts | None = None
    itl_s: BucketCounts | None = None


@dataclass(frozen=True, slots=True)
class ServiceReading:
    """Counts of one service at one gateway replica.

    arrived: first attempts that are demand: served, or rejected for lack of capacity; arrived_tokens: their estimated
    prompt tokens; arrived_media_tokens: those of them that are no text, by kind (`MediaKind`); arrived_by_class: the
    first attempts by request class.
    retried: further attempts of the same requests.
    succeeded, failed, cancelled: completed requests. rejected: by reason.
    ttft_s, e2e_s: from receipt to the first and to the last byte of the response, over succeeded requests.
    slo_counts: those of them with an SLO; by_tpot_target: their number by TPOT target (s).
    queued: requests queued now; queued_work_s: their GPU-seconds.
    reserved_work_s: GPU-seconds of retry reservations that are not due.
    slot_limit: sequences that it may have at each engine; slots_in_use: the most that it has at one.
    outcomes: of admission, by name. inflight: requests at each engine now, by pod. config_state: configuration in use.
    A gateway of an older release reports no tokens, ttft_s, e2e_s, slo_counts, by_tpot_target and config_state, no
    classes, and nothing of admission.
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
    arrived_media_tokens: Mapping[str, float] = field(default_factory=dict)
    arrived_by_class: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GatewayReading:
    """One gateway replica at one moment. services: by NAMESPACE/NAME. instance_id: "" if it is not reported."""

    gateway: str
    at_s: float
    instance_id: str
    services: Mapping[str, ServiceReading]


class SelfBenchmark(NamedTuple):
    """Measurements of an engine's warm-up, without other load.

    prefill: (prompt tokens, seconds to the first token) of single requests. decode: (sequences, context tokens of each,
    seconds for each further token) of batches. is_observed: whether they are means of requests under load instead.
    """

    prefill: tuple[tuple[int, float], ...]
    decode: tuple[tuple[int, int, float], ...]
    is_observed: bool = False


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of an engine, as its launcher reports them; None if it cannot determine one.

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
    """Request history of services from before this process, from a metrics store. It is slow and optional."""

    def request_rate(self, service: str, start_s: float, end_s: float) -> Sequence[tuple[float, float]]:
        """First attempts of a service (NAMESPACE/NAME), by minute, oldest first: the minute's end and requests per s.

        start_s, end_s: Unix times in seconds. Minutes without samples are absent. Blocks; raises BackendUnavailable.
        """
        ...
