"""The plant where it reduces to queues that are solved: confidence intervals from batches of one long run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest

from plimsoll.core.queueing import erlang_c
from plimsoll.sim.job import Job
from plimsoll.sim.profile import Coefficients
from tests.sim import lab

BATCHES = 20
T_99 = 2.861  # Student's t, 19 degrees of freedom, two-sided 99 %


def interval(values: Sequence[float]) -> tuple[float, float]:
    """99 % confidence interval of the mean from batch means, the first tenth left out."""
    kept = values[len(values) // 10 :]
    size = len(kept) // BATCHES
    means = [math.fsum(kept[n * size : (n + 1) * size]) / size for n in range(BATCHES)]
    mean = math.fsum(means) / BATCHES
    spread = math.sqrt(math.fsum((one - mean) ** 2 for one in means) / (BATCHES - 1) / BATCHES)
    return mean - T_99 * spread, mean + T_99 * spread


def sojourns(own: lab.Profile, requests: int, per_s: float, output: Callable[[Random], int], seed: int) -> list[Job]:
    random, now_s, lengths = Random(seed), 0.0, []
    for _ in range(requests):
        now_s += random.expovariate(per_s)
        lengths.append((now_s, 1, output(random)))
    one = lab.engine(own)
    return lab.run(one, lengths)


@pytest.mark.parametrize(("slots", "rho"), [(1, 0.5), (4, 0.8), (16, 0.85)])
def test_slots_without_a_price_are_m_m_c(slots: int, rho: float) -> None:
    """A step that costs the same whatever is in it serves each of c slots at one rate; the wait is Erlang's."""
    step_s, mean = 1e-3, 400.0
    own = replace(
        lab.H200,
        coefficients=Coefficients(step_s, 0.0, 0.0, 0.0, 0.0, 0.0),
        hot=None,
        hinge_dec=0.0,
        max_num_seqs=slots,
    )
    asked = rho * slots / (mean * step_s)
    found = sojourns(own, 20_000, asked, lambda r: 1 + int(r.expovariate(1 / mean)), seed=slots)
    waits = [one.first_s - one.arrived_s for one in found if one.first_s is not None]
    rate = len(found) / found[-1].arrived_s  # as it came
    served = math.fsum(one.output for one in found) / len(found)
    service_s = (served + 1.0) * step_s  # a slot stands empty for a step: the next one is composed when it is free
    expected_s = float(erlang_c(rate * service_s, slots)) * service_s / (slots * (1 - rate * service_s / slots))
    low_s, high_s = interval(waits)
    own_s = 3 * step_s  # two steps in flight, and the first token's own
    assert low_s - own_s <= expected_s <= high_s


@pytest.mark.parametrize("name", ["equal", "exponential", "of two kinds"])
def test_a_step_that_costs_by_sequence_is_processor_sharing(name: str) -> None:
    """Each of n sequences goes on at a n-th of the rate; the mean stay is E[S] / (1 - rho), whatever the lengths."""
    token_s, rho, mean = 1e-4, 0.7, 100
    draws: dict[str, Callable[[Random], int]] = {
        "equal": lambda r: mean,
        "exponential": lambda r: 1 + int(r.expovariate(1 / (mean - 0.5))),
        "of two kinds": lambda r: 20 if r.random() < 0.8 else 420,
    }
    own = replace(
        lab.H200,
        coefficients=Coefficients(1e-12, 0.0, token_s, 0.0, token_s, 0.0),
        hot=None,
        hinge_dec=0.0,
        max_num_seqs=4096,
    )
    rate = rho / (mean * token_s)
    found = sojourns(own, 20_000, rate, draws[name], seed=3)
    stays = [one.last_s - one.arrived_s for one in found if one.last_s is not None]
    low_s, high_s = interval(stays)
    expected_s = mean * token_s / (1 - rho)
    round_s = 2 * token_s / (1 - rho)  # a newcomer waits for the rest of one step and the whole of the next
    assert low_s - round_s <= expected_s <= high_s
