"""The engine's schedule: leaping against every step by itself, and against the light engine, which never leaps."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from plimsoll.sim.job import Job
from plimsoll.sim.pace import Pace
from plimsoll.sim.profiles import load
from simulated.core import Core
from simulated.meters import Meters as LightMeters
from simulated.plant import Plant as LightPlant
from simulated.scheduler import Limits
from simulated.sequences import Sequence
from simulated.transfer import Leases
from simulated.transfer import Wire as LightWire
from tests.sim import lab

COOL = replace(lab.H200, hot=None)
LEVEL = replace(lab.H200, hot=None, hinge_sequences=0, hinge_dec=0.0)
SAME_S = 1e-9  # sums in another order

# name: hardware, load, whether prompts are computed elsewhere
SCENES = {
    "light": (COOL, lab.Load(2500, 12.0), False),
    "beyond the knee": (COOL, lab.Load(1500, 26.0, seed=2), False),
    "short of blocks": (replace(COOL, kv_tokens=60_000), lab.Load(1000, 40.0, seed=3), False),
    "few slots, small chunks": (
        replace(COOL, kv_tokens=30_000, max_num_seqs=24, budget=512),
        lab.Load(1000, 30.0, seed=4),
        False,
    ),
    "long": (replace(COOL, kv_tokens=330_000), lab.Load(500, 2.0, 4000, 1000, seed=5), False),
    "fetched": (replace(COOL, block_size=128), lab.Load(2000, 20.0, seed=6), True),
    "fetched, short of blocks": (
        replace(COOL, kv_tokens=60_000, block_size=128),
        lab.Load(1000, 30.0, seed=7),
        True,
    ),
    "tiny": (COOL, lab.Load(1000, 200.0, 20, 3, seed=8), False),
}


def test_the_scenes_have_ten_thousand_requests() -> None:
    assert sum(load.requests for _, load, _ in SCENES.values()) >= 10_000


@pytest.mark.parametrize("name", SCENES)
def test_leaping_is_exact(name: str) -> None:
    own, load, remote = SCENES[name]
    lengths = load.draw()
    leaping, stepping = lab.engine(own), lab.engine(own, leap=False)
    ours, theirs = lab.run(leaping, lengths, remote=remote), lab.run(stepping, lengths, remote=remote)
    _same(ours, [(one.first_s, one.last_s) for one in theirs])
    counted = [(e.meters.steps, e.meters.generated, e.meters.preemptions) for e in (leaping, stepping)]
    assert counted[0] == counted[1]


@pytest.mark.parametrize("name", SCENES)
def test_the_schedule_is_the_light_engines(name: str) -> None:
    own, load_, remote = SCENES[name]
    lengths = load_.draw()
    one = lab.engine(own)
    ours = lab.run(one, lengths, remote=remote)
    core, theirs = _light(own, lengths, remote)
    _same(ours, [(other.first_s, other.last_s) for other in theirs])
    assert one.meters.preemptions == core.preemptions
    assert one.meters.steps == core.meters.histograms["iteration_tokens_total"].cumulated()[-1]
    assert one.meters.generated == core.meters.counters["generation_tokens"]
    assert one.meters.local == core.meters.counters["local_compute"]
    assert one.meters.post_s == pytest.approx(core.meters.nixl["nixl_post_time_seconds"].total)


def test_noise_and_heat_leap_as_they_step() -> None:
    own, lengths = replace(lab.H200, kv_tokens=120_000), lab.Load(700, 20.0).draw()
    ours = lab.run(lab.engine(own, noise=0.05), lengths)
    theirs = lab.run(lab.engine(own, noise=0.05, leap=False), lengths)
    _same(ours, [(one.first_s, one.last_s) for one in theirs])
    assert ours[0].first_s != lab.run(lab.engine(own), lengths)[0].first_s


def test_a_hot_card_is_slower_and_an_idle_one_cools() -> None:
    busy = [(0.01 * n, 3000, 2) for n in range(200)]
    later = [(60.0, 3000, 2)]
    ours = lab.run(lab.engine(lab.H200), busy + later)
    cool = lab.run(lab.engine(COOL), busy + later)
    assert ours[199].last_s is not None
    assert cool[199].last_s is not None
    assert ours[199].last_s > 1.1 * cool[199].last_s
    assert ours[200].first_s == pytest.approx(cool[200].first_s)


def test_a_step_takes_what_the_profile_says() -> None:
    c = LEVEL.coefficients
    [one] = lab.run(lab.engine(LEVEL), [(5.0, 1000, 11)])
    assert one.first_s == pytest.approx(5.0 + c.base + c.anypre + c.pretok * 1000 + c.preattn * 500_000)
    read = sum(range(1000, 1010))
    assert one.last_s is not None
    assert one.last_s - one.first_s == pytest.approx(10 * (c.base + c.dec) + c.ctx * read)


def test_decoding_bends_at_the_hinge() -> None:
    bent, level = lab.engine(COOL), lab.engine(LEVEL)
    lengths = [(0.0, 10, 200)] * 200
    slow, fast = lab.run(bent, lengths)[0], lab.run(level, lengths)[0]
    assert slow.last_s is not None
    assert fast.last_s is not None
    assert slow.last_s > fast.last_s


@pytest.mark.parametrize(
    ("tokens", "sequences", "bent"),
    [(0, 128, 0), (0, 130, 2), (200, 100, 100), (28, 100, 0), (38, 100, 10), (8000, 1, 1)],
)
def test_the_hinge_counts_tokens_of_a_step(tokens: int, sequences: int, bent: int) -> None:
    c = COOL.coefficients
    law_s = c.base + c.dec * sequences + (c.anypre + c.pretok * tokens if tokens else 0.0)
    found_s = Pace(COOL, 0.0, Random(1)).stretch(0, tokens, 0.0, sequences, 0).first_s
    assert found_s == pytest.approx(law_s + bent * COOL.hinge_dec)
    assert LightPlant(replace(load("h200-8b"), hot=None)).seconds(0.0, tokens, 0.0, sequences, 0) == pytest.approx(
        found_s
    )


def test_what_is_scraped_between_two_events_is_what_has_come_out() -> None:
    leaping, stepping = lab.engine(COOL), lab.engine(COOL, leap=False)
    todo = lab.Load(60, 15.0).draw()
    for one in (leaping, stepping):
        for job, (at_s, _, _) in zip(lab.jobs(todo), todo, strict=True):
            one.add(job, at_s)
    last_s = todo[-1][0]
    for moment in range(40):
        now_s = last_s + 0.0371 * moment
        ours, theirs = (one.scraped("p", now_s, now_s) for one in (leaping, stepping))
        for name in ("tpot_s", "ttft_s", "gaps_s"):
            one, other = getattr(ours, name), getattr(theirs, name)
            assert one.counts == other.counts
            assert one.total == pytest.approx(other.total)
        rest: dict[str, Any] = dict.fromkeys(("tpot_s", "ttft_s", "gaps_s"))
        assert replace(ours, **rest) == replace(theirs, **rest)


def test_all_blocks_come_back() -> None:
    for own, load_, remote in SCENES.values():
        one = lab.engine(own)
        lab.run(one, load_.draw(), remote=remote)
        assert one.blocks.free == one.blocks.total
        assert one.idle


def test_kv_that_was_lent_is_kept_until_it_is_fetched() -> None:
    one = lab.engine(COOL)
    job = Job(1, 1000, 1, produce=True)
    lab.drive(one, [job], [0.0])
    assert not one.idle
    assert one.blocks.free == one.blocks.total - 63
    one.fetched(job, 9.0)
    assert one.idle
    assert one.blocks.free == one.blocks.total


def test_a_known_beginning_is_not_computed_again() -> None:
    own = replace(LEVEL, kv_tokens=16_000)
    one = lab.engine(own, chunk=512)
    first, second = Job(0, 1200, 5, ids=(7, 8)), Job(1, 1300, 5, ids=(7, 9))
    lab.drive(one, [first, second], [0.0, 5.0])
    assert (first.cached, second.cached) == (0, 512)
    assert first.first_s is not None
    assert second.first_s is not None
    assert second.first_s - 5.0 < 0.8 * first.first_s
    assert one.meters.cached == 512
    assert one.blocks.free == one.blocks.total


def test_the_last_token_of_a_known_prompt_is_computed() -> None:
    one = lab.engine(LEVEL, chunk=512)
    first, again = Job(0, 1024, 2, ids=(7, 8)), Job(1, 1024, 2, ids=(7, 8))
    lab.drive(one, [first, again], [0.0, 5.0])
    assert again.cached == 512


def test_what_nobody_uses_makes_room() -> None:
    one = lab.engine(replace(LEVEL, kv_tokens=4096), chunk=512)
    todo = [Job(n, 3000, 3, ids=tuple(range(10 * n, 10 * n + 5))) for n in range(6)]
    lab.drive(one, todo, [10.0 * n for n in range(6)])
    assert all(job.last_s is not None and job.cached == 0 for job in todo)
    assert one.blocks.free == one.blocks.total


def test_many_with_a_common_beginning_end_and_give_it_back() -> None:
    one = lab.engine(replace(LEVEL, kv_tokens=20_000), chunk=512)
    lengths = lab.Load(300, 30.0, seed=9).draw()
    todo = [
        Job(n, prompt, output, ids=tuple([n % 5, *range(100 * n + 10, 100 * n + 10 + prompt // 512)]))
        for n, (_, prompt, output) in enumerate(lengths)
    ]
    lab.drive(one, todo, [at_s for at_s, _, _ in lengths])
    assert all(job.last_s is not None for job in todo)
    assert one.blocks.free == one.blocks.total
    assert one.meters.preemptions > 0
    assert one.meters.cached > 0


def _same(ours: list[Job], theirs: list[tuple[float | None, float | None]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one.first_s, one.last_s) == pytest.approx(other, abs=SAME_S)


def _light(own: lab.Profile, lengths: list[lab.Lengths], remote: bool) -> tuple[Core, list[Sequence]]:
    """The light engine's core over the same requests, without noise."""
    theirs = replace(
        load("h200-8b"),
        hot=None,
        kv_tokens=own.kv_tokens,
        max_num_seqs=own.max_num_seqs,
        budget=own.budget,
        block_size=own.block_size,
    )
    core = Core(
        Limits(own.max_num_seqs, own.budget, own.block_size, prefix_caching=False),
        own.kv_tokens // own.block_size,
        LightPlant(theirs),
        LightWire(own.layers, own.block_size, own.kv_bytes_per_token, 1e11),
        Leases(30.0),
        LightMeters(own.max_model_len),
    )
    found = []
    for place, (at_s, prompt, output) in enumerate(lengths):
        found.append(Sequence(str(place), bytes(4 * prompt), output, at_s, remote=remote))
        core.add(found[-1], at_s)
    core.advance(math.nextafter(math.inf, 0.0))
    return core, found
