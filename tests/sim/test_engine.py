"""The engine's schedule: skipping steps against single steps, and against an engine that shares no rule with it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from plimsoll.sim.engine.kv_link import FABRIC_BYTES_PER_S
from plimsoll.sim.engine.sequence import EngineSequence
from plimsoll.sim.engine.step_timing import StepTiming
from plimsoll.sim.engine_reading import scrape
from tests.engine_image.simulated.core_harness import make_core
from tests.sim import sim_harness
from tests.sim.reference_engine import ReferenceEngine

NO_THROTTLING = replace(sim_harness.H200, hot=None)
NO_HINGE = replace(sim_harness.H200, hot=None, hinge_sequences=0, hinge_dec=0.0)
TIME_TOLERANCE_S = 1e-9  # sums in another order

# name: hardware, load, whether prompts are computed elsewhere
SCENARIOS = {
    "light": (NO_THROTTLING, sim_harness.PoissonLoad(2500, 12.0), False),
    "beyond the knee": (NO_THROTTLING, sim_harness.PoissonLoad(1500, 26.0, seed=2), False),
    "short of blocks": (replace(NO_THROTTLING, kv_tokens=60_000), sim_harness.PoissonLoad(1000, 40.0, seed=3), False),
    "few slots, small chunks": (
        replace(NO_THROTTLING, kv_tokens=30_000, max_num_seqs=24, budget=512),
        sim_harness.PoissonLoad(1000, 30.0, seed=4),
        False,
    ),
    "long": (replace(NO_THROTTLING, kv_tokens=330_000), sim_harness.PoissonLoad(500, 2.0, 4000, 1000, seed=5), False),
    "fetched": (replace(NO_THROTTLING, block_size=128), sim_harness.PoissonLoad(2000, 20.0, seed=6), True),
    "fetched, short of blocks": (
        replace(NO_THROTTLING, kv_tokens=60_000, block_size=128),
        sim_harness.PoissonLoad(1000, 30.0, seed=7),
        True,
    ),
    "tiny": (NO_THROTTLING, sim_harness.PoissonLoad(1000, 200.0, 20, 3, seed=8), False),
}


def test_scenarios_have_ten_thousand_requests() -> None:
    assert sum(load.requests for _, load, _ in SCENARIOS.values()) >= 10_000


@pytest.mark.parametrize("name", SCENARIOS)
def test_engine_skipping_steps_equals_single_stepping(name: str) -> None:
    own, load, remote = SCENARIOS[name]
    lengths = load.draw()
    leaping, stepping = sim_harness.make_engine(own), sim_harness.make_engine(own, can_skip=False)
    ours, theirs = sim_harness.run(leaping, lengths, remote=remote), sim_harness.run(stepping, lengths, remote=remote)
    _assert_same_times(ours, [(one.first_token_s, one.last_token_s) for one in theirs])
    counted = [(e.metrics.steps, e.metrics.generated_tokens, e.metrics.preemptions) for e in (leaping, stepping)]
    assert counted[0] == counted[1]


@pytest.mark.parametrize("name", SCENARIOS)
def test_engine_schedule_equals_reference_engine(name: str) -> None:
    own, load, remote = SCENARIOS[name]
    lengths = load.draw()
    one, reference = sim_harness.make_engine(own), ReferenceEngine(own)
    ours, theirs = sim_harness.run(one, lengths, remote=remote), reference.run(lengths, remote)
    _assert_same_times(ours, [(other.first_token_s, other.last_token_s) for other in theirs])
    assert one.metrics.preemptions == reference.preemptions
    assert (one.metrics.steps, one.metrics.generated_tokens) == (reference.steps, reference.tokens)


@pytest.mark.parametrize("name", SCENARIOS)
def test_engine_served_over_http_core_is_the_same(name: str) -> None:
    """What the HTTP engine simulator adds to the engine, and when it looks, changes no time."""
    own, load, remote = SCENARIOS[name]
    lengths = load.draw()
    one, served = sim_harness.make_engine(own), make_core(own, caching=False, rate=FABRIC_BYTES_PER_S)
    ours = sim_harness.run(one, lengths, remote=remote)
    theirs = [served.add(at_s, prompt, output, start=0, remote=remote) for at_s, prompt, output in lengths]
    served.core.advance(math.nextafter(math.inf, 0.0))
    _assert_same_times(ours, [(other.first_token_s, other.last_token_s) for other in theirs])
    assert all(other.emitted_tokens == other.output_tokens for other in theirs)
    counted = [
        (m.steps, m.generated_tokens, m.preemptions, m.local_prompt_tokens) for m in (one.metrics, served.meters)
    ]
    assert counted[0] == counted[1]
    assert served.meters.histograms["iteration_tokens_total"].cumulative()[-1] == one.metrics.steps
    assert one.metrics.post_s == pytest.approx(served.meters.nixl["nixl_post_time_seconds"].total)


def test_engine_noise_and_heat_skip_like_single_stepping() -> None:
    own, lengths = replace(sim_harness.H200, kv_tokens=120_000), sim_harness.PoissonLoad(700, 20.0).draw()
    ours = sim_harness.run(sim_harness.make_engine(own, noise=0.05), lengths)
    theirs = sim_harness.run(sim_harness.make_engine(own, noise=0.05, can_skip=False), lengths)
    _assert_same_times(ours, [(one.first_token_s, one.last_token_s) for one in theirs])
    assert ours[0].first_token_s != sim_harness.run(sim_harness.make_engine(own), lengths)[0].first_token_s


def test_engine_hot_gpu_is_slower_and_cools_when_idle() -> None:
    busy = [(0.01 * n, 3000, 2) for n in range(200)]
    later = [(60.0, 3000, 2)]
    ours = sim_harness.run(sim_harness.make_engine(sim_harness.H200), busy + later)
    cool = sim_harness.run(sim_harness.make_engine(NO_THROTTLING), busy + later)
    assert ours[199].last_token_s is not None
    assert cool[199].last_token_s is not None
    assert ours[199].last_token_s > 1.1 * cool[199].last_token_s
    assert ours[200].first_token_s == pytest.approx(cool[200].first_token_s)


def test_engine_step_duration_follows_profile() -> None:
    c = NO_HINGE.coefficients
    [one] = sim_harness.run(sim_harness.make_engine(NO_HINGE), [(5.0, 1000, 11)])
    assert one.first_token_s == pytest.approx(5.0 + c.base + c.anypre + c.pretok * 1000 + c.preattn * 500_000)
    read = sum(range(1000, 1010))
    assert one.last_token_s is not None
    assert one.last_token_s - one.first_token_s == pytest.approx(10 * (c.base + c.dec) + c.ctx * read)


def test_engine_decode_step_bends_at_hinge() -> None:
    bent, level = sim_harness.make_engine(NO_THROTTLING), sim_harness.make_engine(NO_HINGE)
    lengths = [(0.0, 10, 200)] * 200
    slow, fast = sim_harness.run(bent, lengths)[0], sim_harness.run(level, lengths)[0]
    assert slow.last_token_s is not None
    assert fast.last_token_s is not None
    assert slow.last_token_s > fast.last_token_s


@pytest.mark.parametrize(
    ("tokens", "sequences", "bent"),
    [(0, 128, 0), (0, 130, 2), (200, 100, 100), (28, 100, 0), (38, 100, 10), (8000, 1, 1)],
)
def test_step_timing_hinge_counts_tokens_of_a_step(tokens: int, sequences: int, bent: int) -> None:
    c = NO_THROTTLING.coefficients
    law_s = c.base + c.dec * sequences + (c.anypre + c.pretok * tokens if tokens else 0.0)
    found_s = StepTiming(NO_THROTTLING).series(0, tokens, 0.0, sequences, 0).first_s
    assert found_s == pytest.approx(law_s + bent * NO_THROTTLING.hinge_dec)


def test_engine_scrape_between_events_shows_finished_steps() -> None:
    leaping, stepping = sim_harness.make_engine(NO_THROTTLING), sim_harness.make_engine(NO_THROTTLING, can_skip=False)
    sequences = sim_harness.PoissonLoad(60, 15.0).draw()
    for one in (leaping, stepping):
        for job, (at_s, _, _) in zip(sim_harness.make_sequences(sequences), sequences, strict=True):
            one.add(job, at_s)
    last_s = sequences[-1][0]
    for moment in range(40):
        now_s = last_s + 0.0371 * moment
        ours, theirs = (scrape(one, "p", now_s, now_s) for one in (leaping, stepping))
        for name in ("tpot_s", "ttft_s", "itl_s"):
            one, other = getattr(ours, name), getattr(theirs, name)
            assert one.counts == other.counts
            assert one.value_sum == pytest.approx(other.value_sum)
        for name in ("prefill_s", "decode_s"):
            assert getattr(ours, name) == pytest.approx(getattr(theirs, name))
        rest: dict[str, Any] = dict.fromkeys(("tpot_s", "ttft_s", "itl_s", "prefill_s", "decode_s"))
        assert replace(ours, **rest) == replace(theirs, **rest)


def test_engine_idle_has_all_blocks_free() -> None:
    for own, load_, remote in SCENARIOS.values():
        one = sim_harness.make_engine(own)
        sim_harness.run(one, load_.draw(), remote=remote)
        assert one.kv_cache.free == one.kv_cache.total
        assert one.idle


def test_engine_lent_kv_is_kept_until_fetched() -> None:
    one = sim_harness.make_engine(NO_THROTTLING)
    job = EngineSequence(1, 1000, 1, keeps_kv=True)
    sim_harness.run_sequences(one, [job], [0.0])
    assert not one.idle
    assert one.kv_cache.free == one.kv_cache.total - 63
    one.on_kv_fetched(job, 9.0)
    assert one.idle
    assert one.kv_cache.free == one.kv_cache.total


def test_engine_cached_prefix_is_not_computed_again() -> None:
    own = replace(NO_HINGE, kv_tokens=16_000)
    one = sim_harness.make_engine(own, chunk=512)
    first, second = EngineSequence(0, 1200, 5, block_ids=(7, 8)), EngineSequence(1, 1300, 5, block_ids=(7, 9))
    sim_harness.run_sequences(one, [first, second], [0.0, 5.0])
    assert (first.cached_tokens, second.cached_tokens) == (0, 512)
    assert first.first_token_s is not None
    assert second.first_token_s is not None
    assert second.first_token_s - 5.0 < 0.8 * first.first_token_s
    assert one.metrics.cached_prompt_tokens == 512
    assert one.kv_cache.free == one.kv_cache.total


def test_engine_fully_cached_prompt_computes_its_last_chunk() -> None:
    one = sim_harness.make_engine(NO_HINGE, chunk=512)
    first, again = EngineSequence(0, 1024, 2, block_ids=(7, 8)), EngineSequence(1, 1024, 2, block_ids=(7, 8))
    sim_harness.run_sequences(one, [first, again], [0.0, 5.0])
    assert again.cached_tokens == 512


def test_engine_unused_cache_blocks_are_evicted() -> None:
    one = sim_harness.make_engine(replace(NO_HINGE, kv_tokens=4096), chunk=512)
    sequences = [EngineSequence(n, 3000, 3, block_ids=tuple(range(10 * n, 10 * n + 5))) for n in range(6)]
    sim_harness.run_sequences(one, sequences, [10.0 * n for n in range(6)])
    assert all(job.last_token_s is not None and job.cached_tokens == 0 for job in sequences)
    assert one.kv_cache.free == one.kv_cache.total


def test_engine_shared_prefixes_end_and_release_blocks() -> None:
    one = sim_harness.make_engine(replace(NO_HINGE, kv_tokens=20_000), chunk=512)
    lengths = sim_harness.PoissonLoad(300, 30.0, seed=9).draw()
    sequences = [
        EngineSequence(n, prompt, output, block_ids=tuple([n % 5, *range(100 * n + 10, 100 * n + 10 + prompt // 512)]))
        for n, (_, prompt, output) in enumerate(lengths)
    ]
    sim_harness.run_sequences(one, sequences, [at_s for at_s, _, _ in lengths])
    assert all(job.last_token_s is not None for job in sequences)
    assert one.kv_cache.free == one.kv_cache.total
    assert one.metrics.preemptions > 0
    assert one.metrics.cached_prompt_tokens > 0


def _assert_same_times(ours: list[EngineSequence], theirs: list[tuple[float | None, float | None]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one.first_token_s, one.last_token_s) == pytest.approx(other, abs=TIME_TOLERANCE_S)
