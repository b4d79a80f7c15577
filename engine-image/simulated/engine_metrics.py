"""Counters and histograms of an engine, as plain numbers that a step adds to; `exposition` gives them vLLM's names."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate

from simulated.sequence import EngineSequence


class MetricHistogram:
    """Counts of observations up to each bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Counts a value, several times where several saw the same."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def cumulative(self) -> list[int]:
        """Observations at or below each bound; the last one is all."""
        return list(accumulate(self.counts))


def token_bounds(max_tokens: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to the model's context, as vLLM has them."""
    series = [float(step * 10**power) for power in range(len(str(max_tokens))) for step in (1, 2, 5)]
    return tuple(value for value in series if value <= max_tokens)


_TTFT_BOUNDS_S: tuple[float, ...] = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
)
_TTFT_BOUNDS_S += (20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_TOKEN_BOUNDS_S = (
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_REQUEST_BOUNDS_S: tuple[float, ...] = (
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    50.0,
    60.0,
    120.0,
    240.0,
    480.0,
)
_REQUEST_BOUNDS_S += (960.0, 1920.0, 7680.0)
_POST_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)


class EngineMetrics:
    """What one engine counts; names without `vllm:`. `max_model_len` decides the bounds of token counts.

    `connector`: the engine has a KV connector, which is asked for every prompt.
    """

    def __init__(self, max_model_len: int, has_kv_connector: bool = False) -> None:
        tokens = token_bounds(max_model_len)
        self.has_kv_connector = has_kv_connector
        self.counters: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.histograms = {
            "request_prompt_tokens": MetricHistogram(tokens),
            "request_generation_tokens": MetricHistogram(tokens),
            "iteration_tokens_total": MetricHistogram(tuple(float(2**power) for power in (0, *range(3, 15)))),
            "request_max_num_generation_tokens": MetricHistogram(tokens),
            "request_params_n": MetricHistogram((1.0, 2.0, 5.0, 10.0, 20.0)),
            "request_params_max_tokens": MetricHistogram(tokens),
            "time_to_first_token_seconds": MetricHistogram(_TTFT_BOUNDS_S),
            "inter_token_latency_seconds": MetricHistogram(_TOKEN_BOUNDS_S),
            "request_time_per_output_token_seconds": MetricHistogram(_TOKEN_BOUNDS_S),
            "e2e_request_latency_seconds": MetricHistogram(_REQUEST_BOUNDS_S),
            "request_queue_time_seconds": MetricHistogram(_REQUEST_BOUNDS_S),
            "request_inference_time_seconds": MetricHistogram(_REQUEST_BOUNDS_S),
            "request_prefill_time_seconds": MetricHistogram(_REQUEST_BOUNDS_S),
            "request_decode_time_seconds": MetricHistogram(_REQUEST_BOUNDS_S),
            "request_num_preemptions": MetricHistogram((1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)),
            "request_prefill_kv_computed_tokens": MetricHistogram(tokens),
        }
        self.nixl = {
            "nixl_xfer_time_seconds": MetricHistogram(_POST_BOUNDS_S[1:]),
            "nixl_post_time_seconds": MetricHistogram(_POST_BOUNDS_S),
            "nixl_bytes_transferred": MetricHistogram(tuple(float(2 ** (2 * power + 11)) for power in range(12))),
            "nixl_num_descriptors": MetricHistogram(
                (10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 200.0, 400.0, 1e3, 2e3, 4e3, 1e4, 2e4, 5e4)
            ),
        }
        self._iteration = self.histograms["iteration_tokens_total"]
        self._itl = self.histograms["inter_token_latency_seconds"]

    def record_admission(self, sequence: EngineSequence) -> None:
        """A sequence left the queue for the first time: what the prefix cache was asked for and had."""
        self.counters["prefix_cache_queries"] += sequence.prompt_tokens
        self.counters["prefix_cache_hits"] += sequence.cached_tokens
        if self.has_kv_connector:
            self.counters["external_prefix_cache_queries"] += sequence.prompt_tokens - sequence.cached_tokens

    def record_first_token(self, sequence: EngineSequence, now_s: float) -> int:
        """A first token came out; returns the prompt tokens that were computed for it here."""
        computed = sequence.prompt_tokens - sequence.cached_tokens - sequence.fetched_tokens
        self.counters["prompt_tokens"] += sequence.prompt_tokens
        self.counters["local_compute"] += computed
        self.counters["local_cache_hit"] += sequence.cached_tokens
        self.counters["external_kv_transfer"] += sequence.fetched_tokens
        self.histograms["time_to_first_token_seconds"].observe(now_s - sequence.arrived_s)
        return computed

    def record_iteration(self, computed: int, intervals: dict[float, int], emitted: int) -> None:
        """A step that gave tokens; `gaps` counts sequences by the seconds since their token before."""
        self.counters["generation_tokens"] += emitted
        self._iteration.observe(computed + emitted)
        for interval_s, count in intervals.items():
            self._itl.observe(interval_s, count)

    def record_end(self, sequence: EngineSequence, now_s: float) -> None:
        """A sequence's last token came out, or the engine ended it."""
        assert sequence.outcome is not None
        self.finished[sequence.outcome] += 1
        histograms = self.histograms
        histograms["request_prompt_tokens"].observe(sequence.prompt_tokens)
        histograms["request_generation_tokens"].observe(sequence.emitted_tokens)
        histograms["request_params_max_tokens"].observe(sequence.max_tokens)
        histograms["request_num_preemptions"].observe(sequence.preemptions)
        # with KV from elsewhere vLLM counts the whole prompt here
        histograms["request_prefill_kv_computed_tokens"].observe(sequence.prompt_tokens - sequence.cached_tokens)
        histograms["e2e_request_latency_seconds"].observe(now_s - sequence.arrived_s)
        if sequence.scheduled_s is None or not sequence.emitted_tokens:
            return
        histograms["request_queue_time_seconds"].observe(sequence.scheduled_s - sequence.arrived_s)
        histograms["request_inference_time_seconds"].observe(sequence.last_token_s - sequence.scheduled_s)
        histograms["request_prefill_time_seconds"].observe(sequence.first_token_s - sequence.scheduled_s)
        histograms["request_decode_time_seconds"].observe(sequence.last_token_s - sequence.first_token_s)
        mean = (
            (sequence.last_token_s - sequence.first_token_s) / (sequence.emitted_tokens - 1)
            if sequence.emitted_tokens > 1
            else 0.0
        )
        histograms["request_time_per_output_token_seconds"].observe(mean)

    def record_kv_fetch(
        self, post_s: float, transfer_s: float, transferred_bytes: int, descriptors: int, tokens: int
    ) -> None:
        """KV of a prompt came from another engine."""
        self.nixl["nixl_post_time_seconds"].observe(post_s)
        self.nixl["nixl_xfer_time_seconds"].observe(transfer_s)
        self.nixl["nixl_bytes_transferred"].observe(transferred_bytes)
        self.nixl["nixl_num_descriptors"].observe(descriptors)
        self.counters["external_prefix_cache_hits"] += tokens
