"""Admission in overload, on simulated engines whose coefficients differ from the controller's by 10 to 20 %."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from plimsoll.core.admission.cost_model import ClassPolicy
from plimsoll.core.capacity.slo_capacity import slo_capacity_per_s
from plimsoll.core.capacity.tier_model import TierSpec, build_profile
from plimsoll.core.slo import Slo
from tests.core.admission_engine import ClientRequest, StepEngine
from tests.core.admission_fixtures import (
    FIXED,
    GUIDE,
    HOT,
    ROOMY,
    SERVE,
    SLOW,
    gate,
    scaled,
)
from tests.core.admission_simulator import CapPolicy, ControllerPolicy, goodput, poisson, run

FAST = (0.90, 1.0, 0.85, 0.90, 0.80, 1.10)


def overload(
    tier: TierSpec,
    by: tuple[float, ...],
    load: float,
    seconds: float,
    window: tuple[float, float],
    cap: int,
) -> tuple[float, float, float, float, list[ClientRequest]]:
    """Goodput, share within SLO of those admitted, the plant's SLO capacity, the best cap's goodput, and the jobs.

    cap: the best of five about it, which no code under test decides.
    """
    plant = scaled(tier.model, by)
    line = float(slo_capacity_per_s(build_profile(replace(tier, model=plant)), 1)[0])
    classes = (ClassPolicy("chat", 0, tier.slo),)

    def jobs() -> list[ClientRequest]:
        made = poisson(load * line, seconds, np.random.default_rng(7))
        for job in made:
            job.target_s = tier.slo.ttft_s or 0.0
            if tier.workload is FIXED:
                job.prompt, job.output = 4000, 1000
        return made

    def run_policy(policy: ControllerPolicy | CapPolicy) -> tuple[tuple[float, float], list[ClientRequest]]:
        offered = jobs()
        run(policy, [StepEngine(plant, tier.limits, np.random.default_rng(8))], offered, seconds)
        return goodput(offered, tier.slo.tpot_s or 0.0, *window), offered

    best = run_policy(CapPolicy(cap, False, plant))[0][0]
    (rate, share), offered = run_policy(ControllerPolicy(gate(tier, classes, 0)))
    return rate, share, line, best, offered


@pytest.mark.parametrize(
    ("name", "tier", "by", "load", "seconds", "window", "cap"),
    [
        ("step time, slow plant", SERVE, SLOW, 2.0, 110.0, (35.0, 85.0), 195),
        ("step time, fast plant", SERVE, FAST, 2.0, 110.0, (35.0, 85.0), 250),
        ("KV, slow plant", GUIDE, SLOW, 1.5, 600.0, (150.0, 530.0), 70),
    ],
)
def test_admission_overload_matches_capacity_and_best_cap(
    name: str,
    tier: TierSpec,
    by: tuple[float, ...],
    load: float,
    seconds: float,
    window: tuple[float, float],
    cap: int,
) -> None:
    rate, share, line, best, offered = overload(tier, by, load, seconds, window, cap)
    print(
        f"\n{name}: goodput {rate:.2f}/s, {share:.1%} of those admitted; slo_rate {line:.2f}/s; best cap {best:.2f}/s"
    )
    assert rate >= line
    assert rate >= 0.97 * best
    assert share >= 0.95
    inside = [job for job in offered if window[0] <= job.arrived_s < window[1]]
    shed = [job for job in inside if job.admitted_s is None]
    heavier = mean_work_s(tier, shed) / mean_work_s(tier, inside)
    print(f"{name}: the mean work of those shed is {heavier:.3f} of that of all")
    assert heavier <= 1.1  # the large ones are not picked out


def mean_work_s(tier: TierSpec, jobs: list[ClientRequest]) -> float:
    prompts, outputs = np.array([job.prompt for job in jobs]), np.array([job.output for job in jobs])
    return float(np.mean(tier.model.prefill_work_s(prompts, 0) + tier.model.decode_work_s(prompts, outputs)))


def test_admission_ttft_only_slo_violates_e2e_and_tpot() -> None:
    """The TTFT target is so long that a first token in time says nothing about TPOT."""
    blind, whole = Slo(0.95, 2.0), Slo(0.95, 2.0, 0.0, 0.05)
    jobs = {}
    for name, slo in (("ttft only", blind), ("all three", whole)):
        classes = (ClassPolicy("chat", 0, slo),)
        offered = poisson(50.0, 90.0, np.random.default_rng(7), target_s=2.0)
        run(ControllerPolicy(gate(replace(SERVE, slo=slo), classes, 0)), [StepEngine(HOT, ROOMY)], offered, 90.0)
        jobs[name] = goodput(offered, 0.05, 35.0, 65.0)
    print(f"\nTTFT only: {jobs['ttft only'][1]:.2%} of admitted are within SLO; all three: {jobs['all three'][1]:.2%}")
    assert jobs["ttft only"][1] < 0.05
    assert jobs["all three"][1] > 0.95
    assert jobs["all three"][0] > 10 * jobs["ttft only"][0]


def test_admission_ramp_from_empty_meets_tpot() -> None:
    """Three times the load on an empty replica: prefills come back to back, and must not stop those that decode."""
    offered = poisson(60.0, 30.0, np.random.default_rng(3))
    run(ControllerPolicy(gate(replicas=0)), [StepEngine(HOT, ROOMY)], offered, 60.0)
    early = [job for job in offered if job.admitted_s is not None and job.admitted_s < 5.0]
    assert len(early) > 80
    assert np.mean([job.tpot_s <= 0.05 for job in early]) >= 0.9
    assert goodput(offered, 0.05, 0.0, 30.0)[1] >= 0.95


def test_replica_step_time_ratio_of_slow_replica_is_learned() -> None:
    controller = ControllerPolicy(gate(replicas=0))
    twice = scaled(HOT, (1.4, 1.4, 1.4, 1.4, 1.4, 1.4))
    offered = poisson(30.0, 120.0, np.random.default_rng(5))
    run(controller, [StepEngine(twice, ROOMY), StepEngine(HOT, ROOMY)], offered, 120.0, ready_s=[0.0, 0.0])
    slow, right = (controller.gate.pool.replicas[str(k)] for k in range(2))
    assert slow.step_time_ratio == pytest.approx(1.4, rel=0.1)
    assert right.step_time_ratio == pytest.approx(1.0, rel=0.1)
