"""Where a load changes, and which changes of direction had no reason in it."""

from __future__ import annotations

from random import Random

import pytest

from plimsoll.sim.load_phases import BIN_S, OfferedWork, reversals


def offered(rates: list[tuple[float, float]], seed: int = 1, burst: int = 1) -> OfferedWork:
    """Poisson arrivals (or bursts of so many) of lognormal work: seconds and requests a second, one after another."""
    random, found, now_s, end_s = Random(seed), OfferedWork(), 0.0, 0.0
    for length_s, rate in rates:
        now_s, end_s = end_s, end_s + length_s
        while (now_s := now_s + random.expovariate(rate / burst)) < end_s:
            for _ in range(burst):
                found.add(now_s, random.lognormvariate(0.0, 0.8))
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("burst", [1, 10])
def test_phases_constant_load_is_one_phase(seed: int, burst: int) -> None:
    assert offered([(6 * 3600.0, 2.0)], seed, burst).phases() == [0.0]


@pytest.mark.parametrize("seed", range(5))
def test_phases_rate_step_starts_a_phase(seed: int) -> None:
    first, second, third = offered([(1800.0, 2.0), (900.0, 6.0), (1800.0, 2.0)], seed).phases()
    assert first == 0.0
    assert second == pytest.approx(1800.0, abs=2 * BIN_S)
    assert third == pytest.approx(2700.0, abs=2 * BIN_S)


def test_phases_drifting_load_has_many_phases() -> None:
    assert len(offered([(300.0, 2.0 + n) for n in range(12)]).phases()) >= 4


def test_phases_short_or_empty_load_is_one_phase() -> None:
    assert OfferedWork().phases() == [0.0]
    assert offered([(100.0, 1.0), (100.0, 50.0)]).phases() == [0.0]


PHASES = [0.0, 100.0, 200.0]


@pytest.mark.parametrize(
    ("desired", "found"),
    [
        ([], [0, 0, 0]),
        ([(0.0, 1), (10.0, 2), (20.0, 3)], [0, 0, 0]),  # one way
        ([(0.0, 1), (10.0, 2), (20.0, 1), (30.0, 2)], [2, 0, 0]),
        ([(0.0, 1), (90.0, 2), (110.0, 1), (120.0, 0), (210.0, 4)], [0, 0, 0]),  # the load turned, so did the fleet
        ([(0.0, 1), (110.0, 2), (110.0, 2), (130.0, 1)], [0, 1, 0]),  # a line where nothing was ordered is no change
        ([(0.0, 1), (210.0, 2), (250.0, 1), (300.0, 2)], [0, 0, 1]),  # after the load there is none
    ],
)
def test_reversals_are_counted_within_a_phase(desired: list[tuple[float, int]], found: list[int]) -> None:
    assert reversals(desired, PHASES, 300.0) == found
