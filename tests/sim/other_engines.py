"""Simulated engines whose readings have only what another engine than vLLM reports, and when it reports it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from plimsoll.api.v1alpha1 import InferenceService
from plimsoll.core.autoscaling.inputs import TierSnapshot
from plimsoll.core.autoscaling.scaling_decision import ScalingDecision
from plimsoll.core.engine_model.observed_benchmark import observed_benchmark
from plimsoll.core.histogram import total_count
from plimsoll.core.ports import BucketCounts, EngineInfo, EngineReading, SelfBenchmark
from plimsoll.core.types import Role
from plimsoll.sim.operator import SimulatedOperator

View = Callable[[EngineReading, EngineReading, EngineReading | None], EngineReading]
KV_TOKENS = 400_000


def sglang(reading: EngineReading, previous: EngineReading, seen: EngineReading | None) -> EngineReading:
    """No steps; gauges of the last scrape, more than 40 decode steps ago; decode tokens without the first."""
    assert reading.generated_tokens is not None
    assert reading.ttft_s is not None
    return EngineReading(
        reading.pod,
        reading.at_s,
        reading.instance_id,
        running=previous.running,
        waiting=previous.waiting,
        kv_used=previous.kv_used,
        generated_tokens=reading.generated_tokens - total_count(reading.ttft_s),
        local_prompt_tokens=reading.local_prompt_tokens,
        cached_prompt_tokens=reading.cached_prompt_tokens,
        prompt_tokens=reading.prompt_tokens,
        output_tokens=reading.output_tokens,
        tpot_s=reading.tpot_s,
        ttft_s=reading.ttft_s,
        itl_s=reading.itl_s,
    )


def llama_cpp(reading: EngineReading, previous: EngineReading, seen: EngineReading | None) -> EngineReading:
    """Steps at once, output tokens and their time when a request ends; no histogram at all."""
    assert reading.output_tokens is not None
    return EngineReading(
        reading.pod,
        reading.at_s,
        reading.instance_id,
        running=reading.running,
        waiting=reading.waiting,
        steps=reading.steps,
        generated_tokens=reading.output_tokens.value_sum,
        local_prompt_tokens=reading.local_prompt_tokens,
        cached_prompt_tokens=reading.cached_prompt_tokens,
        prefill_s=reading.prefill_s,
        decode_s=reading.decode_s,
    )


def tensorrt_llm(reading: EngineReading, previous: EngineReading, seen: EngineReading | None) -> EngineReading:
    """Everything changes when a request ends, prompt tokens include cached ones, and no lengths are reported."""
    prompts, outputs, ttft_s = reading.prompt_tokens, reading.output_tokens, reading.ttft_s
    assert prompts is not None
    assert outputs is not None
    assert ttft_s is not None
    return EngineReading(
        reading.pod,
        reading.at_s,
        reading.instance_id,
        running=previous.running,
        waiting=previous.waiting,
        kv_used=previous.kv_used,
        generated_tokens=outputs.value_sum,
        all_prompt_tokens=prompts.value_sum,
        tpot_s=reading.tpot_s,
        ttft_s=_of_completed(ttft_s, total_count(prompts), None if seen is None else seen.ttft_s),
    )


def _of_completed(ttft_s: BucketCounts, completed: float, before: BucketCounts | None) -> BucketCounts:
    """As many first-token times as requests have completed, the newer ones distributed as all are."""
    counts, value_sum = (0.0,) * len(ttft_s.counts), 0.0
    if before is not None:
        counts, value_sum = before.counts, before.value_sum
    share = (completed - sum(counts)) / max(1.0, total_count(ttft_s))
    added = zip(counts, ttft_s.counts, strict=True)
    return BucketCounts(ttft_s.edges, tuple(old + share * n for old, n in added), value_sum + share * ttft_s.value_sum)


VIEWS: dict[str, View] = {"sglang": sglang, "llama-cpp": llama_cpp, "tensorrt-llm": tensorrt_llm}


class OtherEngines(SimulatedOperator):
    """An operator whose engines are another product: it knows no benchmark, accelerator or model."""

    def __init__(self, service: InferenceService, engine: str, max_sequences: int) -> None:
        super().__init__(service)
        self._engine, self._view = engine, VIEWS[engine]
        self._max_sequences = max_sequences
        self._previous: dict[str, EngineReading] = {}
        self._seen: dict[str, EngineReading] = {}
        self._first: dict[str, EngineReading] = {}
        self._benchmark: SelfBenchmark | None = None

    def observe_engine(self, role: Role, reading: EngineReading) -> None:
        seen = self._view(reading, self._previous.get(reading.pod, reading), self._seen.get(reading.pod))
        self._previous[reading.pod], self._seen[reading.pod] = reading, seen
        first = self._first.setdefault(reading.pod, seen)
        self._benchmark = self._benchmark or observed_benchmark(seen, first, Role.SERVE)
        super().observe_engine(role, seen)

    def tick(
        self,
        now_s: float,
        tiers: Mapping[str, TierSnapshot],
        ready: Mapping[Role, Collection[str]],
        gateways: Sequence[str],
    ) -> ScalingDecision:
        info = EngineInfo(
            self._engine,
            self._engine,
            "unknown",
            1,
            max_sequences=self._max_sequences,
            kv_tokens=KV_TOKENS if self._engine == "sglang" else None,
            self_benchmark=self._benchmark,
        )
        known = {name: replace(tier, engine_info=tier.engine_info and info) for name, tier in tiers.items()}
        return super().tick(now_s, known, ready, gateways)
