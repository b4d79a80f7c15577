"""Metrics of one service, as inputs of a scaling decision. Missing data are `Unavailable`, never 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from plimsoll.core.autoscaling.observations import LaggingSignals
from plimsoll.core.demand.skipped_prefill import SkippedPrefill
from plimsoll.core.engine_model.calibration.counter_window import WindowSums
from plimsoll.core.engine_model.kv_transfer import TransferStats
from plimsoll.core.engine_model.measured_limits import EngineBatch
from plimsoll.core.ports import BucketCounts, SloCounts
from plimsoll.core.types import Role, Unavailable
from plimsoll.core.workload import Workload

NO_DATA: Final = Unavailable("neither gateways nor engines have reported it yet")
NO_TRANSFERS: Final = TransferStats(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class TierMetrics:
    """Metrics of one tier's engines. All but `windows` cover the last minute or the present.

    lagging: SLO percentiles of completed requests. Its `waiting` and `preemptions_per_s` are sums over the tier, scaled
    up to all its pods; `kv_used` is that of the fullest pod. coverage: share of the tier's pods with a fresh reading; 1
    for a tier without pods, whose other metrics are unavailable. silent: the other pods, in order, if some report.
    age_s: age of the oldest of these readings. windows: busy windows since the last call. batches: what
    readings since then show of single engines that exist. in_flight: requests in the engines that report, queued ones
    included. kv_post_share: share of a pod's time spent in posting KV reads. tpot_histogram: times per output token of
    completed requests with at least two tokens, None where engines do not report them. completed: requests.
    draft_acceptance: share of the tokens drafted by speculative decoding that engines accepted.
    """

    lagging: LaggingSignals = field(default_factory=LaggingSignals)
    coverage: float = 0.0
    age_s: float | None = None
    windows: tuple[WindowSums, ...] = ()
    batches: tuple[EngineBatch, ...] = ()
    in_flight: float | Unavailable = NO_DATA
    kv_post_share: float | Unavailable = NO_DATA
    tpot_histogram: BucketCounts | None = None
    completed: float = 0.0
    draft_acceptance: float | Unavailable = NO_DATA
    silent: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServiceMetrics:
    """Metrics of one service. Rates are means since the last sample, and sums over all gateways, silent ones included.

    rate_per_s: first attempts. has_new_rate: whether there is a new rate since the last call; an old rate is no new
    sample. coverage: share of the gateways with a fresh reading, 0 without any. silent: the others, in order, if some
    report. age_s: age of the oldest of these readings. mean_prompt_tokens: mean over the arrivals of the last minute.
    token_ratios: counted over estimated prompt tokens by kind of content, empty where the estimate is close. workload:
    requests of the last minutes, with prompts scaled to `mean_prompt_tokens` where that differs by more than a tenth.
    ttft_s: SLO percentile of TTFT as clients saw it, last minute; ttft_histogram: its distribution. e2e_s: the same
    percentile of the end-to-end latency. slo_counts: the last minute's responses against the SLO; None where gateways
    do not report them. by_tpot_target: how many of those had which TPOT target (s); the rest had none. arrivals: first
    attempts, last minute; arrivals_by_class: those by request class. rejected_share: rejections over these. queued:
    requests that wait at the gateways now; queued_work_s: their GPU-seconds in the tier that generates responses.
    reserved_work_s: GPU-seconds there of rejected requests with a retry reservation, until it is due. Retries are no
    arrivals, so no rate includes them. in_flight: requests that gateways have sent to engines and that have not ended.
    transfer_stats: KV that decode engines received from prefill engines, over about ten minutes. gateway_count:
    existing gateways. quiet_s: seconds for which every gateway has reported, without a gap, that no request arrives,
    ends, waits or runs; 0 unless all gateways report. is_measured_at_engines: whether requests pass no gateway, so that
    engines report what gateways do otherwise. skipped_prefill: requests at decode engines that no prefill engine has
    seen, which `rate_per_s` lacks; None for none.
    """

    rate_per_s: float | Unavailable = NO_DATA
    has_new_rate: bool = False
    coverage: float = 0.0
    age_s: float | None = None
    succeeded_per_s: float | Unavailable = NO_DATA
    failed_per_s: float | Unavailable = NO_DATA
    mean_prompt_tokens: float | Unavailable = NO_DATA
    token_ratios: Mapping[str, float] = field(default_factory=dict)
    workload: Workload | Unavailable = NO_DATA
    ttft_s: float | Unavailable = NO_DATA
    ttft_histogram: BucketCounts | None = None
    is_measured_at_engines: bool = False
    e2e_s: float | Unavailable = NO_DATA
    slo_counts: SloCounts | None = None
    by_tpot_target: Mapping[float, float] | None = None
    arrivals: float = 0.0
    arrivals_by_class: Mapping[str, float] = field(default_factory=dict)
    rejected_share: float | Unavailable = NO_DATA
    queued: float | Unavailable = NO_DATA
    queued_work_s: float | Unavailable = NO_DATA
    reserved_work_s: float | Unavailable = NO_DATA
    in_flight: float | Unavailable = NO_DATA
    transfer_stats: TransferStats = NO_TRANSFERS
    gateway_count: int = 1
    quiet_s: float = 0.0
    skipped_prefill: SkippedPrefill | None = None
    tiers: Mapping[Role, TierMetrics] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
