"""Virtual time: nothing depends on when one looks, and the latencies are the controller's law where that holds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plimsoll.core.engine_model.step_time import StepModel, serve_tier
from plimsoll.core.workload import Workload
from tests.engine_image.simulated.core_harness import FITTED_STEPS, make_core, make_profile


def test_idle_core_has_no_next_event() -> None:
    one = make_core()
    assert one.core.next_event_s() == math.inf
    one.core.advance(1e9)
    assert one.core.next_wakeup_s(1e9, 0.02) == math.inf


def test_core_work_starts_at_arrival_after_idle_time() -> None:
    one = make_core()
    one.add(0.0, tokens=1)
    one.run()
    late = one.add(1000.25, tokens=1)
    one.run()
    assert late.first_token_s == 1001.25


@settings(max_examples=30)
@given(st.lists(st.floats(0.01, 5), min_size=1, max_size=40))
def test_core_polling_times_change_no_token(pauses: list[float]) -> None:
    def run_with_polls(looks: list[float]) -> list[tuple[float, float]]:
        one = make_core(make_profile(FITTED_STEPS))
        made, looking = [], iter(looks)
        for at in np.arange(0.0, 0.5, 0.013):
            while (look := next(looking, math.inf)) < at:
                one.core.advance(look)
            made.append(one.add(float(at), prompt=30, tokens=12))
        one.run()
        return [(sequence.first_token_s, sequence.last_token_s) for sequence in made]

    assert run_with_polls(list(np.cumsum(pauses) / 50)) == run_with_polls([])


def test_next_news_is_next_boundary_step_or_patience_end() -> None:
    one = make_core(make_profile(FITTED_STEPS))
    one.add(0.0, tokens=400)
    assert one.core.next_wakeup_s(0.0, 0.02) == one.core.next_event_s()  # its first token is under way
    one.core.advance(0.0300)
    assert one.core.next_wakeup_s(0.03, 0.02) == 0.05
    late = one.add(0.031, tokens=5)
    look = one.core.next_wakeup_s(0.031, 0.02)
    one.core.advance(look)
    assert late.first_token_s is None
    assert one.core.next_wakeup_s(look, 0.02) == one.core.next_event_s()
    one.core.advance(one.core.next_event_s())
    assert late.first_token_s == late.last_token_s


def test_next_news_reports_completion_without_delay() -> None:
    one = make_core(make_profile(FITTED_STEPS))
    sequence = one.add(0.0, tokens=5)
    one.core.advance(one.core.next_event_s())
    look = one.core.next_wakeup_s(one.core.next_event_s(), 10.0)
    one.run()
    assert look == pytest.approx(sequence.last_token_s, abs=1e-6)


def test_unstreamed_sequence_reports_only_its_end() -> None:
    one = make_core()
    sequence = one.add(0.0, tokens=5)
    sequence.streamed = False
    one.run()
    assert [said[2] for said in one.updates] == [5]


def test_finished_counts_engine_aborts_not_client_disconnects() -> None:
    one = make_core()
    aborted, left = one.add(0.0, tokens=50), one.add(0.0, tokens=50)
    one.core.end_sequence(aborted, "abort", 3.0)
    one.core.drop_sequence(left, 3.0)
    one.core.end_sequence(left, "abort", 4.0)
    assert dict(one.meters.finished) == {"abort": 1}
    assert (one.core.running, one.core.kv_cache.used) == (0, 0)


@pytest.mark.parametrize("rho", [0.3, 0.5])
def test_core_tpot_matches_processor_sharing_and_ttft_law(rho: float) -> None:
    """Poisson arrivals of the chat mix on the hot 8B. TTFT: 1.5 steps and the prefill, stretched by what shares it."""
    made = make_profile(
        FITTED_STEPS, kv_tokens=720_000, max_num_seqs=256, budget=8192, block_size=16, max_model_len=40_960
    )
    random = np.random.default_rng(1)
    count = 1500
    prompts = np.clip(random.lognormal(np.log(1000), 0.6, count), 10, 8000).astype(int)
    outputs = np.clip(random.lognormal(np.log(195), 0.5, count), 2, 2000).astype(int)
    tier = serve_tier(
        StepModel(
            FITTED_STEPS.base,
            FITTED_STEPS.anypre,
            FITTED_STEPS.pretok,
            FITTED_STEPS.preattn,
            FITTED_STEPS.dec,
            FITTED_STEPS.ctx,
        ),
        Workload(prompts * 1.0, np.zeros(count), outputs * 1.0, np.full(count, 1 / count)),
    )
    rate = rho / tier.work_s
    one, sequences = make_core(made, caching=False), []
    for at, prompt, output in zip(np.cumsum(random.exponential(1 / rate, count)), prompts, outputs, strict=True):
        sequences.append(one.add(float(at), int(prompt), int(output), start=0))
        one.core.updated.clear()
    one.run()
    settled = sequences[200:-200]
    steps = sum(sequence.last_token_s - sequence.first_token_s for sequence in settled)
    tpot = steps / sum(sequence.emitted_tokens - 1 for sequence in settled)
    assert tpot == pytest.approx(float(tier.tpot_s(rate)), rel=0.05)
    ttft = float(np.mean([sequence.first_token_s - sequence.arrived_s for sequence in settled]))
    prefill = float(np.mean(FITTED_STEPS.pretok * prompts + FITTED_STEPS.preattn * prompts * prompts / 2))
    assert ttft == pytest.approx(
        1.5 * tpot + prefill / (1 - rho), rel=0.15
    )  # arrivals meet long steps more often than short ones
