"""Windows of engines that do not report step times, from latencies: against the figures that a steady engine has."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from plimsoll.core.demand.counter_delta import engine_interval
from plimsoll.core.demand.derived_windows import (
    COMPLETED_WEIGHT,
    DERIVED_WEIGHT,
    DerivedWindow,
    needs_derivation,
    prompt_tokens,
)
from plimsoll.core.engine_model.calibration.counter_window import WindowSums
from plimsoll.core.ports import BucketCounts, EngineReading

STEP_S, BATCH, PROMPT_PER_STEP = 0.02, 12.0, 60.0
INTERVAL_S = 5.0


def histogram(count: float, mean: float) -> BucketCounts:
    return BucketCounts((mean, math.inf), (count, 0.0), count * mean)


def empty(at_s: float = 0.0) -> EngineReading:
    return EngineReading("a", at_s, "1")


def windows(readings: list[EngineReading]) -> list[WindowSums]:
    """The windows of an engine's readings."""
    window, found = DerivedWindow(), []
    for old, new in itertools.pairwise(readings):
        interval = engine_interval(old, new)
        assert interval is not None
        ended = window.extend(new, interval)
        found += [] if ended is None else [ended]
    return found


def live(n: int, batch: float = BATCH, idle_share: float = 0.0) -> EngineReading:
    """The n-th reading of an engine that counts each token's latency, busy for all but a share of the time."""
    steps = n * INTERVAL_S * (1.0 - idle_share) / STEP_S
    return replace(
        empty(n * INTERVAL_S),
        generated_tokens=batch * steps,
        local_prompt_tokens=PROMPT_PER_STEP * steps,
        itl_s=histogram(batch * steps, STEP_S),
    )


def test_steps_follow_from_inter_token_latency() -> None:
    (first, second) = windows([live(n) for n in range(3)])
    assert first.busy_s / first.steps == pytest.approx(STEP_S)
    assert first.output_tokens / first.steps == pytest.approx(BATCH, rel=1e-3)
    assert first.prompt_tokens / first.steps == pytest.approx(PROMPT_PER_STEP, rel=1e-3)
    assert (first.weight, second.end_s) == (DERIVED_WEIGHT, 2 * INTERVAL_S)


def test_idle_time_changes_no_step_time() -> None:
    """At a mean of one decoding request, Poisson arrivals leave the engine idle for exp(-1) of the time."""
    idle_share = math.exp(-1.0)
    batch = 1.0 / (1.0 - idle_share)
    (found,) = windows([live(n, batch, idle_share) for n in range(2)])
    assert found.busy_s / found.steps == pytest.approx(STEP_S)
    assert found.busy_s == pytest.approx(INTERVAL_S * (1.0 - idle_share))
    assert found.output_tokens / found.steps == pytest.approx(batch)


def test_counted_steps_measure_the_busy_time() -> None:
    """llama.cpp: steps at once, tokens and their time when a request ends; windows hold several requests."""
    steps = [n * INTERVAL_S * 0.8 / STEP_S for n in range(13)]
    readings = [
        replace(
            empty(n * INTERVAL_S),
            steps=count,
            generated_tokens=BATCH * count,
            local_prompt_tokens=PROMPT_PER_STEP * count,
            decode_s=BATCH * count * STEP_S,
        )
        for n, count in enumerate(steps)
    ]
    first, second = windows(readings)
    assert first.busy_s == pytest.approx(0.8 * 30.0)
    assert first.steps == pytest.approx(first.busy_s / STEP_S)
    assert (first.weight, second.end_s - first.end_s) == (COMPLETED_WEIGHT, 30.0)


def test_counted_busy_seconds_are_used_as_they_are() -> None:
    """TGI: durations of its steps, and lengths of requests that completed."""
    readings = [
        replace(
            empty(n * INTERVAL_S),
            steps=100.0 * n,
            busy_s=3.0 * n,
            prompt_tokens=histogram(5.0 * n, 400.0),
            output_tokens=histogram(5.0 * n, 100.0),
        )
        for n in range(2)
    ]
    (found,) = windows(readings)
    assert (found.busy_s, found.steps, found.prompt_tokens, found.output_tokens) == (3.0, 100.0, 2000.0, 500.0)


def test_window_begins_with_tokens() -> None:
    idle, running = [replace(live(0), at_s=at_s) for at_s in (-2 * INTERVAL_S, -INTERVAL_S, 0.0)], [live(1)]
    (found,) = windows(idle + running)
    assert found.busy_s == pytest.approx(INTERVAL_S, rel=1e-3)


def test_engine_with_steps_and_token_times_needs_no_derivation() -> None:
    tpot = histogram(1.0, STEP_S)
    assert not needs_derivation(replace(empty(), steps=1.0, tpot_s=tpot, itl_s=tpot))
    assert needs_derivation(replace(empty(), tpot_s=tpot))
    assert needs_derivation(replace(empty(), steps=1.0, decode_s=1.0))
    assert needs_derivation(replace(empty(), steps=1.0, tpot_s=tpot, busy_s=1.0))
    assert not needs_derivation(replace(empty(), steps=1.0))


def test_prompt_tokens_prefer_computed_ones() -> None:
    old = replace(empty(), local_prompt_tokens=0.0, all_prompt_tokens=0.0, prompt_tokens=histogram(0.0, 1.0))
    new = replace(empty(5.0), local_prompt_tokens=3.0, all_prompt_tokens=5.0, prompt_tokens=histogram(7.0, 1.0))
    found = engine_interval(old, new)
    assert found is not None
    without_local = found._replace(local_prompt_tokens=None)
    assert (prompt_tokens(found), prompt_tokens(without_local)) == (3.0, 5.0)
    assert prompt_tokens(without_local._replace(all_prompt_tokens=None)) == 7.0
