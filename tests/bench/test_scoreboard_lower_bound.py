"""The least GPU-hours of a row: against runs, and where it can be reckoned by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest

from bench.scoreboard import cost_bound, simulate_run
from bench.scoreboard.loads import LengthDistribution, PhasedLoad, RatePhase
from bench.scoreboard.rows import BOARD_ROWS
from bench.scoreboard.simulate_run import RunTask
from plimsoll.sim import profile
from plimsoll.sim.attempt import TraceRequest

STEP = BOARD_ROWS["step-60"]
CHAT = LengthDistribution(2048.0, 256.0)
SHORT_STARTUP = replace(STEP, name="soon", startup="10")
LOAD_STEP = replace(
    SHORT_STARTUP,
    load=PhasedLoad((RatePhase(40.0, 6.0, CHAT), RatePhase(80.0, 30.0, CHAT), RatePhase(40.0, 6.0, CHAT))),
)
PROMPT, BURST = 4000, 400


@dataclass(frozen=True)
class Burst:
    """Prompts that come together and are due within the same second, each answered by one token."""

    length_s: float = 100.0

    def make(self, seed: int) -> list[TraceRequest]:
        return [TraceRequest(50.05, PROMPT, 1) for _ in range(BURST)]


ONE_BURST = replace(STEP, load=Burst(), ttft="900ms", startup="0")


@pytest.mark.parametrize("policy", ["static:1", "static:2", "static:3", "clairvoyant:plan=0@1;30@3;118@1", "plimsoll"])
def test_bound_no_run_is_below_it(policy: str) -> None:
    run = simulate_run.simulate(RunTask(LOAD_STEP, 1.0, policy, 1))
    assert 0.0 < run["attainment_offered"] <= 1.0
    assert run["gpu_hours"] >= cost_bound.min_gpu_hours(LOAD_STEP, 1.0, run["attainment_offered"]) - 1e-5


def test_bound_burst_costs_minimum_fleet_plus_excess_work() -> None:
    c = profile.load(STEP.hardware).coefficients
    mean_s = PROMPT * (c.pretok + c.preattn * PROMPT / 2)  # of a mean engine
    work_s = BURST * mean_s * 0.9 * (1.0 - 0.02 / 8)  # the fastest, its noise four deviations of its mean lower
    found_s = 3600.0 * cost_bound.min_gpu_hours(ONE_BURST, 1.0, 1.0)
    assert found_s == pytest.approx(100.0 + work_s - 1.0, rel=0.05)
    assert found_s <= 100.0 + work_s - 1.0 + 1e-6
    half_s = 3600.0 * cost_bound.min_gpu_hours(ONE_BURST, 1.0, 0.5)
    assert half_s == pytest.approx(100.0 + work_s / 2 - 1.0, rel=0.05)


def test_bound_rises_with_attainment_and_slower_plant() -> None:
    costs = [cost_bound.min_gpu_hours(LOAD_STEP, 1.0, share) for share in (0.0, 0.5, 0.9, 0.96, 1.0)]
    assert costs == sorted(costs)
    assert costs[-1] > 1.3 * costs[0]
    assert (
        cost_bound.min_gpu_hours(LOAD_STEP, 1.4, 0.96)
        > cost_bound.min_gpu_hours(LOAD_STEP, 1.0, 0.96)
        > cost_bound.min_gpu_hours(LOAD_STEP, 0.7, 0.96)
    )


@pytest.mark.parametrize("name", ["guide", "step-60", "shift-60-pd"])
def test_bound_zero_attainment_costs_minimum_fleet(name: str) -> None:
    row = BOARD_ROWS[name]
    fleet = sum(count for _, count, _ in row.tiers) * row.gpus * row.load.length_s / 3600.0
    assert cost_bound.min_gpu_hours(row, 1.0, 0.0) == pytest.approx(fleet)


def test_bound_infeasible_slo_is_infinite() -> None:
    assert cost_bound.min_gpu_hours(replace(LOAD_STEP, tpot="1ms"), 1.0, 0.5) == math.inf
