"""A benchmark from what an engine has served: the first step-time model of one that was never benchmarked.

Problem: an engine without Plimsoll's launcher reports no benchmark of its warm-up. Without a first model of its steps
nothing can be sized, and calibration corrects a model only within bounds.

Idea: means over its requests are a benchmark. The prefill is the time that requests spent in it, where an engine counts
it. Else it is the time to the first token since the first reading. First tokens of a loaded engine wait for others, so
the mean counts at most as twice the lower quartile, which it is for the lengths of a chat, and as the time that passed
per request: no prefill takes longer than all of the time. The decode is the mean time per token at the mean batch, less
the prefills that ran in between. The batch is tokens over counted steps, else tokens times their time over the time
that passed (Little 1961). Engines that count steps and prefill need no first reading: the means of their life count.

An engine of a pair shows one of the two. One mean does not tell the part of a step that depends on its size from the
part that does not. So a division is assumed, not measured, until calibration corrects it: a base of a fifth of a mean
prompt's prefill, and a decode base that is as long as 32 sequences.
"""

from __future__ import annotations

import math
from typing import Final

from plimsoll.core.capacity.tier_model import HTTP_OVERHEAD_S
from plimsoll.core.histogram import difference, quantile, total_count
from plimsoll.core.ports import BucketCounts, EngineReading, SelfBenchmark
from plimsoll.core.types import Role

MIN_REQUESTS: Final = 20.0  # before their means count as a benchmark
_MIN_TOKENS: Final = 2000.0  # generated ones, where requests are not counted
_TYPICAL_PROMPT: Final = 1000.0  # tokens, where requests are not counted: only the time per token matters then
_TYPICAL_CONTEXT: Final = 1100.0
_MEAN_TO_QUARTILE: Final = 2.0  # of lognormal lengths with a standard deviation of 0.7
_MIN_DECODE_SHARE: Final = 0.2  # of the time per token, whatever prefills seem to take
_PREFILL_BASE_SHARE: Final = 0.2  # of a mean prompt's prefill, at an engine that decodes nothing
_BASE_SEQUENCES: Final = 32.0  # sequences that take as long as the base of a step, at an engine that prefills nothing


def observed_benchmark(reading: EngineReading, first: EngineReading, role: Role) -> SelfBenchmark | None:
    """The means of an engine's requests as a benchmark; None where too few were served, or too little is reported.

    first: the engine's first reading. role: of its tier.
    """
    is_lifetime = reading.prefill_s is not None and bool(reading.steps)
    work = _Work(reading, None if is_lifetime else first)
    if not work.generated or not work.prompt:
        return None
    if work.requests is not None:
        has_enough = work.requests >= MIN_REQUESTS
    else:
        has_enough = role is Role.SERVE and work.generated >= _MIN_TOKENS
    if not has_enough:
        return None
    if role is Role.DECODE:
        return None if (step_s := work.step_s()) is None else _of_decode(work, step_s)
    prefill = work.prefill()
    if prefill is None:
        return None
    prefill = prefill[0], min(prefill[1], prefill[0] * _Work(reading, first).seconds_per_prompt_token())
    if role is Role.PREFILL:
        return SelfBenchmark(((1, _PREFILL_BASE_SHARE * prefill[1]), prefill), (), is_observed=True)
    step_s = work.step_s()
    if step_s is None:
        return None
    steps = work.steps_of(step_s)
    decode_s = _without_prefills(step_s, work.prompt / steps, prefill)
    decode = max(1, round(work.generated / steps)), work.context(), decode_s
    return SelfBenchmark((prefill,), (decode,), is_observed=True)


def _of_decode(work: _Work, step_s: float) -> SelfBenchmark:
    """The benchmark of an engine that receives its prompts: the mean batch, and twice as many sequences."""
    sequences, context = max(1, round(work.generated / work.steps_of(step_s))), work.context()
    sequence_s = step_s / (sequences + _BASE_SEQUENCES)
    base_s = _BASE_SEQUENCES * sequence_s
    batches = (sequences, context, step_s), (2 * sequences, context, step_s + sequences * sequence_s)
    return SelfBenchmark(((1, base_s + sequence_s + HTTP_OVERHEAD_S),), batches, is_observed=True)


def _without_prefills(step_s: float, prompt_per_step: float, prefill: tuple[int, float]) -> float:
    """A step's time without the prompt tokens that it computes on average: the prefill is such a step with its own."""
    tokens, prefill_s = prefill
    if tokens <= prompt_per_step:
        return _MIN_DECODE_SHARE * step_s
    token_s = max(0.0, prefill_s - step_s) / (tokens - prompt_per_step)
    return max(_MIN_DECODE_SHARE * step_s, step_s - token_s * prompt_per_step)


class _Work:
    """What an engine did since a reading, or since its start. None or 0 where it does not report it."""

    def __init__(self, reading: EngineReading, since: EngineReading | None) -> None:
        self._reading, self._since = reading, since
        self.seconds = 0.0 if since is None else reading.at_s - since.at_s
        self._prompts, self._outputs = self._histogram("prompt_tokens"), self._histogram("output_tokens")
        ttft = self._histogram("ttft_s")
        counts_prompts = reading.local_prompt_tokens is not None or reading.all_prompt_tokens is not None
        counted = ttft or self._prompts if counts_prompts else self._prompts  # tokens count with the first one
        self.requests = None if counted is None else total_count(counted)
        self._ttft_s = None if ttft is None else _unqueued(ttft)
        self.steps = self._count("steps")
        self.generated = self._count("generated_tokens") or (self._outputs.value_sum if self._outputs else 0.0)
        all_prompts = self._count("all_prompt_tokens") or (self._prompts.value_sum if self._prompts else 0.0)
        self.prompt = self._count("local_prompt_tokens") or all_prompts

    def steps_of(self, step_s: float) -> float:
        """Steps of the time: counted, else as many as fit."""
        return self.steps or max(self.seconds, step_s) / step_s

    def step_s(self) -> float | None:
        """Mean time per output token: by requests, by tokens, by steps."""
        for name in ("tpot_s", "itl_s"):
            histogram = self._histogram(name)
            if histogram is not None and total_count(histogram) >= MIN_REQUESTS and histogram.value_sum > 0.0:
                return _mean(histogram)
        if decode_s := self._count("decode_s"):
            return decode_s / self.generated
        busy_s = self._count("busy_s") - self._count("prefill_s")
        return busy_s / self.steps if busy_s > 0.0 and self.steps else None

    def prefill(self) -> tuple[int, float] | None:
        """Computed prompt tokens of a mean request, and their time."""
        prefill_s = self._count("prefill_s")
        if self.requests is None:
            seconds = prefill_s / self.prompt * _TYPICAL_PROMPT
            return (round(_TYPICAL_PROMPT), seconds) if seconds > 0.0 else None
        if prefill_s > 0.0:
            seconds = prefill_s / self.requests
        elif self._ttft_s:
            seconds = self._ttft_s
        else:
            return None
        return (max(1, round(self.prompt / self.requests)), seconds) if seconds > 0.0 else None

    def seconds_per_prompt_token(self) -> float:
        """Time that passed for each prompt token; infinite if none was computed or no time passed."""
        return self.seconds / self.prompt if self.prompt and self.seconds > 0.0 else math.inf

    def context(self) -> int:
        """Mean tokens that an output token attends to."""
        if self._prompts is None or self._outputs is None:
            return round(_TYPICAL_CONTEXT)
        return max(1, round(_mean(self._prompts) + _mean(self._outputs) / 2.0))

    def _count(self, name: str) -> float:
        now: float = getattr(self._reading, name) or 0.0
        before: float = 0.0 if self._since is None else getattr(self._since, name) or 0.0
        return max(0.0, now - before)

    def _histogram(self, name: str) -> BucketCounts | None:
        now: BucketCounts | None = getattr(self._reading, name)
        before: BucketCounts | None = None if self._since is None else getattr(self._since, name)
        return None if now is None else difference(now, before)


def _unqueued(ttft_s: BucketCounts) -> float:
    """A mean time to the first token without the waits of a loaded engine."""
    quartile = quantile(ttft_s, 0.25)
    return _mean(ttft_s) if quartile is None else min(_mean(ttft_s), _MEAN_TO_QUARTILE * quartile)


def _mean(histogram: BucketCounts) -> float:
    size = total_count(histogram)
    return histogram.value_sum / size if size > 0.0 else 0.0
