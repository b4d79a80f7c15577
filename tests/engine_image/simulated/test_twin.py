"""What vLLM's scheduler outputs cost, and when the accelerator is done: all of the twin that needs no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.sim.engine.step_timing import StepTiming
from plimsoll.sim.profiles import StepCoefficients
from simulated.twin.step_work import AcceleratorClock, StepWork, StepWorkReader
from tests.engine_image.simulated.core_harness import FITTED_STEPS, UNIT_STEPS, make_profile

Row = tuple[str, int, int]  # request, tokens computed before, tokens of its answer so far


def output(
    tokens: Mapping[str, int], new: Sequence[Row] = (), known: Sequence[Row] = (), finished: Sequence[str] = ()
) -> SimpleNamespace:
    """A scheduler output in vLLM's shape; the number behind a new request is its prompt's length."""
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=computed, prompt_token_ids=[7] * prompt)
            for name, computed, prompt in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _, _ in known],
            num_computed_tokens=[computed for _, computed, _ in known],
            num_output_tokens=[made for _, _, made in known],
        ),
        finished_req_ids=set(finished),
    )


def test_work_chunked_prompt_emits_with_last_chunk() -> None:
    counter = StepWorkReader()
    first = counter.read(output({"a": 64}, new=[("a", 0, 100)]))
    assert (first.tokens, first.pairs, first.sequences, first.emits) == (64, 64 * 32.0, 0, [False])
    second = counter.read(output({"a": 36}, known=[("a", 64, 0)]))
    assert (second.tokens, second.pairs, second.sequences, second.emits) == (36, 36 * 82.0, 0, [True])


def test_work_decode_reads_its_context() -> None:
    counter = StepWorkReader()
    counter.read(output({"a": 100, "b": 20}, new=[("a", 0, 100), ("b", 0, 20)]))
    work = counter.read(output({"a": 1, "b": 1, "c": 50}, new=[("c", 0, 50)], known=[("a", 100, 1), ("b", 20, 1)]))
    assert work.request_ids == ["c", "a", "b"]
    assert work.emits == [True, True, True]
    assert (work.tokens, work.pairs, work.sequences, work.cached) == (50, 1250.0, 2, 120)


def test_work_cached_prompt_tokens_are_not_computed() -> None:
    work = StepWorkReader().read(output({"a": 36}, new=[("a", 64, 100)]))
    assert (work.tokens, work.pairs, work.emits) == (36, 36 * 82.0, [True])


def test_work_last_prompt_token_alone_counts_as_decode() -> None:
    work = StepWorkReader().read(output({"a": 1}, new=[("a", 99, 100)]))
    assert (work.tokens, work.sequences, work.cached, work.emits) == (0, 1, 99, [True])


def test_work_one_token_prompt_counts_as_prefill() -> None:
    work = StepWorkReader().read(output({"a": 1}, new=[("a", 0, 1)]))
    assert (work.tokens, work.sequences, work.emits) == (1, 0, [True])


def test_work_preempted_request_recomputes_before_emitting() -> None:
    counter = StepWorkReader()
    counter.read(output({"a": 10}, new=[("a", 0, 10)]))
    assert counter.read(output({"a": 12}, known=[("a", 0, 5)])).emits == [False]
    again = counter.read(output({"a": 3}, known=[("a", 12, 5)]))
    assert (again.tokens, again.emits) == (3, [True])


def test_work_request_name_may_be_reused_after_its_end() -> None:
    counter = StepWorkReader()
    counter.read(output({"a": 10}, new=[("a", 0, 10)]))
    counter.read(output({}, finished=["a"]))
    with pytest.raises(KeyError):
        counter.read(output({"a": 1}, known=[("a", 10, 1)]))
    assert counter.read(output({"a": 4}, new=[("a", 0, 8)])).emits == [False]


@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 8192)), max_size=20))
def test_work_every_token_is_prefill_or_decode(shares: list[tuple[int, int]]) -> None:
    work = StepWork()
    for number, (computed, tokens) in enumerate(shares):
        work.add(str(number), computed, tokens, computed + tokens)
    assert work.tokens + work.sequences == sum(tokens for _, tokens in shares)


def test_executor_step_takes_step_time_times_scale() -> None:
    work = StepWork(tokens=512, pairs=512 * 256.0, sequences=100, cached=70_000)
    took_s = StepTiming(make_profile(FITTED_STEPS)).series(0, 512, 512 * 256.0, 100, 70_000).first_s
    assert AcceleratorClock(StepTiming(make_profile(FITTED_STEPS)), 8.0).end_s(work, 100.0) == pytest.approx(
        100.0 + 8.0 * took_s
    )


def test_executor_steps_run_back_to_back() -> None:
    card = AcceleratorClock(StepTiming(make_profile(UNIT_STEPS)))
    assert card.end_s(StepWork(), 10.0) == 11.0
    assert card.end_s(StepWork(), 10.0) == 12.0  # handed over while the first one runs
    assert card.end_s(StepWork(), 11.9) == 13.0  # nearly too late, which costs nothing
    assert card.end_s(StepWork(), 20.0) == 21.0


def test_executor_heat_follows_engine_time() -> None:
    cool = StepCoefficients(0.01, 0.0, 1e-4, 0.0, 0.0, 0.0)
    hot = StepCoefficients(0.01, 0.0, 2e-4, 0.0, 0.0, 0.0)

    def last_s(scale: float) -> float:
        card = AcceleratorClock(StepTiming(make_profile(cool, hot=hot)), scale)  # type: ignore[arg-type]
        ends_s = 0.0
        for _ in range(100):
            began_s, ends_s = ends_s, card.end_s(StepWork(tokens=500, pairs=0.0), ends_s)
        return (ends_s - began_s) / scale

    assert last_s(1.0) > 0.08  # seconds; a cool card's would be 0.06
    assert last_s(8.0) == pytest.approx(last_s(1.0))
