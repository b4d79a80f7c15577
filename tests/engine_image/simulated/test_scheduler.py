"""What goes into steps, counted by hand: steps take one second, blocks hold four tokens."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulated.sequence import ServedSequence
from tests.engine_image.simulated.core_harness import FITTED_STEPS, CoreHarness, make_core, make_profile


def times(of: ServedSequence) -> tuple[float, float]:
    """First and last token."""
    return of.first_token_s, of.last_token_s


def test_scheduler_short_prompt_yields_one_token_per_step() -> None:
    one = make_core()
    sequence = one.add(0.0, prompt=10, tokens=3)
    one.run()
    assert [said[0] for said in one.updates] == [1.0, 2.0, 3.0]
    assert (sequence.outcome, sequence.emitted_tokens) == ("length", 3)


def test_scheduler_long_prompt_is_chunked_by_budget() -> None:
    one = make_core(make_profile(budget=64))
    assert times(_run(one, one.add(0.0, prompt=129, tokens=2))) == (3.0, 4.0)


def test_scheduler_decode_precedes_prefill() -> None:
    one = make_core(make_profile(budget=8))
    first = one.add(0.0, prompt=4, tokens=10)
    one.run(1.0)
    second = one.add(1.0, prompt=14, tokens=1)  # two chunks of seven: one token of the budget is the other's
    one.run()
    assert times(first) == (1.0, 10.0)
    # two steps are in flight at 1.0: it is in those that end at 4.0 and 5.0
    assert second.first_token_s == 5.0


def test_scheduler_arrival_waits_for_current_and_next_step() -> None:
    one = make_core()
    one.add(0.0, tokens=10)
    late = one.add(0.5, tokens=1)
    one.run()
    assert late.first_token_s == 3.0


def test_scheduler_requests_start_in_arrival_order() -> None:
    one = make_core(make_profile(max_num_seqs=2))
    sequences = [one.add(number / 10, prompt=4 + number, tokens=3) for number in range(6)]
    one.run()
    # the first at once, the second in the step after the two in flight, then one for each slot that gets free
    assert [sequence.scheduled_s for sequence in sequences] == [0.0, 1.0, 3.0, 5.0, 7.0, 9.0]


def test_scheduler_running_never_exceeds_max_num_seqs() -> None:
    one = make_core(make_profile(max_num_seqs=3))
    for _ in range(7):
        one.add(0.0, tokens=4)
    one.run(1.5)
    assert (one.core.running, one.core.waiting) == (3, 4)


def test_scheduler_request_without_blocks_waits_at_queue_head() -> None:
    one = make_core(blocks=4, caching=False)
    first = one.add(0.0, prompt=10, tokens=4)
    long, short = one.add(0.1, prompt=10, tokens=1), one.add(0.2, prompt=2, tokens=1)
    one.run(1.0)
    assert (one.core.running, one.core.waiting) == (1, 2)
    one.run()
    assert first.last_token_s < long.first_token_s <= short.first_token_s


def test_scheduler_preempts_last_sequence_without_token_loss() -> None:
    one = make_core(blocks=6, caching=False)
    first, second = one.add(0.0, prompt=8, tokens=9), one.add(0.0, prompt=8, tokens=9)
    one.run()
    assert (first.preemptions, second.preemptions) == (0, 1)
    assert (first.emitted_tokens, second.emitted_tokens) == (9, 9)
    assert one.core.metrics.preemptions == 1
    assert first.last_token_s < second.last_token_s


def test_scheduler_preempted_sequence_precedes_waiting_ones() -> None:
    one = make_core(blocks=6, caching=False)
    one.add(0.0, prompt=8, tokens=9)
    second = one.add(0.0, prompt=8, tokens=9)
    third = one.add(0.5, prompt=8, tokens=1)
    one.run()
    spoken = [said[0] for said in one.updates if said[1] == second.request_id]
    resumed = next(late for early, late in itertools.pairwise(spoken) if late - early > 1.0)
    assert (second.preemptions, resumed) == (1, 10.0)
    assert third.first_token_s >= resumed


def test_scheduler_cached_prefix_is_not_computed_again() -> None:
    one = make_core(make_profile(budget=8))
    _run(one, one.add(0.0, prompt=34, tokens=1, start=0))
    again = _run(one, one.add(10.0, prompt=34, tokens=1, start=0))
    assert again.cached_tokens == 32
    assert again.first_token_s == 11.0  # one chunk of two tokens in place of five of eight
    other = _run(one, one.add(20.0, prompt=34, tokens=1, start=7_000_000))
    assert other.cached_tokens == 0


def test_scheduler_fully_cached_prompt_computes_some_tokens() -> None:
    one = make_core()
    _run(one, one.add(0.0, prompt=16, tokens=1, start=0))
    assert _run(one, one.add(5.0, prompt=16, tokens=1, start=0)).cached_tokens == 12


def test_scheduler_generated_tokens_are_cached_for_next_turn() -> None:
    one = make_core()
    first = _run(one, one.add(0.0, prompt=8, tokens=9, start=0))
    reported = first.prompt + first.text(0, 9).encode()
    second = ServedSequence("next", reported + b"more", 1, 20.0)
    one.core.add(second, 20.0)
    one.run()
    assert second.cached_tokens == 16  # the prompt's two blocks and two of the answer's; its ninth token is not a block


def test_scheduler_cache_salt_isolates_tenants() -> None:
    one = make_core()
    _run(one, one.add(0.0, prompt=16, tokens=1, start=0, salt="a"))
    assert _run(one, one.add(5.0, prompt=16, tokens=1, start=0, salt="b")).cached_tokens == 0
    assert _run(one, one.add(9.0, prompt=16, tokens=1, start=0, salt="a")).cached_tokens == 12


def test_scheduler_without_prefix_caching_reuses_nothing() -> None:
    one = make_core(caching=False)
    _run(one, one.add(0.0, prompt=16, tokens=1, start=0))
    assert _run(one, one.add(5.0, prompt=16, tokens=1, start=0)).cached_tokens == 0


def test_scheduler_forgotten_sequence_frees_blocks_silently() -> None:
    one = make_core()
    gone, stays = one.add(0.0, tokens=50), one.add(0.0, tokens=5)
    one.run(2.0)
    one.core.drop_sequence(gone, 2.5)
    one.run()
    assert (gone.emitted_tokens, stays.emitted_tokens) == (2, 5)
    assert one.core.kv_cache.used == 0
    assert one.meters.finished == {"length": 1}


def _run(one: CoreHarness, sequence: ServedSequence) -> ServedSequence:
    one.run()
    return sequence


REQUESTS = st.lists(
    st.tuples(st.floats(0, 30), st.integers(1, 60), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=25
)


@given(REQUESTS, st.integers(20, 60), st.integers(1, 6), st.integers(6, 40))
def test_scheduler_tokens_and_blocks_are_conserved(
    requests: list[tuple[float, int, int, int]], blocks: int, slots: int, budget: int
) -> None:
    one = make_core(make_profile(max_num_seqs=slots, budget=budget), blocks=blocks)
    sequences = []
    for at, prompt, tokens, start in sorted(requests):
        one.run(at)
        sequences.append(one.add(at, prompt, tokens, start * 1_000_000))
        assert one.core.running <= slots
    one.run()
    assert all(
        sequence.emitted_tokens == sequence.output_tokens and sequence.outcome == "length" for sequence in sequences
    )
    assert one.core.kv_cache.used == 0
    meters, histograms = one.meters, one.meters.histograms
    prompts, outputs = sum(s.prompt_tokens for s in sequences), sum(s.output_tokens for s in sequences)
    assert meters.all_prompt_tokens == prompts == meters.local_prompt_tokens + meters.cached_prompt_tokens
    assert meters.generated_tokens == outputs
    assert histograms["iteration_tokens_total"].total == meters.local_prompt_tokens + outputs
    assert sum(histograms["inter_token_latency_seconds"].counts) == outputs - len(sequences)


@given(REQUESTS)
def test_scheduler_same_requests_give_same_schedule(requests: list[tuple[float, int, int, int]]) -> None:
    def schedule() -> list[tuple[float, float]]:
        one = make_core(blocks=20)
        made = [one.add(at, prompt, tokens, start) for at, prompt, tokens, start in sorted(requests)]
        one.run()
        return [times(sequence) for sequence in made]

    assert schedule() == schedule()


def test_scheduler_step_times_match_step_contents() -> None:
    one = make_core(make_profile(FITTED_STEPS, budget=10_000))
    sequence = one.add(0.0, prompt=100, tokens=3)
    one.run()
    prefill = FITTED_STEPS.base + FITTED_STEPS.anypre + FITTED_STEPS.pretok * 100 + FITTED_STEPS.preattn * 100 * 50
    decode = 2 * (FITTED_STEPS.base + FITTED_STEPS.dec) + FITTED_STEPS.ctx * (100 + 101)
    assert times(sequence) == pytest.approx((prefill, prefill + decode))
