"""Counters for vLLM's /metrics: the simulated engine's, and those that need a request's whole life.

`exposition` gives the counters vLLM's names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from plimsoll.sim.engine.engine_metrics import EngineMetrics, MetricHistogram, token_bounds
from plimsoll.sim.engine.kv_link import KvLink
from simulated.sequence import ServedSequence

_REQUEST_BOUNDS_S: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_POST_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_DESCRIPTOR_BOUNDS: Final = (10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 200.0, 400.0, 1e3, 2e3, 4e3, 1e4, 2e4, 5e4)
_PREEMPTION_BOUNDS: Final = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


class ServedMetrics(EngineMetrics):
    """Counters of one engine; histograms by their names without `vllm:`.

    max_model_len: decides the bounds of token counts. has_kv_connector: a connector is queried for every prompt.
    """

    def __init__(self, max_model_len: int, has_kv_connector: bool = False) -> None:
        super().__init__(max_model_len, single_token_tpot=True)
        tokens = token_bounds(max_model_len)
        self.has_kv_connector = has_kv_connector
        self.external_hit_tokens = 0
        self.finished: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        self.nixl_counts: Counter[str] = Counter()
        self.histograms = {
            "request_prompt_tokens": self.prompt_tokens,
            "request_generation_tokens": self.output_tokens,
            "iteration_tokens_total": MetricHistogram(tuple(float(2**power) for power in (0, *range(3, 15)))),
            "request_max_num_generation_tokens": MetricHistogram(tokens),
            "request_params_n": MetricHistogram((1.0, 2.0, 5.0, 10.0, 20.0)),
            "request_params_max_tokens": MetricHistogram(tokens),
            "time_to_first_token_seconds": self.ttft_s,
            "inter_token_latency_seconds": self.itl_s,
            "request_time_per_output_token_seconds": self.tpot_s,
            "e2e_request_latency_seconds": MetricHistogram(_REQUEST_BOUNDS_S),
            "request_queue_time_seconds": MetricHistogram(_REQUEST_BOUNDS_S),
            "request_inference_time_seconds": MetricHistogram(_REQUEST_BOUNDS_S),
            "request_prefill_time_seconds": MetricHistogram(_REQUEST_BOUNDS_S),
            "request_decode_time_seconds": MetricHistogram(_REQUEST_BOUNDS_S),
            "request_num_preemptions": MetricHistogram(_PREEMPTION_BOUNDS),
            "request_prefill_kv_computed_tokens": MetricHistogram(tokens),
        }
        self.nixl = {
            "nixl_xfer_time_seconds": MetricHistogram(_POST_BOUNDS_S[1:]),
            "nixl_post_time_seconds": MetricHistogram(_POST_BOUNDS_S),
            "nixl_bytes_transferred": MetricHistogram(tuple(float(2 ** (2 * power + 11)) for power in range(12))),
            "nixl_num_descriptors": MetricHistogram(_DESCRIPTOR_BOUNDS),
        }

    @property
    def external_queried_tokens(self) -> int:
        """Prompt tokens that the connector was queried for: those that were not in the prefix cache."""
        return self.queried_tokens - self.hit_tokens if self.has_kv_connector else 0

    @property
    def all_prompt_tokens(self) -> int:
        """Tokens of prompts that got their first token, from all sources."""
        return self.local_prompt_tokens + self.cached_prompt_tokens + self.transferred_prompt_tokens

    def record_steps(self, steps: int, emitting: int, completions: Sequence[ServedSequence], ended_s: float) -> None:
        """Record equal steps that gave `emitting` tokens each, the last of them at ended_s.

        completions: sequences whose prompt was completed by the only step. For a preempted one, the time since its last
        token is an inter-token latency, as in vLLM.
        """
        computed = 0
        for sequence in completions:
            if not sequence.emitted_tokens:
                computed += sequence.prompt_tokens - sequence.cached_tokens - sequence.transferred_tokens
            elif sequence.last_token_s is not None:
                self.record_itl(ended_s - sequence.last_token_s, 1)
        if emitting:
            self.histograms["iteration_tokens_total"].observe(computed + emitting, steps)

    def record_end(self, sequence: ServedSequence, now_s: float) -> None:
        """Record the end of a sequence, in addition to `record_completion`."""
        assert sequence.outcome is not None
        self.finished[sequence.outcome] += 1
        histograms = self.histograms
        histograms["request_params_max_tokens"].observe(sequence.output_tokens)
        histograms["request_num_preemptions"].observe(sequence.preemptions)
        # with KV from elsewhere vLLM counts the whole prompt here
        histograms["request_prefill_kv_computed_tokens"].observe(sequence.prompt_tokens - sequence.cached_tokens)
        histograms["e2e_request_latency_seconds"].observe(now_s - sequence.arrived_s)
        scheduled_s, first_s, last_s = sequence.scheduled_s, sequence.first_token_s, sequence.last_token_s
        if scheduled_s is None or first_s is None or last_s is None:
            return
        histograms["request_queue_time_seconds"].observe(scheduled_s - sequence.arrived_s)
        histograms["request_inference_time_seconds"].observe(last_s - scheduled_s)
        histograms["request_prefill_time_seconds"].observe(first_s - scheduled_s)
        histograms["request_decode_time_seconds"].observe(last_s - first_s)

    def record_early_end(self, sequence: ServedSequence, now_s: float) -> None:
        """Record the end of a sequence that the engine ended before its last token."""
        if sequence.first_token_s is None or sequence.last_token_s is None:
            self.prompt_tokens.observe(sequence.prompt_tokens)
            self.output_tokens.observe(sequence.emitted_tokens)
        else:
            stream_s = sequence.last_token_s - sequence.first_token_s
            self.record_completion(sequence.prompt_tokens, sequence.emitted_tokens, stream_s)
        self.record_end(sequence, now_s)

    def record_kv_fetch(self, kv_link: KvLink, tokens: int) -> None:
        """Record a KV transfer of `tokens` tokens from another engine."""
        post_s = kv_link.post_s(tokens)
        self.nixl["nixl_post_time_seconds"].observe(post_s)
        self.nixl["nixl_xfer_time_seconds"].observe(kv_link.transfer_s(tokens) + post_s)
        self.nixl["nixl_bytes_transferred"].observe(kv_link.transfer_bytes(tokens))
        self.nixl["nixl_num_descriptors"].observe(kv_link.descriptors(tokens))
        self.external_hit_tokens += tokens
