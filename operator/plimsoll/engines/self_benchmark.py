"""Self-benchmark: the speed of the warm, otherwise idle engine, by a few requests.

Problem: a fleet must be sized before an engine has served requests, and many accelerators are in no table. Idea: single
prompts of some lengths give the time to the first token: a request for one token that is not streamed ends with it.
Batches of some sizes give the time of each further token: the time of more tokens beyond the first, so that HTTP and
prefill cancel out. One more batch has long contexts, so that the time to read them shows. Its prompts are computed once
and then come from the prefix cache, because the noise of a long prefill would hide the effect.

Every round measures all points, and a slow engine has fewer rounds. The shortest time of all rounds counts, because
neighbours on a node only add to it. Twelve benchmarks of a tiny model on two busy cores had a base of 4.5 to 8.9 ms
that way, by medians 5.0 to 14.1; alone on an H200 a step's p95 is within 5 % of its median, so it makes no difference.
Times are the client's, HTTP included.

`make generate` copies this module and `prompts` to `engine-image/launcher`: the launcher benchmarks its engine on
loopback, and `plimsoll profile` one at a URL. Its imports hold in both packages.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .prompts import COMPLETIONS_PATH, PromptFactory

log = logging.getLogger(__name__)


class Response(Protocol):
    """Status and body of an answer."""

    @property
    def status(self) -> int: ...

    @property
    def body(self) -> bytes: ...


# (path, JSON body) -> answer; raises OSError, TimeoutError or ValueError
SendRequest = Callable[[str, bytes], Awaitable[Response]]

# What is timed (sequences, prompt tokens, output tokens of each) -> the shortest of its times so far, in seconds.
ShortestTimes = dict[tuple[int, int, int], float]


@dataclass(frozen=True)
class SelfBenchmark:
    """prefill: (prompt tokens, seconds to the first token). decode: (sequences, context tokens, seconds per token)."""

    prefill: tuple[tuple[int, float], ...]
    decode: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class BenchmarkSettings:
    """Settings of the self-benchmark: rounds, output tokens of a batch's requests, and its total time limit."""

    repeats: int
    output_tokens: int
    timeout_seconds: float


@dataclass(frozen=True)
class BenchmarkPlan:
    """What to time: single prompts of these lengths, then batches with prompts of the shortest length.

    long_prompt_tokens: prompt tokens of one more batch of the largest size; None if it does not fit.
    """

    prompt_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    long_prompt_tokens: int | None
    settings: BenchmarkSettings

    @property
    def shortest_prompt_tokens(self) -> int:
        """Prompt tokens of a batch's requests."""
        return min(self.prompt_tokens, default=0)

    @property
    def requests(self) -> int:
        """Requests that all rounds send."""
        round_requests = len(self.prompt_tokens) + 2 * sum(self.batches)
        long_requests = (1 + 2 * self.settings.repeats) * max(self.batches, default=0)
        return self.settings.repeats * round_requests + (0 if self.long_prompt_tokens is None else long_requests)


def plan_benchmark(
    settings: BenchmarkSettings,
    prompt_tokens: Sequence[int],
    batches: Sequence[int],
    *,
    role: str,
    max_model_len: int,
    max_sequences: int | None,
    kv_tokens: int | None,
) -> BenchmarkPlan:
    """Return a plan of these prompts and batches within the model's length, the slots and, for the long batch, half of
    the cache; none of decode for a prefill engine.

    An unknown slot limit counts as sufficient, an unknown cache does not.
    """
    output_tokens = settings.output_tokens
    lengths = tuple(tokens for tokens in prompt_tokens if tokens + 1 <= max_model_len)
    sizes = tuple(size for size in batches if size <= (max_sequences or size))
    if role == "prefill" or not lengths or min(lengths) + output_tokens > max_model_len:
        return BenchmarkPlan(lengths, (), None, settings)
    longest = max(lengths) + output_tokens
    long_fits = longest <= max_model_len and max(sizes, default=0) * longest <= (kv_tokens or 0) / 2
    long_prompt_tokens = max(lengths) if long_fits and sizes and len(lengths) > 1 else None
    return BenchmarkPlan(lengths, sizes, long_prompt_tokens, settings)


async def run(
    send_request: SendRequest, plan: BenchmarkPlan, prompts: PromptFactory, clock: Callable[[], float], seconds: float
) -> SelfBenchmark | None:
    """Measure for at most `seconds`, without errors; returns None if nothing could be measured."""
    timer = _BatchTimer(send_request, prompts, clock)
    times: ShortestTimes = {}
    long_times: ShortestTimes = {}
    started, round_seconds = clock(), 0.0
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            for _ in range(plan.settings.repeats):
                round_started = clock()
                if round_started - started + round_seconds > seconds:
                    break
                await _measure_round(timer, plan, times)
                round_seconds = clock() - round_started
            if plan.long_prompt_tokens is not None and _long_prefill_s(plan, times) <= seconds - (clock() - started):
                await _measure_long(timer, plan, plan.long_prompt_tokens, long_times)
    except (OSError, TimeoutError, ValueError) as error:
        log.warning("the self-benchmark ended early: %s: %s", type(error).__name__, error)
    return _to_result(plan, times, long_times)


@dataclass(frozen=True)
class _BatchTimer:
    send_request: SendRequest
    prompts: PromptFactory
    clock: Callable[[], float]

    def new_prompts(self, size: int, tokens: int) -> list[list[int]]:
        return [self.prompts.new_prompt(tokens) for _ in range(size)]

    async def measure(self, prompts: list[list[int]], outputs: int, times: ShortestTimes) -> None:
        """Store the seconds until the last of the prompts has all its tokens, if all get them."""
        bodies = [self.prompts.completion_request(prompt, outputs) for prompt in prompts]
        started = self.clock()
        requests = [asyncio.ensure_future(self.send_request(COMPLETIONS_PATH, body)) for body in bodies]
        try:
            responses = await asyncio.gather(*requests)
        finally:  # after an error the others would run on
            for request in requests:
                request.cancel()
        elapsed = self.clock() - started
        if all(answer.status == 200 and generated_tokens(answer.body) == outputs for answer in responses):
            key = (len(prompts), len(prompts[0]), outputs)
            times[key] = min(elapsed, times.get(key, elapsed))


async def _measure_round(timer: _BatchTimer, plan: BenchmarkPlan, times: ShortestTimes) -> None:
    """Time all points with prompts of their own once."""
    for tokens in plan.prompt_tokens:
        await timer.measure(timer.new_prompts(1, tokens), 1, times)
    for size in plan.batches:
        for outputs in (1, plan.settings.output_tokens):
            await timer.measure(timer.new_prompts(size, plan.shortest_prompt_tokens), outputs, times)


def _long_prefill_s(plan: BenchmarkPlan, times: ShortestTimes) -> float:
    """Return the expected prefill time of the long batch; infinite if no single prompt was measured."""
    return max(plan.batches) * times.get((1, plan.long_prompt_tokens or 0, 1), math.inf)


async def _measure_long(timer: _BatchTimer, plan: BenchmarkPlan, tokens: int, times: ShortestTimes) -> None:
    """Time the batch of long contexts, whose prompts the first request puts into the prefix cache."""
    prompts = timer.new_prompts(max(plan.batches), tokens)
    await timer.measure(prompts, 1, {})
    for _ in range(plan.settings.repeats):
        for outputs in (1, plan.settings.output_tokens):
            await timer.measure(prompts, outputs, times)


def generated_tokens(body: bytes) -> object:
    """Return the token count in a response's usage: a response that ended early would make the engine look fast."""
    try:
        return json.loads(body)["usage"]["completion_tokens"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def _to_result(plan: BenchmarkPlan, times: ShortestTimes, long_times: ShortestTimes) -> SelfBenchmark | None:
    """Return the points; a batch that took no longer for more tokens was disturbed, and is left out."""
    prefill = tuple((tokens, times[1, tokens, 1]) for tokens in plan.prompt_tokens if (1, tokens, 1) in times)
    decode = [_decode_point(plan, times, size, plan.shortest_prompt_tokens) for size in plan.batches]
    decode += (
        [_decode_point(plan, long_times, max(plan.batches), plan.long_prompt_tokens)]
        if plan.long_prompt_tokens is not None
        else []
    )
    result = SelfBenchmark(prefill, tuple(point for point in decode if point is not None))
    return result if result.prefill or result.decode else None


def _decode_point(plan: BenchmarkPlan, times: ShortestTimes, size: int, tokens: int) -> tuple[int, int, float] | None:
    outputs = plan.settings.output_tokens
    first_s, total_s = times.get((size, tokens, 1)), times.get((size, tokens, outputs))
    if first_s is None or total_s is None or total_s <= first_s:
        return None
    return size, tokens + outputs // 2, (total_s - first_s) / (outputs - 1)
