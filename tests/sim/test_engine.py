"""The engine's schedule: leaping against every step by itself, and against the light engine, which never leaps."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from plimsoll.sim.profiles import load
from plimsoll.sim.sequence import EngineSequence
from plimsoll.sim.step_timing import StepTiming
from simulated.engine_core import EngineCore
from simulated.engine_metrics import EngineMetrics as LightMeters
from simulated.kv_transfer import KvLink as LightWire
from simulated.kv_transfer import LeaseTable
from simulated.plant import StepTimePlant as LightPlant
from simulated.scheduler import StepLimits
from simulated.sequence import EngineSequence as ServedSequence
from tests.sim import sim_harness

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
def test_engine_schedule_equals_engine_simulator(name: str) -> None:
    own, load_, remote = SCENARIOS[name]
    lengths = load_.draw()
    one = sim_harness.make_engine(own)
    ours = sim_harness.run(one, lengths, remote=remote)
    core, theirs = _run_engine_simulator(own, lengths, remote)
    _assert_same_times(ours, [(other.first_token_s, other.last_token_s) for other in theirs])
    assert one.metrics.preemptions == core.preemptions
    assert one.metrics.steps == core.metrics.histograms["iteration_tokens_total"].cumulative()[-1]
    assert one.metrics.generated_tokens == core.metrics.counters["generation_tokens"]
    assert one.metrics.local_prompt_tokens == core.metrics.counters["local_compute"]
    assert one.metrics.post_s == pytest.approx(core.metrics.nixl["nixl_post_time_seconds"].total)


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
    found_s = StepTiming(NO_THROTTLING, 0.0, Random(1)).series(0, tokens, 0.0, sequences, 0).first_s
    assert found_s == pytest.approx(law_s + bent * NO_THROTTLING.hinge_dec)
    assert LightPlant(replace(load("h200-8b"), hot=None)).step_s(0.0, tokens, 0.0, sequences, 0) == pytest.approx(
        found_s
    )


def test_engine_scrape_between_events_shows_finished_steps() -> None:
    leaping, stepping = sim_harness.make_engine(NO_THROTTLING), sim_harness.make_engine(NO_THROTTLING, can_skip=False)
    todo = sim_harness.PoissonLoad(60, 15.0).draw()
    for one in (leaping, stepping):
        for job, (at_s, _, _) in zip(sim_harness.make_sequences(todo), todo, strict=True):
            one.add(job, at_s)
    last_s = todo[-1][0]
    for moment in range(40):
        now_s = last_s + 0.0371 * moment
        ours, theirs = (one.scrape("p", now_s, now_s) for one in (leaping, stepping))
        for name in ("tpot_s", "ttft_s", "itl_s"):
            one, other = getattr(ours, name), getattr(theirs, name)
            assert one.counts == other.counts
            assert one.value_sum == pytest.approx(other.value_sum)
        rest: dict[str, Any] = dict.fromkeys(("tpot_s", "ttft_s", "itl_s"))
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
    todo = [EngineSequence(n, 3000, 3, block_ids=tuple(range(10 * n, 10 * n + 5))) for n in range(6)]
    sim_harness.run_sequences(one, todo, [10.0 * n for n in range(6)])
    assert all(job.last_token_s is not None and job.cached_tokens == 0 for job in todo)
    assert one.kv_cache.free == one.kv_cache.total


def test_engine_shared_prefixes_end_and_release_blocks() -> None:
    one = sim_harness.make_engine(replace(NO_HINGE, kv_tokens=20_000), chunk=512)
    lengths = sim_harness.PoissonLoad(300, 30.0, seed=9).draw()
    todo = [
        EngineSequence(n, prompt, output, block_ids=tuple([n % 5, *range(100 * n + 10, 100 * n + 10 + prompt // 512)]))
        for n, (_, prompt, output) in enumerate(lengths)
    ]
    sim_harness.run_sequences(one, todo, [at_s for at_s, _, _ in lengths])
    assert all(job.last_token_s is not None for job in todo)
    assert one.kv_cache.free == one.kv_cache.total
    assert one.metrics.preemptions > 0
    assert one.metrics.cached_prompt_tokens > 0


def _assert_same_times(ours: list[EngineSequence], theirs: list[tuple[float | None, float | None]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one.first_token_s, one.last_token_s) == pytest.approx(other, abs=TIME_TOLERANCE_S)


def _run_engine_simulator(
    own: sim_harness.HardwareProfile, lengths: list[sim_harness.Lengths], remote: bool
) -> tuple[EngineCore, list[ServedSequence]]:
    """The light engine's core over the same requests, without noise."""
    theirs = replace(
        load("h200-8b"),
        hot=None,
        kv_tokens=own.kv_tokens,
        max_num_seqs=own.max_num_seqs,
        budget=own.budget,
        block_size=own.block_size,
    )
    core = EngineCore(
        StepLimits(own.max_num_seqs, own.budget, own.block_size, prefix_caching=False),
        own.kv_tokens // own.block_size,
        LightPlant(theirs),
        LightWire(own.layers, own.block_size, own.kv_bytes_per_token, 1e11),
        LeaseTable(30.0),
        LightMeters(own.max_model_len),
    )
    found = []
    for place, (at_s, prompt, output) in enumerate(lengths):
        found.append(ServedSequence(str(place), bytes(4 * prompt), output, at_s, remote=remote))
        core.add(found[-1], at_s)
    core.advance(math.nextafter(math.inf, 0.0))
    return core, found
