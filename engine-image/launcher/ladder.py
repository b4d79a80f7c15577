"""How fast the warm engine is, by a few requests to it while nobody else asks.

Problem: before an engine has served anybody, a fleet of it must be sized, and many accelerators are in no table.
Idea: single prompts of some lengths give the time to the first token: a request for one token that is not streamed ends
with it. Batches of some sizes give the time of each further token: what more tokens take beyond the first, so that
HTTP and prefill drop out. One more batch has long contexts, so that their reading shows; its prompts are computed once
and come from the prefix cache then, or a long prefill's noise would hide what is sought.

Every round measures all of it, and a slow engine has fewer rounds. Of the rounds the shortest time counts: neighbours
on a node only ever add to it. Twelve ladders of a tiny model on two busy cores had a base of 4.5 to 8.9 ms that way, by
medians 5.0 to 14.1; alone on an H200 a step's p95 is within 5 % of its median, so that it makes no difference. Times
are the client's, on loopback, HTTP included.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from launcher.contract import Contract, Measuring
from launcher.prompts import COMPLETIONS, Prompts
from launcher.warmup import Ask

log = logging.getLogger(__name__)

# What is timed (sequences, prompt tokens, output tokens of each) -> the shortest of its times so far, in seconds.
Times = dict[tuple[int, int, int], float]


@dataclass(frozen=True)
class Ladder:
    """prefill: (prompt tokens, seconds to the first token). decode: (sequences, context tokens, seconds per token)."""

    prefill: tuple[tuple[int, float], ...]
    decode: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class Plan:
    """What to time: prompt lengths alone, then batch sizes with prompts of the shortest length.

    long: prompt tokens of one more batch, of the largest size; None where it does not fit.
    """

    prompt_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    long: int | None
    measuring: Measuring

    @property
    def shortest(self) -> int:
        """Prompt tokens of a batch's requests."""
        return min(self.prompt_tokens, default=0)


def plan(contract: Contract, role: str, max_model_len: int, max_sequences: int | None, kv_tokens: int | None) -> Plan:
    """What fits the model, the engine's slots and, the long batch, half of its cache; a prefill engine does not decode.

    None for a limit that is not known: slots are taken to be enough, the cache is not.
    """
    outputs, lengths = contract.ladder.output_tokens, contract.warmup.prompt_tokens
    lengths = tuple(tokens for tokens in lengths if tokens + 1 <= max_model_len)
    sizes = tuple(size for size in contract.warmup.batches if size <= (max_sequences or size))
    if role == "prefill" or not lengths or min(lengths) + outputs > max_model_len:
        return Plan(lengths, (), None, contract.ladder)
    longest = max(lengths) + outputs
    fits = longest <= max_model_len and max(sizes, default=0) * longest <= (kv_tokens or 0) / 2
    long = max(lengths) if fits and sizes and len(lengths) > 1 else None
    return Plan(lengths, sizes, long, contract.ladder)


async def run(ask: Ask, plan: Plan, prompts: Prompts, clock: Callable[[], float], seconds: float) -> Ladder | None:
    """Measures for at most `seconds` and never fails: None where nothing could be measured."""
    timer = _Timer(ask, prompts, clock)
    times: Times = {}
    long: Times = {}
    began, took = clock(), 0.0
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            for _ in range(plan.measuring.repeats):
                before = clock()
                if before - began + took > seconds:
                    break
                await _round(timer, plan, times)
                took = clock() - before
            if plan.long is not None and _computing_s(plan, times) <= seconds - (clock() - began):
                await _long_rounds(timer, plan, plan.long, long)
    except (OSError, TimeoutError, ValueError) as error:
        log.warning("the ladder ended early: %s: %s", type(error).__name__, error)
    return _ladder(plan, times, long)


@dataclass(frozen=True)
class _Timer:
    ask: Ask
    prompts: Prompts
    clock: Callable[[], float]

    def new(self, size: int, tokens: int) -> list[list[int]]:
        return [self.prompts.new(tokens) for _ in range(size)]

    async def batch(self, prompts: list[list[int]], outputs: int, times: Times) -> None:
        """Keeps the seconds until the last of the prompts has all its tokens, if each gets them."""
        bodies = [self.prompts.completion(prompt, outputs) for prompt in prompts]
        began = self.clock()
        answers = await asyncio.gather(*(self.ask(COMPLETIONS, body) for body in bodies))
        took = self.clock() - began
        if all(answer.status == 200 and _generated(answer.body) == outputs for answer in answers):
            key = (len(prompts), len(prompts[0]), outputs)
            times[key] = min(took, times.get(key, took))


async def _round(timer: _Timer, plan: Plan, times: Times) -> None:
    """Times once all that has a prompt of its own."""
    for tokens in plan.prompt_tokens:
        await timer.batch(timer.new(1, tokens), 1, times)
    for size in plan.batches:
        for outputs in (1, plan.measuring.output_tokens):
            await timer.batch(timer.new(size, plan.shortest), outputs, times)


def _computing_s(plan: Plan, times: Times) -> float:
    """Seconds that the prompts of the long batch may take; infinite where none of them alone was measured."""
    return max(plan.batches) * times.get((1, plan.long or 0, 1), math.inf)


async def _long_rounds(timer: _Timer, plan: Plan, tokens: int, times: Times) -> None:
    """Times the batch of long contexts, whose prompts the first request leaves in the prefix cache."""
    prompts = timer.new(max(plan.batches), tokens)
    await timer.batch(prompts, 1, {})
    for _ in range(plan.measuring.repeats):
        for outputs in (1, plan.measuring.output_tokens):
            await timer.batch(prompts, outputs, times)


def _generated(body: bytes) -> object:
    """How many tokens an answer has, by its own count: one that ended early would make the engine look fast."""
    try:
        return json.loads(body)["usage"]["completion_tokens"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def _ladder(plan: Plan, times: Times, long: Times) -> Ladder | None:
    """The rungs; a batch that took no longer for more tokens was disturbed, and is left out."""
    prefill = tuple((tokens, times[1, tokens, 1]) for tokens in plan.prompt_tokens if (1, tokens, 1) in times)
    decode = [_rung(plan, times, size, plan.shortest) for size in plan.batches]
    decode += [_rung(plan, long, max(plan.batches), plan.long)] if plan.long is not None else []
    ladder = Ladder(prefill, tuple(rung for rung in decode if rung is not None))
    return ladder if ladder.prefill or ladder.decode else None


def _rung(plan: Plan, times: Times, size: int, tokens: int) -> tuple[int, int, float] | None:
    outputs = plan.measuring.output_tokens
    first, whole = times.get((size, tokens, 1)), times.get((size, tokens, outputs))
    if first is None or whole is None or whole <= first:
        return None
    return size, tokens + outputs // 2, (whole - first) / (outputs - 1)
