"""Arrivals that bunch, or come more regularly than by chance: what they do to places, waits and the load line."""

import math
from dataclasses import replace

import numpy as np
import pytest

from plimsoll.core.capacity import queueing, slo_capacity, tier_model
from plimsoll.core.capacity.sizing import Infeasible, Sizing, size_tier
from plimsoll.core.capacity.tier_model import TierSpec
from plimsoll.core.engine_model.step_time import EngineLimits, StepModel
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import Workload, from_samples
from tests.core import fcfs_queue

COUNT = 300_000
MODEL = StepModel(0.0132, 0.0, 5.2e-5, 1.75e-9, 2e-5, 4.6e-8)  # of a 32B on two H100s
SAMPLES = np.random.default_rng(4).lognormal(0.0, 0.3, (2, 2000))
MIX = from_samples(4000 * SAMPLES[0], np.zeros(2000), 1000 * SAMPLES[1])
TIER = TierSpec(Role.SERVE, MODEL, MIX, EngineLimits(64, 10**7, 8192), Slo(0.95, ttft_s=3.0, tpot_s=0.1))


def simulated_waits(
    load: float, servers: int, gap_cv2: float, stay_cv2: float, patience: float = math.inf
) -> np.ndarray:
    return fcfs_queue.simulate_waits(load, servers, gap_cv2, stay_cv2, patience, COUNT, 1)[COUNT // 20 :]


def rows(outputs: np.ndarray) -> Workload:
    return Workload(np.ones(outputs.size), np.zeros(outputs.size), outputs, np.full(outputs.size, 1 / outputs.size))


def predicted_queue(load: float, servers: int, gap_cv2: float, stay_cv2: float) -> queueing.SlotQueue:
    sigma = math.sqrt(math.log1p(stay_cv2))
    stays = np.random.default_rng(2).lognormal(-sigma * sigma / 2, sigma, 4000)
    overlap = rows(stays).overlap(stays)
    peaked = queueing.arrival_peakedness(gap_cv2, overlap)
    return queueing.slot_queue(np.array([load * servers]), 1.0, 1.0, 0.0, servers, peakedness=peaked)


@pytest.mark.parametrize("gap_cv2", [0.25, 1.0, 2.0, 4.0, 9.0])
@pytest.mark.parametrize(
    ("servers", "patience", "load"), [(8, 0.05, 0.7), (24, 0.05, 0.8), (65, 0.03, 0.9), (65, 0.2, 0.9), (260, 0.02, 1)]
)
def test_slot_queue_rejected_share_matches_simulated_cv2(
    servers: int, patience: float, load: float, gap_cv2: float
) -> None:
    observed = float(np.isnan(simulated_waits(load, servers, gap_cv2, 0.3, patience)).mean())
    queue = predicted_queue(load, servers, gap_cv2, 0.3)
    spread = queueing.variability(np.ones(1), gap_cv2, 1.0)
    slack, weights = np.array([[patience, math.inf]]), np.array([[1.0, 0.0]])
    rate = np.array([load * servers])
    refused = 1.0 - float(
        queueing.admitted_shares(queue.log_inverse, rate, queue.full_per_s, spread, slack, weights)[0, 0]
    )
    if observed > 1e-3:
        assert 0.7 * observed < refused < 1.4 * observed
    else:  # more regular than chance, and with room to wait: hardly anybody
        assert (servers, patience, gap_cv2) == (65, 0.2, 0.25)
        assert refused < 2e-3
    calm = predicted_queue(load, servers, 1.0, 0.3)
    unbunched = 1.0 - float(
        queueing.admitted_shares(calm.log_inverse, rate, calm.full_per_s, spread, slack, weights)[0, 0]
    )
    if gap_cv2 >= 4.0:
        assert unbunched < 0.7 * observed, "the waits' exponent alone does not tell of it"


@pytest.mark.parametrize("gap_cv2", [0.25, 4.0])
def test_slot_queue_delayed_share_matches_simulated_cv2(gap_cv2: float) -> None:
    for servers, load in ((24, 0.7), (65, 0.8)):
        observed = float((simulated_waits(load, servers, gap_cv2, 1.0) > 0).mean())
        assert float(predicted_queue(load, servers, gap_cv2, 1.0).delayed_share[0]) == pytest.approx(observed, rel=0.4)


def test_arrival_peakedness_matches_batch_arrivals() -> None:
    """Poisson batches of four: gaps of Ca2 4 over long times. Stays all alike, and exponential."""
    rng, rate, batch = np.random.default_rng(3), 50.0, 4
    starts = np.repeat(np.sort(rng.uniform(0, 4000, int(4000 * rate))), batch)
    for stays, overlap in ((np.full(starts.size, 5.0), 1.0), (rng.exponential(5.0, starts.size), 0.5)):
        ends = np.sort(starts + stays)
        looks = np.linspace(100, 3900, 4000)
        under_way = np.searchsorted(starts, looks) - np.searchsorted(ends, looks)
        predicted_queue = queueing.arrival_peakedness(float(batch), overlap)
        assert under_way.var() / under_way.mean() == pytest.approx(predicted_queue, rel=0.15)


def test_workload_overlap_is_half_exponential_one_constant() -> None:
    several = np.random.default_rng(5).exponential(3.0, 20_000)
    mix = rows(several)
    assert mix.overlap(several) == pytest.approx(0.5, rel=0.02)
    assert mix.overlap(np.full(several.size, 7.0)) == pytest.approx(1.0)
    assert mix.overlap(np.zeros(several.size)) == 1.0
    weighted = Workload(np.ones(2), np.zeros(2), np.ones(2), np.array([0.25, 0.75]))
    assert weighted.overlap(np.array([1.0, 3.0])) == pytest.approx((1.0 + 2.0 * 0.75**2) / 2.5)


def capacity_per_s(tier: TierSpec, replicas: int = 1, *, admission: bool = True) -> float:
    return float(slo_capacity.slo_capacity_per_s(tier_model.build_profile(tier), replicas, admission=admission)[0])


@pytest.mark.parametrize("admission", [True, False])
def test_slo_capacity_decreases_with_arrival_cv2(admission: bool) -> None:
    by_bunching = [
        capacity_per_s(replace(TIER, arrival_cv2=cv2), 2, admission=admission) for cv2 in (0.25, 1.0, 2.0, 4.0, 9.0)
    ]
    assert by_bunching == sorted(by_bunching, reverse=True)
    bursty = replace(TIER, arrival_cv2=4.0)
    kept = [
        capacity_per_s(bursty, c, admission=admission) / capacity_per_s(TIER, c, admission=admission)
        for c in (1, 2, 5, 20)
    ]
    assert kept == sorted(kept)
    assert kept[0] < 0.9 < kept[-1]


def test_prompt_wait_of_batch_arrivals_spreads_over_replicas() -> None:
    """Places without end: what is lost is first tokens. A batch of 2 n + 1 prompts has n before each, in the mean."""
    one = (np.array([value]) for value in (1.0, 0.02, 0.013, 0.2, 0.05, 1.0))
    least, spread = (float(part[0]) for part in queueing.step_wait_s(*one))
    one = (np.array([value]) for value in (1.0, 0.02, 0.013, 0.2, 0.05, 5.0))
    longer, wider = (float(part[0]) for part in queueing.step_wait_s(*one))
    assert longer + wider - least - spread == pytest.approx(2.0 * 0.2 / (1.0 - 0.2))
    assert wider > 2.0 * 0.2 / (1.0 - 0.2) > 5 * spread
    roomy = replace(TIER, limits=EngineLimits(4096, 10**9, 8192), arrival_cv2=9.0)
    assert capacity_per_s(roomy, 1) < 0.5 * capacity_per_s(roomy, 8) / 8


def test_profile_splits_arrival_cv2_over_gateways() -> None:
    profiles = [tier_model.build_profile(replace(TIER, arrival_cv2=5.0, gateways=n)) for n in (1, 2, 4)]
    assert [float(one.arrival_cv2[0]) for one in profiles] == [5.0, 3.0, 2.0]
    peaked = [float(one.peakedness[0]) for one in profiles]
    assert peaked[0] - 1.0 == pytest.approx(4.0 * (peaked[2] - 1.0))


def test_slo_capacity_of_regular_arrivals_is_highest() -> None:
    alike = from_samples(np.full(8, 4000.0), np.zeros(8), np.full(8, 1000.0))
    regular = [capacity_per_s(replace(TIER, workload=alike, arrival_cv2=cv2), 2) for cv2 in (0.0, 0.05, 0.5, 1.0)]
    assert regular == sorted(regular, reverse=True)
    assert regular[0] > regular[-1]


def test_arrival_cv2_never_makes_slo_infeasible() -> None:
    found = size_tier(replace(TIER, arrival_cv2=1000.0), 0.5)
    assert isinstance(found, Sizing)
    assert found.replicas > 1
    broken = size_tier(replace(TIER, arrival_cv2=1000.0, slo=Slo(0.95, ttft_s=0.01, tpot_s=0.1)), 0.5)
    calm = size_tier(replace(TIER, slo=Slo(0.95, ttft_s=0.01, tpot_s=0.1)), 0.5)
    assert isinstance(broken, Infeasible)
    assert broken == calm


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_slot_queue_invalid_peakedness_raises(bad: float) -> None:
    with pytest.raises(ValueError, match="peaked"):
        queueing.slot_queue(1.0, 10, 0.1, 0.0, 5, peakedness=bad)
