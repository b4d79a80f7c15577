"""What forecasts need in replicas: many tiers at once, margins of a step down, what waits, and nearest promises."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from plimsoll.core.autoscaling.observations import TierObservation
from plimsoll.core.autoscaling.sizing_batch import SizingRequest, scale_down_margin, size_batch, tier_capacities
from plimsoll.core.capacity.sizing import Infeasible, Sizing, size_tier
from plimsoll.core.capacity.slo_capacity import slo_capacity_per_s
from plimsoll.core.capacity.tier_model import Constraint, build_profile
from plimsoll.core.engine_model.step_time import EngineLimits
from plimsoll.core.slo import Slo
from tests.core.scaling_fixtures import (
    DECODE,
    HORIZON_S,
    PREFILL,
    SERVE,
    STARTUP_MODEL,
    decide_one,
    make_forecast,
    size_one,
    sizing_request,
    tier_capacity,
)


def test_size_batch_equals_single_results() -> None:
    asks = [sizing_request(kind, rate, 3) for kind in (SERVE, PREFILL, DECODE) for rate in (0.0, 5.0, 70.0, 300.0)]
    assert size_batch(asks) == [size_one(request) for request in asks]
    assert size_batch([]) == []
    for request, kind in zip(asks, [SERVE] * 4 + [PREFILL] * 4 + [DECODE] * 4, strict=True):
        alone = size_tier(kind, request.forecast.work / request.capacity.request_gpu_s)
        assert isinstance(alone, Sizing)
        assert size_one(request).replicas == alone.replicas


def test_tier_capacity_has_work_capacity_and_constraint() -> None:
    made = tier_capacity(SERVE, 4)
    assert made.request_gpu_s == pytest.approx(build_profile(SERVE).work_s[0])
    assert made.replica_work == pytest.approx(slo_capacity_per_s(build_profile(SERVE), 4)[0] / 4 * made.request_gpu_s)
    assert made.constraint is Constraint.TPOT
    assert tier_capacity(PREFILL).constraint is Constraint.TTFT


def test_tier_capacities_batch_equals_single_results() -> None:
    rng = np.random.default_rng(5)
    kinds = [SERVE, PREFILL, DECODE, replace(SERVE, slo=Slo(0.95, 0.5, 0.0, 0.004))]  # the last promise is infeasible
    kinds += [replace(kinds[n % 3], arrival_cv2=float(rng.uniform(0.5, 6.0)), gateways=1 + n % 3) for n in range(14)]
    kinds.append(replace(SERVE, limits=EngineLimits(1024, 100, 8192)))  # no fleet and no promise will do
    replicas = [1 + n % 5 for n in range(len(kinds))]
    together = tier_capacities(kinds, replicas)
    for kind, count, made in zip(kinds, replicas, together, strict=True):
        (alone,) = tier_capacities([kind], [count])
        if isinstance(made, Infeasible) or isinstance(alone, Infeasible):
            assert made == alone
            continue
        assert (made.request_gpu_s, made.replica_work) == (alone.request_gpu_s, alone.replica_work)
        assert (made.constraint, made.infeasible) == (alone.constraint, alone.infeasible)
    assert isinstance(together[-1], Infeasible)
    assert tier_capacities([], []) == []


def test_sizing_result_has_predicted_latency_of_fleet() -> None:
    knee = float(slo_capacity_per_s(build_profile(SERVE), 2)[0])
    fine, tight, over = (size_one(sizing_request(SERVE, share * knee, 2)) for share in (0.5, 1.05, 1.5))
    assert fine.tpot_s is not None
    assert tight.tpot_s is not None
    assert fine.tpot_s < 0.05 < tight.tpot_s
    assert fine.attainment > 0.95 > tight.attainment > over.attainment
    assert over.tpot_s == math.inf
    assert fine.model_tpot_s == fine.tpot_s  # all of it level, all ready
    rising = sizing_request(SERVE, 0.5 * knee, 2, ready=1)
    rising = replace(rising, forecast=replace(rising.forecast, level=0.2 * rising.forecast.work))
    now = size_one(rising)
    assert now.model_tpot_s is not None
    assert now.tpot_s == fine.tpot_s > now.model_tpot_s
    assert size_one(sizing_request(PREFILL, 10.0, 2)).tpot_s is None
    assert size_one(sizing_request(SERVE, 10.0, 0, ready=0)).attainment == 0.0


def test_release_count_needs_margin_and_uncertainty() -> None:
    knee = float(slo_capacity_per_s(build_profile(SERVE), 2)[0])
    near = size_one(sizing_request(SERVE, 0.985 * knee, 3))
    assert (near.replicas, near.scale_down_replicas) == (2, 3)
    clear = sizing_request(SERVE, 0.9 * knee, 3)
    assert (size_one(clear).replicas, size_one(clear).scale_down_replicas) == (2, 2)
    doubtful = replace(clear, forecast=replace(clear.forecast, level_error=0.05 * clear.forecast.work))
    assert (size_one(doubtful).replicas, size_one(doubtful).scale_down_replicas) == (2, 3)


def test_release_margin_after_level_shift_is_level_error() -> None:
    knee = float(slo_capacity_per_s(build_profile(SERVE), 2)[0])
    settled = sizing_request(SERVE, 0.985 * knee, 3)
    assert (size_one(settled).replicas, size_one(settled).scale_down_replicas) == (2, 3)
    fresh = replace(
        settled, forecast=replace(settled.forecast, memory_fill=0.05, level_error=0.004 * settled.forecast.work)
    )
    assert (size_one(fresh).replicas, size_one(fresh).scale_down_replicas) == (2, 2)
    doubtful = replace(fresh, forecast=replace(fresh.forecast, level_error=0.02 * fresh.forecast.work))
    assert size_one(doubtful).scale_down_replicas == 3


@pytest.mark.parametrize("deviates", [0.0, 1.0])
@pytest.mark.parametrize("memory_fill", [0.02, 0.05, 0.1, 0.3, 1.0])
def test_release_margin_is_exceeded_within_error_budget(memory_fill: float, deviates: float) -> None:
    """White noise of density 1 about an unknown level, whose discounted mean is watched for two memories.

    deviates: errors of the level that are sized for.
    """
    rng, paths, covered, at, work = np.random.default_rng(1), 8000, memory_fill, 0.0, 1.0
    error = math.sqrt(1.0 / covered)
    level = rng.normal(0.0, error if memory_fill < 1.0 else error / math.sqrt(2.0), paths)
    most = deviates * error + work * (scale_down_margin(work, error, memory_fill) - 1.0)
    gpu_s, back = np.zeros(paths), np.zeros(paths, dtype=bool)
    for now in memory_fill * 0.01 * 1.05 ** np.arange(250):
        if now > 2.0:
            break
        keep, at = math.exp(at - now), now
        gpu_s = keep * gpu_s + level * (1.0 - keep) + rng.normal(0.0, math.sqrt(0.5 * (1.0 - keep**2)), paths)
        covered = keep * covered + 1.0 - keep
        back |= gpu_s / covered + deviates / math.sqrt(covered) > most
    assert back.mean() <= 0.05


def test_release_margin_holds_for_stationary_noise() -> None:
    """White noise about a level of 100, whose discounted mean has a whole memory, watched for a dozen more."""

    def margin(memory_fill: float) -> float:
        return scale_down_margin(100.0, error, memory_fill)

    rng, paths, error = np.random.default_rng(2), 4000, 5.0
    at = rng.normal(0.0, error / math.sqrt(2.0), paths)
    most, keep, back = at + 100.0 * (margin(1.0) - 1.0), math.exp(-0.05), np.zeros(paths, dtype=bool)
    for _ in range(240):
        at = keep * at + rng.normal(0.0, error * math.sqrt(0.5 * (1.0 - keep**2)), paths)
        back |= at > most
    assert 0.0 < back.mean() < 0.1
    assert margin(0.1) < 1.0 + 0.75 * (margin(1.0) - 1.0), "soon after a leap less is asked for"
    assert margin(0.001) > 1.03, "but at least what is not yet known of the level, however little the doubt is held to"


def test_sizing_backlog_counts_only_without_ready_replicas() -> None:
    waiting = 5.0 * HORIZON_S * tier_capacity(SERVE).replica_work
    assert size_one(sizing_request(SERVE, 1.0, 0, ready=0, backlog_gpu_s=waiting)).replicas >= 5
    assert size_one(sizing_request(SERVE, 1.0, 1, backlog_gpu_s=waiting)).replicas == 1


def test_sizing_headroom_is_kept_and_reported() -> None:
    knee = float(slo_capacity_per_s(build_profile(SERVE), 2)[0])
    found = size_one(sizing_request(SERVE, 0.9 * knee, 2, headroom=0.2))
    assert (found.replicas, found.headroom) == (3, 0.2)


def test_sizing_retry_backlog_adds_to_forecast() -> None:
    made = tier_capacity(SERVE)
    request = sizing_request(SERVE, 10.0, 2)
    request = replace(request, retry_gpu_s=5.0 * made.request_gpu_s * request.forecast.horizon_s)
    assert size_one(request).rate_per_s == pytest.approx(15.0), (
        "cleared by when a new replica could be there, not sooner"
    )


def test_sizing_infeasible_slo_uses_feasible_targets() -> None:
    hopeless = tier_capacity(replace(SERVE, slo=Slo(0.95, 0.5, 0.0, 0.004)))
    assert hopeless.infeasible is not None
    assert hopeless.infeasible.nearest_slo is not None
    assert hopeless.replica_work > 0.0
    cramped = replace(SERVE, limits=EngineLimits(1024, 100, 8192))
    assert isinstance(tier_capacities([cramped], [1])[0], Infeasible)


def test_decide_from_tier_model_scales_and_explains() -> None:
    knee = tier_capacity(SERVE, 3)
    rate = 2.5 * knee.replica_work / knee.request_gpu_s
    demand = make_forecast(rate * knee.request_gpu_s)
    observed = TierObservation(1, 1, STARTUP_MODEL, demand, size_one(SizingRequest(knee, demand.forecast, 1, 1)))
    found = decide_one(observed)
    assert found.replicas == 3
    assert "limited by TPOT" in found.summary
    assert "1 could not carry the load" in found.summary
