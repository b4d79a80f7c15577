"""A simulated engine's metrics as the operator's scrape reads them."""

from __future__ import annotations

from plimsoll.core.ports import BucketCounts, EngineReading
from plimsoll.sim.engine.engine_metrics import EngineMetrics, MetricHistogram
from plimsoll.sim.engine.simulated_engine import SimulatedEngine


def scrape(engine: SimulatedEngine, pod: str, now_s: float, at_s: float) -> EngineReading:
    """The engine's metrics now; at_s: the same moment in seconds since the epoch."""
    engine.count_steps(now_s)
    waiting = len(engine.waiting) + len(engine.loading_kv)
    return reading(engine.metrics, pod, at_s, engine.running, waiting, engine.kv_cache.used_share)


def reading(metrics: EngineMetrics, pod: str, at_s: float, running: int, waiting: int, kv_used: float) -> EngineReading:
    """The reading of a scrape at at_s (seconds since the epoch)."""
    return EngineReading(
        pod=pod,
        at_s=at_s,
        instance_id=pod,
        running=running,
        waiting=waiting,
        kv_used=kv_used,
        steps=metrics.steps,
        computed_tokens=metrics.local_prompt_tokens + metrics.generated_tokens,
        generated_tokens=metrics.generated_tokens,
        local_prompt_tokens=metrics.local_prompt_tokens,
        cached_prompt_tokens=metrics.cached_prompt_tokens,
        transferred_prompt_tokens=metrics.transferred_prompt_tokens,
        preemptions=metrics.preemptions,
        post_s=metrics.post_s,
        transfer_s=metrics.transfer_s,
        prefill_s=metrics.prefill_s,
        decode_s=metrics.decode_s,
        prompt_tokens=_buckets(metrics.prompt_tokens),
        output_tokens=_buckets(metrics.output_tokens),
        tpot_s=_buckets(metrics.tpot_s),
        ttft_s=_buckets(metrics.ttft_s),
        itl_s=_buckets(metrics.itl_s),
    )


def _buckets(histogram: MetricHistogram) -> BucketCounts:
    return BucketCounts(histogram.edges, tuple(histogram.counts), histogram.total)
