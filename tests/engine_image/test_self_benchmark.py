"""What the warm engine's ladder measures, with an engine whose every time is known, on its own clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from launcher import client, self_benchmark
from launcher.prompts import PromptFactory
from launcher.self_benchmark import BenchmarkPlan, BenchmarkSettings, SelfBenchmark
from tests.engine_image.middleware_harness import CONTRACT

HTTP_S, BASE_S, TOKEN_S, SEQUENCE_S, READ_S = 4e-3, 5e-3, 2e-5, 1e-4, 1e-7
PLAN = BenchmarkPlan((16, 128), (1, 4), None, BenchmarkSettings(3, 11, 60.0))
PLAN_WITH_LONG_BATCH = replace(PLAN, prompt_tokens=(16, 128, 1000), long_prompt_tokens=1000)


@dataclass
class Engine:
    """Requests that come together run together: prefill at once, then a step for each further token.

    A prompt that was there before comes from the cache, if there is one.
    """

    now: float = 0.0
    running: int = 0
    requested: int = 0
    slower: Callable[[int], float] = lambda _: 1.0  # by how much the n-th request is
    generated: Callable[[int], int] = lambda tokens: tokens
    refused_tokens: int = 10**9
    caching: bool = True
    observed: set[tuple[int, ...]] = field(default_factory=set)

    def clock(self) -> float:
        return self.now

    async def ask(self, _: str, body: bytes | None) -> client.Response:
        request = json.loads(body or b"")
        tokens, outputs = len(request["prompt"]), request["max_tokens"]
        self.requested += 1
        self.running += 1
        began, factor = self.now, self.slower(self.requested)
        await asyncio.sleep(0)  # all of a batch are there
        if tokens >= self.refused_tokens:
            self.running -= 1
            return client.Response(400, b"{}")
        context = tokens + outputs / 2
        step = BASE_S + (SEQUENCE_S + READ_S * context) * self.running
        computed = 1 if self.caching and tuple(request["prompt"]) in self.observed else tokens
        took = factor * (HTTP_S + BASE_S + TOKEN_S * computed * self.running + step * (outputs - 1))
        self.observed.add(tuple(request["prompt"]))
        await asyncio.sleep(0)
        self.running -= 1
        self.now = max(self.now, began + took)
        return client.Response(200, json.dumps({"usage": {"completion_tokens": self.generated(outputs)}}).encode())


async def run_benchmark(engine: Engine, plan: BenchmarkPlan = PLAN, seconds: float = 60.0) -> SelfBenchmark | None:
    return await self_benchmark.run(engine.ask, plan, PromptFactory("m"), engine.clock, seconds)


def prefill_s(tokens: int) -> float:
    return HTTP_S + BASE_S + TOKEN_S * tokens


def step_s(size: int, context: float) -> float:
    return BASE_S + (SEQUENCE_S + READ_S * context) * size


async def test_benchmark_points_equal_engine_times() -> None:
    found = await run_benchmark(Engine())
    assert found is not None
    assert dict(found.prefill) == pytest.approx({16: prefill_s(16), 128: prefill_s(128)})
    assert [(size, context) for size, context, _ in found.decode] == [(1, 16 + 5), (4, 16 + 5)]
    assert [took for *_, took in found.decode] == pytest.approx([step_s(1, 21.5), step_s(4, 21.5)])


@pytest.mark.parametrize("caching", [True, False])
async def test_benchmark_adds_one_batch_with_long_contexts(caching: bool) -> None:
    engine = Engine(caching=caching)
    found = await run_benchmark(engine, PLAN_WITH_LONG_BATCH)
    assert found is not None
    size, context, took = found.decode[2]
    assert (size, context) == (4, 1005)
    assert took == pytest.approx(step_s(4, 1005.5))
    assert dict(found.prefill)[1000] == pytest.approx(prefill_s(1000))  # not the cached ones'
    assert len(engine.observed) == 3 * (3 + 2 * (1 + 4)) + 4
    assert engine.requested == PLAN_WITH_LONG_BATCH.requests


@pytest.mark.parametrize(("seconds", "sizes"), [(4.0, [1, 4]), (20.0, [1, 4, 4])])
async def test_benchmark_slow_engine_skips_long_batch(seconds: float, sizes: list[int]) -> None:
    found = await run_benchmark(Engine(slower=lambda _: 14.0), PLAN_WITH_LONG_BATCH, seconds)
    assert found is not None
    assert [size for size, *_ in found.decode] == sizes


async def test_benchmark_hanging_long_batch_keeps_other_points() -> None:
    engine = Engine()

    async def ask(path: str, body: bytes | None) -> client.Response:
        if engine.requested == 3 * (3 + 2 * (1 + 4)):
            await asyncio.Event().wait()
        return await engine.ask(path, body)

    found = await self_benchmark.run(ask, PLAN_WITH_LONG_BATCH, PromptFactory("m"), engine.clock, 0.9)
    assert found is not None
    assert (len(found.prefill), [size for size, *_ in found.decode]) == (3, [1, 4])


@pytest.mark.parametrize("calm_round", [0, 1, 2])
async def test_benchmark_one_undisturbed_round_is_enough(calm_round: int) -> None:
    calm = await run_benchmark(Engine())
    assert calm is not None
    disturbed = await run_benchmark(Engine(slower=lambda number: 1.0 if (number - 1) // 12 == calm_round else 9.0))
    assert disturbed is not None
    assert dict(disturbed.prefill) == pytest.approx(dict(calm.prefill))
    assert [row[2] for row in disturbed.decode] == pytest.approx([row[2] for row in calm.decode])


async def test_benchmark_prompts_are_all_distinct() -> None:
    visited: list[tuple[int, ...]] = []
    engine = Engine()

    async def ask(path: str, body: bytes | None) -> client.Response:
        visited.append(tuple(json.loads(body or b"")["prompt"][:2]))
        return await engine.ask(path, body)

    await self_benchmark.run(ask, PLAN, PromptFactory("m"), engine.clock, 60.0)
    assert len(set(visited)) == len(visited) == 3 * (2 + 2 * (1 + 4))


async def test_benchmark_slow_engine_runs_one_round() -> None:
    engine = Engine(slower=lambda _: 10.0)
    whole = await run_benchmark(Engine(slower=lambda _: 10.0))
    once = await run_benchmark(engine, seconds=2.5)  # a round takes 1.65
    assert engine.requested == 2 + 2 * (1 + 4)
    assert whole is not None
    assert once is not None
    assert [took for *_, took in once.decode] == pytest.approx([took for *_, took in whole.decode])


async def test_benchmark_rejected_length_is_omitted() -> None:
    found = await run_benchmark(Engine(refused_tokens=128))
    assert found is not None
    assert [tokens for tokens, _ in found.prefill] == [16]
    assert len(found.decode) == 2


async def test_benchmark_all_rejected_yields_none() -> None:
    assert await run_benchmark(Engine(refused_tokens=1)) is None


async def test_benchmark_early_ended_responses_are_omitted() -> None:
    found = await run_benchmark(Engine(generated=lambda tokens: min(tokens, 5)))
    assert found is not None
    assert found.decode == ()


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b'{"usage":null}', b'{"usage":{}}', b"[" * 9999])
async def test_benchmark_responses_without_usage_yield_none(body: bytes) -> None:
    async def ask(*_: object) -> client.Response:
        return client.Response(200, body)

    assert await self_benchmark.run(ask, PLAN, PromptFactory("m"), lambda: 0.0, 60.0) is None


async def test_benchmark_zero_step_time_is_omitted() -> None:
    async def ask(_: str, body: bytes | None) -> client.Response:
        usage = {"completion_tokens": json.loads(body or b"")["max_tokens"]}
        return client.Response(200, json.dumps({"usage": usage}).encode())

    found = await self_benchmark.run(ask, PLAN, PromptFactory("m"), lambda: 0.0, 60.0)
    assert found is not None
    assert found.decode == ()


@pytest.mark.parametrize("error", [OSError("gone"), TimeoutError(), ValueError("not HTTP")])
async def test_benchmark_engine_failure_keeps_earlier_points(error: Exception) -> None:
    engine = Engine()

    async def ask(path: str, body: bytes | None) -> client.Response:
        if engine.requested == 2:
            raise error
        return await engine.ask(path, body)

    found = await self_benchmark.run(ask, PLAN, PromptFactory("m"), engine.clock, 60.0)
    assert found is not None
    assert [tokens for tokens, _ in found.prefill] == [16, 128]
    assert found.decode == ()


async def test_benchmark_unresponsive_engine_times_out() -> None:
    async def ask(*_: object) -> client.Response:
        await asyncio.Event().wait()
        raise AssertionError

    assert await self_benchmark.run(ask, PLAN, PromptFactory("m"), lambda: 0.0, 0.01) is None


@pytest.mark.parametrize("seconds", [0.0, -5.0])
async def test_benchmark_without_time_is_skipped(seconds: float) -> None:
    engine = Engine()
    assert await run_benchmark(engine, seconds=seconds) is None
    assert engine.now == 0.0


@pytest.mark.parametrize(
    ("role", "length", "sequences", "cache", "lengths", "batches", "long"),
    [
        ("serve", 4096, None, 919_824, (16, 128, 1024), (1, 4, 8), 1024),
        ("decode", 4096, 256, 2 * 8 * 1040, (16, 128, 1024), (1, 4, 8), 1024),
        ("decode", 4096, 256, 2 * 8 * 1040 - 1, (16, 128, 1024), (1, 4, 8), None),
        ("serve", 4096, 256, None, (16, 128, 1024), (1, 4, 8), None),
        ("prefill", 4096, 256, 919_824, (16, 128, 1024), (), None),
        ("serve", 4096, 4, 919_824, (16, 128, 1024), (1, 4), 1024),
        ("serve", 1024, None, 919_824, (16, 128), (1, 4, 8), 128),
        ("serve", 32, None, 919_824, (16,), (1, 4, 8), None),
        ("serve", 31, None, 919_824, (16,), (), None),
        ("serve", 16, None, 919_824, (), (), None),
        ("serve", 0, None, None, (), (), None),
    ],
)
def test_plan_fits_role_model_slots_and_kv_cache(
    role: str, length: int, sequences: int | None, cache: int | None,
    lengths: tuple[int, ...], batches: tuple[int, ...], long: int | None,
) -> None:  # fmt: skip
    plan = self_benchmark.plan_benchmark(
        CONTRACT.self_benchmark,
        CONTRACT.warmup.prompt_tokens,
        CONTRACT.warmup.batches,
        role=role,
        max_model_len=length,
        max_sequences=sequences,
        kv_tokens=cache,
    )
    assert (plan.prompt_tokens, plan.batches, plan.long_prompt_tokens) == (lengths, batches, long)


async def test_benchmark_empty_plan_sends_nothing() -> None:
    engine = Engine()
    assert await run_benchmark(engine, replace(PLAN, prompt_tokens=(), batches=())) is None
    assert engine.requested == 0


async def test_batch_with_a_broken_request_leaves_none_running() -> None:
    """The engine would compute them on: after the launcher is ready, or without a reader."""
    running = 0

    async def ask(_: str, body: bytes | None) -> client.Response:
        nonlocal running
        if running == 3:
            raise OSError("reset")
        running += 1
        try:
            await asyncio.Event().wait()
        finally:
            running -= 1
        raise AssertionError

    timer = self_benchmark._BatchTimer(ask, PromptFactory("m"), lambda: 0.0)
    with pytest.raises(OSError, match="reset"):
        await timer.measure(timer.new_prompts(4, 16), 1, {})
    await asyncio.sleep(0)
    assert running == 0
