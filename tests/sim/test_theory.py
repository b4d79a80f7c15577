"""The plant where it reduces to queues that are solved: confidence intervals from batches of one long run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from bench.trust import queueing_theory
from plimsoll.core.capacity.queueing import erlang_c
from plimsoll.sim.engine.sequence import EngineSequence
from plimsoll.sim.profile import HardwareProfile, StepCoefficients
from tests.sim import sim_harness

Mean = Callable[[float], queueing_theory.Draw]


def sojourns(
    own: HardwareProfile, requests: int, per_s: float, output: Callable[[Random], int], seed: int
) -> list[EngineSequence]:
    random, now_s, lengths = Random(seed), 0.0, []
    for _ in range(requests):
        now_s += random.expovariate(per_s)
        lengths.append((now_s, 1, output(random)))
    one = sim_harness.make_engine(own)
    return sim_harness.run(one, lengths)


@pytest.mark.parametrize(("slots", "rho"), [(1, 0.5), (4, 0.8), (16, 0.85)])
def test_plant_constant_step_time_matches_mmc(slots: int, rho: float) -> None:
    """A step that costs the same whatever is in it serves each of c slots at one rate; the wait is Erlang's."""
    step_s, mean = 1e-3, 400.0
    own = replace(
        sim_harness.H200,
        coefficients=StepCoefficients(step_s, 0.0, 0.0, 0.0, 0.0, 0.0),
        hot=None,
        hinge_dec=0.0,
        max_num_seqs=slots,
    )
    requested = rho * slots / (mean * step_s)
    found = sojourns(own, 20_000, requested, lambda r: 1 + int(r.expovariate(1 / mean)), seed=slots)
    waits = [one.first_token_s - one.arrived_s for one in found if one.first_token_s is not None]
    rate = len(found) / found[-1].arrived_s  # as it came
    served = math.fsum(one.output_tokens for one in found) / len(found)
    service_s = queueing_theory.service_s(served, slots)
    expected_s = float(erlang_c(rate * service_s, slots)) * service_s / (slots * (1 - rate * service_s / slots))
    low_s, high_s = queueing_theory.interval(waits)
    own_s = 3 * step_s  # two steps in flight, and the first token's own
    assert low_s - own_s <= expected_s <= high_s


@pytest.mark.parametrize(
    ("gaps", "sizes", "servers"),
    [
        (queueing_theory.hyper, queueing_theory.hyper, 4),
        (queueing_theory.erlang2, queueing_theory.hyper, 16),
        (queueing_theory.exponential, queueing_theory.erlang2, 8),
        (queueing_theory.exponential, queueing_theory.constant, 1),
    ],
)
def test_plant_waits_match_kiefer_wolfowitz_recursion(gaps: Mean, sizes: Mean, servers: int) -> None:
    mean = 60.0
    gap_s = queueing_theory.service_s(mean, servers) / 0.9 / servers
    came = queueing_theory.simulate_queue(
        queueing_theory.slot_profile(servers), 2_500, gaps(gap_s), sizes(mean), seed=7
    )
    check = queueing_theory.sample_path("worst", came, servers)
    assert check.holds
    assert check.detail["mean_wait_s"] > 10 * queueing_theory.STEP_S  # there was a queue


def test_kiefer_wolfowitz_counts_servers() -> None:
    assert queueing_theory.kiefer_wolfowitz([0.0, 0.0, 1.0, 1.0], [5.0, 3.0, 4.0, 1.0], 2) == [0.0, 0.0, 2.0, 4.0]
    assert queueing_theory.kiefer_wolfowitz([0.0, 1.0, 2.0], [5.0, 3.0, 4.0], 1) == [0.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("name", "draw"), [("D", queueing_theory.constant), ("E2", queueing_theory.erlang2), ("H2", queueing_theory.hyper)]
)
def test_plant_one_slot_matches_mg1_and_gim1(name: str, draw: Mean) -> None:
    mean, rho = 60.0, 0.6
    taken_s = queueing_theory.service_s(mean, 1)
    gap_s = taken_s / rho
    transforms: dict[str, Callable[[float], float]] = {
        "D": lambda s: math.exp(-s * gap_s),
        "E2": lambda s: (2.0 / (2.0 + s * gap_s)) ** 2,
        "H2": queueing_theory.hyper_transform(gap_s),
    }
    came = queueing_theory.simulate_queue(
        queueing_theory.slot_profile(1), 6_000, queueing_theory.exponential(gap_s), draw(mean), seed=5
    )
    waits = queueing_theory.interval(came.waits_s)
    assert waits[0] - 3 * queueing_theory.STEP_S <= queueing_theory.pollaczek_wait_s(came) <= waits[1]
    came = queueing_theory.simulate_queue(
        queueing_theory.slot_profile(1), 6_000, draw(gap_s), queueing_theory.exponential(mean), seed=6
    )
    waits = queueing_theory.interval(came.waits_s)
    assert waits[0] - 3 * queueing_theory.STEP_S <= queueing_theory.gi_m_1_wait_s(transforms[name], taken_s) <= waits[1]


def test_draws_have_expected_mean_and_variance() -> None:
    random = Random(1)
    for draw, squared in (
        (queueing_theory.constant, 0.0),
        (queueing_theory.erlang2, 0.5),
        (queueing_theory.exponential, 1.0),
        (queueing_theory.hyper, 4.0),
    ):
        values = [draw(2.0)(random) for _ in range(40_000)]
        mean = math.fsum(values) / len(values)
        assert mean == pytest.approx(2.0, rel=0.04)  # four standard errors of the widest
        spread = math.fsum((one - mean) ** 2 for one in values) / len(values) / mean**2
        assert spread == pytest.approx(squared, rel=0.1)


@pytest.mark.parametrize("name", ["equal", "exponential", "of two kinds"])
def test_plant_step_cost_per_sequence_is_processor_sharing(name: str) -> None:
    """Each of n sequences goes on at a n-th of the rate; the mean stay is E[S] / (1 - rho), whatever the lengths."""
    token_s, rho, mean = 1e-4, 0.7, 100
    draws: dict[str, Callable[[Random], int]] = {
        "equal": lambda r: mean,
        "exponential": lambda r: 1 + int(r.expovariate(1 / (mean - 0.5))),
        "of two kinds": lambda r: 20 if r.random() < 0.8 else 420,
    }
    own = replace(
        sim_harness.H200,
        coefficients=StepCoefficients(1e-12, 0.0, token_s, 0.0, token_s, 0.0),
        hot=None,
        hinge_dec=0.0,
        max_num_seqs=4096,
    )
    rate = rho / (mean * token_s)
    found = sojourns(own, 20_000, rate, draws[name], seed=3)
    stays = [one.last_token_s - one.arrived_s for one in found if one.last_token_s is not None]
    low_s, high_s = queueing_theory.interval(stays)
    expected_s = mean * token_s / (1 - rho)
    round_s = 2 * token_s / (1 - rho)  # a newcomer waits for the rest of one step and the whole of the next
    assert low_s - round_s <= expected_s <= high_s
