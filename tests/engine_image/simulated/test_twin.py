"""What vLLM's scheduler outputs cost, and when the accelerator is done: all of the twin that needs no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.sim.profiles import Coefficients
from simulated.plant import Plant
from simulated.twin.work import Card, Counter, Work
from tests.engine_image.simulated.lab import HOT, PLAIN, profile

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


def test_a_prompt_comes_in_chunks_and_gives_its_token_with_the_last() -> None:
    counter = Counter()
    first = counter.work(output({"a": 64}, new=[("a", 0, 100)]))
    assert (first.tokens, first.pairs, first.sequences, first.emits) == (64, 64 * 32.0, 0, [False])
    second = counter.work(output({"a": 36}, known=[("a", 64, 0)]))
    assert (second.tokens, second.pairs, second.sequences, second.emits) == (36, 36 * 82.0, 0, [True])


def test_what_decodes_reads_its_context() -> None:
    counter = Counter()
    counter.work(output({"a": 100, "b": 20}, new=[("a", 0, 100), ("b", 0, 20)]))
    work = counter.work(output({"a": 1, "b": 1, "c": 50}, new=[("c", 0, 50)], known=[("a", 100, 1), ("b", 20, 1)]))
    assert work.names == ["c", "a", "b"]
    assert work.emits == [True, True, True]
    assert (work.tokens, work.pairs, work.sequences, work.cached) == (50, 1250.0, 2, 120)


def test_cached_tokens_of_a_prompt_are_read_and_not_computed() -> None:
    work = Counter().work(output({"a": 36}, new=[("a", 64, 100)]))
    assert (work.tokens, work.pairs, work.emits) == (36, 36 * 82.0, [True])


def test_the_last_token_of_a_prompt_alone_costs_a_decode() -> None:
    work = Counter().work(output({"a": 1}, new=[("a", 99, 100)]))
    assert (work.tokens, work.sequences, work.cached, work.emits) == (0, 1, 99, [True])


def test_a_prompt_of_one_token_is_a_prefill() -> None:
    work = Counter().work(output({"a": 1}, new=[("a", 0, 1)]))
    assert (work.tokens, work.sequences, work.emits) == (1, 0, [True])


def test_who_lost_its_place_computes_its_answer_again_before_it_goes_on() -> None:
    counter = Counter()
    counter.work(output({"a": 10}, new=[("a", 0, 10)]))
    assert counter.work(output({"a": 12}, known=[("a", 0, 5)])).emits == [False]
    again = counter.work(output({"a": 3}, known=[("a", 12, 5)]))
    assert (again.tokens, again.emits) == (3, [True])


def test_a_name_may_come_again_after_its_request_has_ended() -> None:
    counter = Counter()
    counter.work(output({"a": 10}, new=[("a", 0, 10)]))
    counter.work(output({}, finished=["a"]))
    with pytest.raises(KeyError):
        counter.work(output({"a": 1}, known=[("a", 10, 1)]))
    assert counter.work(output({"a": 4}, new=[("a", 0, 8)])).emits == [False]


@given(st.lists(st.tuples(st.integers(0, 9000), st.integers(1, 8192)), max_size=20))
def test_every_token_is_prefilled_or_decoded(shares: list[tuple[int, int]]) -> None:
    work = Work()
    for number, (computed, tokens) in enumerate(shares):
        work.put(str(number), computed, tokens, computed + tokens)
    assert work.tokens + work.sequences == sum(tokens for _, tokens in shares)


def test_a_step_takes_what_the_plant_says_times_the_scale() -> None:
    work = Work(tokens=512, pairs=512 * 256.0, sequences=100, cached=70_000)
    took_s = Plant(profile(HOT)).seconds(0.0, 512, 512 * 256.0, 100, 70_000)
    assert Card(Plant(profile(HOT)), 8.0).ends_s(work, 100.0) == pytest.approx(100.0 + 8.0 * took_s)


def test_steps_run_one_after_another_however_late_they_are_heard_of() -> None:
    card = Card(Plant(profile(PLAIN)))
    assert card.ends_s(Work(), 10.0) == 11.0
    assert card.ends_s(Work(), 10.0) == 12.0  # handed over while the first one runs
    assert card.ends_s(Work(), 11.9) == 13.0  # nearly too late, which costs nothing
    assert card.ends_s(Work(), 20.0) == 21.0


def test_heat_goes_by_the_accelerators_time() -> None:
    cool = Coefficients(0.01, 0.0, 1e-4, 0.0, 0.0, 0.0)
    hot = Coefficients(0.01, 0.0, 2e-4, 0.0, 0.0, 0.0)

    def last_s(scale: float) -> float:
        card = Card(Plant(profile(cool, hot=hot)), scale)  # type: ignore[arg-type]
        ends_s = 0.0
        for _ in range(100):
            began_s, ends_s = ends_s, card.ends_s(Work(tokens=500, pairs=0.0), ends_s)
        return (ends_s - began_s) / scale

    assert last_s(1.0) > 0.08  # seconds; a cool card's would be 0.06
    assert last_s(8.0) == pytest.approx(last_s(1.0))
