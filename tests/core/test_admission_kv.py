"""Admission where the KV cache binds: what residents hold until they end, and goodput against the best constant cap."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from plimsoll.core.admission import ClassPolicy, Outcome, limits
from plimsoll.core.admission.growth import PARTS, Growth
from plimsoll.core.admission.limits import Limits, Need
from plimsoll.core.knee import Tier
from plimsoll.core.latency import EngineLimits
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.slo import Slo
from plimsoll.core.workload import from_samples
from tests.core.admission_lab import CapPolicy, Engine, GatePolicy, Job, goodput, run
from tests.core.test_admission import LARGE, SLOW, ask, gate, scaled

KV = EngineLimits(1024, 330_000, 8192)
PROMISE = Slo(0.95, 3.0, 0.0, 0.1)


def tier(prompt: int, output: int, sigma: float) -> Tier:
    prompts, outputs = lengths(prompt, output, sigma, 2000, 1)
    return Tier(Role.SERVE, LARGE, from_samples(prompts, np.zeros(2000), outputs), KV, PROMISE)


def lengths(prompt: int, output: int, sigma: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    spread = np.exp(sigma * rng.standard_normal((2, count)) - sigma**2 / 2)
    return np.ceil(prompt * spread[0]), np.ceil(output * spread[1])


def a_need(of: Limits, prompt: int, output: int) -> Need:
    return of.need(ask("one", prompt_tokens=prompt, max_tokens=output))


def test_what_is_held_at_most_is_what_a_walk_through_all_steps_finds() -> None:
    of = limits(tier(500, 3000, 0.0), (ClassPolicy("chat", 0, PROMISE),))
    rng = np.random.default_rng(4)
    for _ in range(30):
        growth, step = Growth(3000.0), float(rng.integers(0, 5000))
        there = []
        for _ in range(int(rng.integers(1, 60))):
            need = a_need(of, int(rng.integers(1, 4000)), int(rng.integers(1, 3000)))
            end = step + float(rng.uniform(0.0, need.output_tokens))
            growth.add(need, end)
            there.append((need, end))
        gone = there[::3]
        for need, end in gone:
            growth.remove(need, end)
        there = [one for one in there if one not in gone]
        newcomer = a_need(of, 700, 2000)
        last = step + newcomer.output_tokens
        times = [min(end, last) for _, end in there] + [last]
        there.append((newcomer, last))
        walked = max(sum(need.kv_mean_tokens - (end - at) for need, end in there if end >= at) for at in times)
        together = sum(need.sequences for need, _ in there) * 3000.0 / PARTS
        found = growth.most(newcomer, step)
        assert walked - together / 2 <= found <= walked + together + 4000.0 * len(there) / PARTS + 7000.0
        assert found <= sum(need.kv_mean_tokens for need, _ in there) + together


def test_who_outlives_the_expected_end_counts_a_deviation_beyond_it_until_it_ends() -> None:
    of = limits(tier(500, 3000, 0.5), (ClassPolicy("chat", 0, PROMISE),))
    need, newcomer = of.need(ask("long", prompt_tokens=500)), a_need(of, 1, 1)
    growth = Growth(of.output_mean)
    growth.add(need, 3000.0)
    assert growth.most(newcomer, 9000.0) == pytest.approx(need.kv_mean_tokens + math.sqrt(need.kv_variance), rel=0.05)
    growth.remove(need, 3000.0)
    assert growth.most(newcomer, 9001.0) < 100.0


def test_those_that_come_together_have_room_for_their_ends_and_no_more() -> None:
    at = tier(500, 3000, 0.0)
    door = gate(replace(at, slo=Slo(0.95, 60.0, 0.0, 0.1)), (ClassPolicy("chat", 0, Slo(0.95, 60.0, 0.0, 0.1)),))
    let_in = 0
    for number in range(400):
        now = number * 0.005
        let_in += door.offer(ask(f"r{number}", now, prompt_tokens=500), now).outcome is Outcome.ADMITTED
    assert let_in <= 330_000 / 3_500 + 4


def test_what_runs_already_is_taken_to_be_on_its_way() -> None:
    """A gate made anew counts residents by when they came: at the middle of their answers they hold half of them."""
    door = gate(tier(500, 3000, 0.0), (ClassPolicy("chat", 0, PROMISE),))
    for number in range(90):
        assert door.adopt(ask(f"r{number}", prompt_tokens=500), "0", now=number * 0.9)
    assert door.offer(ask("next", 81.0, prompt_tokens=500), 81.0).outcome is Outcome.ADMITTED


@pytest.mark.parametrize(
    ("prompt", "output", "sigma", "by", "rate", "caps", "seeds"),
    [
        (500, 3000, 0.0, SLOW, 2.2, (129, 143, 152), 2),
        (500, 3000, 0.5, SLOW, 1.9, (112, 118, 124), 5),
        (1500, 1500, 0.3, SLOW, 2.6, (112, 123, 133), 3),
        (4000, 1000, 0.0, SLOW, 2.4, (66, 69, 71), 2),
    ],
)
def test_in_overload_kv_is_used_as_the_best_constant_cap_uses_it(
    prompt: int, output: int, sigma: float, by: tuple[float, ...], rate: float, caps: tuple[int, ...], seeds: int
) -> None:
    at, seconds, window = tier(prompt, output, sigma), 900.0, (300.0, 760.0)
    plant = scaled(at.model, by)

    def played(policy: GatePolicy | CapPolicy, seed: int) -> tuple[float, float]:
        rng = np.random.default_rng(seed)
        times = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
        prompts, outputs = lengths(prompt, output, sigma, times.size, seed + 100)
        jobs = [
            Job(f"j{i}", float(t), int(p), int(o), target_s=3.0, told=[])
            for i, (t, p, o) in enumerate(zip(times, prompts, outputs, strict=True))
        ]
        run(policy, [Engine(plant, KV, np.random.default_rng(8))], jobs, seconds)
        return goodput(jobs, 0.1, *window)

    drawn, classes = range(7, 7 + 10 * seeds, 10), (ClassPolicy("chat", 0, PROMISE),)
    best = max(sum(played(CapPolicy(cap, False, plant), seed)[0] for seed in drawn) for cap in caps)
    mine = [played(GatePolicy(gate(at, classes, 0)), seed) for seed in drawn]
    rate_of, share = sum(rate for rate, _ in mine), float(np.mean([share for _, share in mine]))
    mine_s, best_s = f"{rate_of / seeds:.3f}/s", f"{best / seeds:.3f}/s"
    print(f"\n{prompt}/{output}, sigma {sigma}: {mine_s}, {share:.1%} of those let in; best cap {best_s}")
    assert rate_of >= 0.97 * best
    assert share >= 0.97
