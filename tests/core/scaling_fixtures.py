"""What tests of scaling are made of: tiers as they are seen, what comes, what is needed of it, and decisions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from plimsoll.core.autoscaling.decide import decide
from plimsoll.core.autoscaling.decision_state import DecisionState
from plimsoll.core.autoscaling.observations import ServiceObservation, SizingResult, TierDemand, TierObservation
from plimsoll.core.autoscaling.scaling_decision import DecisionStep, ScalingDecision, TierDecision
from plimsoll.core.autoscaling.scaling_policy import ScalingPolicy, TierPolicy
from plimsoll.core.autoscaling.sizing_batch import (
    SizingRequest,
    TierCapacity,
    scale_down_margin,
    size_batch,
    tier_capacities,
)
from plimsoll.core.autoscaling.startup_time import from_medians
from plimsoll.core.capacity.tier_model import Constraint, TierSpec
from plimsoll.core.demand import idle_periods
from plimsoll.core.demand.forecasting import Forecast
from plimsoll.core.demand.growth_prior import GROWTH_FACTORS
from plimsoll.core.demand.idle_periods import IdlePeriod, IdleStats
from plimsoll.core.demand.standby_value import GrowthDistribution
from plimsoll.core.engine_model.step_time import EngineLimits, KvTransfer, StepModel
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable
from plimsoll.core.workload import from_samples

HORIZON_S = 60.0
REPLICA_WORK = 1.0  # GPU-seconds per second that a replica carries within the promise
REQUEST_GPU_S = 0.1
STARTUP_MODEL = from_medians({"pull": 20.0, "load": 10.0})
SLO = Slo(0.95, 0.5, 0.0, 0.05)
NO_GROWTH = GrowthDistribution(HORIZON_S, (1.000001, 2.0), (0.0, 0.0), 1.0)  # load never leaps
FREQUENT_GROWTH = GrowthDistribution(
    HORIZON_S, GROWTH_FACTORS, (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.01), 1.0, 100.0
)  # the service has itself grown by any factor
BUSY = idle_periods.current_idle(IdleStats(), 0.0)  # requests come, and nothing is known of their pauses
STEPS = ["demand", "sizing", "feedback", "pending", "ratio", "stabilization", "limits", "mode"]


def make_forecast(work: float, odds: GrowthDistribution = NO_GROWTH, **differing: Any) -> TierDemand:
    """A forecast that is all level, unless its parts are told."""
    parts = {"trend": 0.0, "season": 0.0, "burst": 0.0, "uncertainty": 0.0} | {
        name: value for name, value in differing.items() if name in ("trend", "season", "burst", "uncertainty")
    }
    rest = {name: value for name, value in differing.items() if name not in parts}
    usual: dict[str, Any] = {
        "level_error": 0.0,
        "horizon_s": odds.horizon_s,
        "quantile": 0.95,
        "age_s": 1.0,
        "own_history_share": 0.5,
        "memory_fill": 1.0,
        "baseline": work,
        "level_shift_age_s": None,
        "rate_per_s": None,
        "tokens_per_s": None,
    }
    return TierDemand(Forecast(work=work + sum(parts.values()), level=work, **parts, **(usual | rest)), odds)


def sizing_for(
    demand: TierDemand, ready: int, backlog_gpu_s: float = 0.0, replica_work: float = REPLICA_WORK
) -> SizingResult:
    """What `needs` would say of a tier whose load line is straight."""
    work = demand.forecast.work + (0.0 if ready else backlog_gpu_s / demand.forecast.horizon_s)
    parts = demand.forecast
    margin = float(scale_down_margin(*(np.array(part) for part in (work, parts.level_error, parts.memory_fill))))
    replicas, release = (math.ceil(work * share / replica_work - 1e-9) for share in (1.0, margin))
    return SizingResult(
        replicas, release, work / REQUEST_GPU_S, REQUEST_GPU_S, replica_work, Constraint.TPOT, 0.8, 0.6, 0.071, None
    )


def observed_tier(
    demand: TierDemand | Unavailable | float, replicas: int, ready: int | None = None, **differing: Any
) -> TierObservation:
    """A tier as observed; a number stands for a forecast that is all level."""
    found = make_forecast(demand) if isinstance(demand, int | float) else demand
    here = replicas if ready is None else ready
    waiting = differing.get("backlog_gpu_s", 0.0)
    if "sizing" not in differing:
        differing["sizing"] = found if isinstance(found, Unavailable) else sizing_for(found, here, waiting)
    return TierObservation(replicas, here, STARTUP_MODEL, found, **differing)


def idle_status(away_s: float) -> IdlePeriod:
    """No request for so long, and nothing is known of earlier pauses."""
    return BUSY._replace(active=False, idle_s=away_s)


def replica_bounds(least: int = 1, most: int = 16, **differing: Any) -> TierPolicy:
    return TierPolicy(least, most, **differing)


def decide_one(
    observation_tier: TierObservation,
    policy: TierPolicy | None = None,
    now_s: float = 0.0,
    state: DecisionState | None = None,
    pause: IdlePeriod | Unavailable = BUSY,
    **rest: Any,
) -> TierDecision:
    """The decision on a service of one tier. rest: of the Policy."""
    observation = ServiceObservation({"serve": observation_tier}, state or DecisionState(), idle_period=pause)
    return decide(observation, ScalingPolicy({"serve": policy or replica_bounds()}, SLO, **rest), now_s).tiers["serve"]


def decide_pair(
    prefill: TierObservation,
    decode: TierObservation,
    now_s: float = 0.0,
    state: DecisionState | None = None,
    least: int = 0,
    pause: IdlePeriod | Unavailable = BUSY,
    **rest: Any,
) -> ScalingDecision:
    """The decision on a service of two tiers."""
    observation = ServiceObservation({"prefill": prefill, "decode": decode}, state or DecisionState(), pause)
    return decide(
        observation,
        ScalingPolicy({"prefill": replica_bounds(least), "decode": replica_bounds(least)}, SLO, **rest),
        now_s,
    )


def counts(decision: ScalingDecision) -> tuple[int, ...]:
    return tuple(one.replicas for one in decision.tiers.values())


def step_message(decision: TierDecision, name: str) -> DecisionStep:
    return next(step for step in decision.steps if step.name == name)


CHAT = from_samples([400.0, 1000.0, 2500.0], [0.0, 0.0, 0.0], [100.0, 200.0, 400.0])
SMALL = StepModel(4.742e-3, -1.3e-3, 2.265e-5, 1.035e-9, 1.816e-5, 3.048e-8)
LARGE_LIMITS = EngineLimits(1024, 919_824, 8192)
SERVE = TierSpec(Role.SERVE, SMALL, CHAT, LARGE_LIMITS, SLO)
PREFILL = TierSpec(Role.PREFILL, SMALL, CHAT, LARGE_LIMITS, Slo(0.95, 0.5))
DECODE = TierSpec(Role.DECODE, SMALL, CHAT, LARGE_LIMITS, Slo(0.95, 0.5, 0.0, 0.025), KvTransfer(32, 128))


def tier_capacity(kind: TierSpec, replicas: int = 1) -> TierCapacity:
    capacities = tier_capacities([kind], [replicas])[0]
    assert isinstance(capacities, TierCapacity)
    return capacities


def sizing_request(kind: TierSpec, rate: float, replicas: int, **differing: Any) -> SizingRequest:
    made = tier_capacity(kind)
    usual: dict[str, Any] = {"ready": replicas}
    return SizingRequest(made, make_forecast(rate * made.request_gpu_s).forecast, replicas, **(usual | differing))


def size_one(request: SizingRequest) -> SizingResult:
    (found,) = size_batch([request])
    assert isinstance(found, SizingResult)
    return found
