"""The benchmark from served requests: without the waits and the prefills of others, under any load."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from plimsoll.core.engine_model.observed_benchmark import MIN_REQUESTS, observed_benchmark
from plimsoll.core.engine_model.self_benchmark import fit_step_model
from plimsoll.core.ports import BucketCounts, EngineReading, SelfBenchmark
from plimsoll.core.types import Role

EDGES = (0.05, 0.1, 0.2, 1.0, 5.0, 20.0, math.inf)
FIRST = EngineReading("a", 0.0, "1")


def histogram(*values: float) -> BucketCounts:
    counts = [0.0] * len(EDGES)
    for value in values:
        counts[next(i for i, edge in enumerate(EDGES) if value <= edge)] += 1.0
    return BucketCounts(EDGES, tuple(counts), sum(values))


def benchmark(reading: EngineReading) -> SelfBenchmark:
    found = observed_benchmark(reading, FIRST, Role.SERVE)
    assert found is not None
    return found


def served(ttft_s: tuple[float, ...], seconds: float = 100.0) -> EngineReading:
    """Requests of 1,000 prompt and 100 output tokens, 25 ms each."""
    tokens = 100.0 * len(ttft_s)
    return replace(
        FIRST,
        at_s=seconds,
        generated_tokens=tokens,
        local_prompt_tokens=1000.0 * len(ttft_s),
        ttft_s=histogram(*ttft_s),
        itl_s=BucketCounts((0.025, math.inf), (tokens, 0.0), 0.025 * tokens),
    )


def test_low_load_gives_its_means() -> None:
    found = benchmark(served((0.1,) * 40))
    assert found.is_observed
    ((prompt, prefill_s),) = found.prefill
    assert (prompt, prefill_s) == (1000, pytest.approx(0.1))
    ((batch, _, decode_s),) = found.decode
    assert batch == 1
    assert decode_s == pytest.approx(0.025 - 10 * 0.075 / 990)  # 10 prompt tokens in a mean step


def test_waits_of_a_loaded_engine_are_left_out() -> None:
    ((_, prefill_s),) = benchmark(served((0.1,) * 20 + (4.0,) * 40)).prefill
    assert prefill_s <= 0.25


def test_no_prefill_takes_longer_than_the_time_that_passed() -> None:
    ((_, prefill_s),) = benchmark(served((4.0,) * 40, seconds=20.0)).prefill
    assert prefill_s == pytest.approx(20.0 / 40)


@pytest.mark.parametrize("missing", ["ttft_s", "itl_s", "generated_tokens", "local_prompt_tokens"])
def test_missing_signal_gives_none(missing: str) -> None:
    reading = replace(served((0.1,) * 40), **{missing: None})
    assert observed_benchmark(reading, FIRST, Role.SERVE) is None


def test_too_few_requests_give_none() -> None:
    assert observed_benchmark(served((0.1,) * (int(MIN_REQUESTS) - 1)), FIRST, Role.SERVE) is None


def test_totals_without_requests_give_the_time_per_token() -> None:
    """llama.cpp counts neither requests nor their lengths."""
    reading = replace(
        FIRST,
        at_s=400.0,
        steps=2000.0,
        generated_tokens=4000.0,
        local_prompt_tokens=8000.0,
        prefill_s=4.0,
        decode_s=80.0,
    )
    found = benchmark(reading)
    assert found.prefill == ((1000, 0.5),)
    ((batch, _, decode_s),) = found.decode
    assert (batch, decode_s) == (2, pytest.approx(0.02 - 4 * 0.48 / 996))


def test_prefill_engine_shows_the_time_of_its_mean_prompt() -> None:
    """It generates one token of each request, and has no time per output token."""
    reading = replace(served((0.1,) * 40), generated_tokens=40.0, itl_s=None)
    assert observed_benchmark(reading, FIRST, Role.SERVE) is None
    found = observed_benchmark(reading, FIRST, Role.PREFILL)
    assert found is not None
    assert found.prefill[-1] == (1000, pytest.approx(0.1))
    model = fit_step_model(found)
    assert 0.0 < model.base_s < 0.3 * 0.1
    assert model.base_s + 1000 * model.prefill_token_s == pytest.approx(0.1, rel=0.05)


@pytest.mark.parametrize("batch", [1, 8, 40])
def test_decode_engine_shows_the_time_of_its_mean_batch(batch: int) -> None:
    """It computes a token of each prompt, and begins as soon as the KV cache has come."""
    tokens = 100.0 * 40
    reading = replace(
        served((0.03,) * 40, seconds=tokens * 0.025 / batch), local_prompt_tokens=40.0, steps=tokens / batch
    )
    found = observed_benchmark(reading, FIRST, Role.DECODE)
    assert found is not None
    assert found.is_observed
    model = fit_step_model(found)
    assert model.base_s + batch * model.sequence_s == pytest.approx(0.025, rel=0.05)
    assert model.sequence_s < model.base_s


@pytest.mark.parametrize(("role", "missing"), [(Role.PREFILL, "ttft_s"), (Role.DECODE, "itl_s")])
def test_engine_of_a_pair_without_its_signal_gives_none(role: Role, missing: str) -> None:
    assert observed_benchmark(replace(served((0.1,) * 40), **{missing: None}), FIRST, role) is None
