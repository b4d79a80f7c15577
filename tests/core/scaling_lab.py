"""What tests of scaling are made of: tiers as they are seen, what comes, what is needed of it, and decisions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from plimsoll.core.forecast import Forecast, Odds, Pause, Pauses, Unknown, pauses
from plimsoll.core.jumps import FACTORS
from plimsoll.core.knee import Constraint, Tier
from plimsoll.core.latency import EngineLimits, KvTransfer, StepModel
from plimsoll.core.lifecycle import expecting
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.scaling import (
    Ask,
    Decision,
    Demand,
    Line,
    Need,
    Observation,
    Policy,
    State,
    Step,
    TierDecision,
    TierObservation,
    TierPolicy,
    decide,
    lines,
    needs,
)
from plimsoll.core.scaling.sized import margin_of
from plimsoll.core.slo import Slo
from plimsoll.core.workload import from_samples

HORIZON_S = 60.0
REPLICA_WORK = 1.0  # GPU-seconds per second that a replica carries within the promise
REQUEST_GPU_S = 0.1
LEDGER = expecting({"pull": 20.0, "load": 10.0})
SLO = Slo(0.95, 0.5, 0.0, 0.05)
NEVER = Odds(HORIZON_S, (1.000001, 2.0), (0.0, 0.0), 1.0)  # load never leaps
OFTEN = Odds(HORIZON_S, FACTORS, (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.01), 1.0)
BUSY = pauses.lasting(Pauses(), 0.0)  # requests come, and nothing is known of their pauses
STEPS = ["demand", "need", "feedback", "pending", "joint", "direction", "limits", "mode"]


def coming(work: float, odds: Odds = NEVER, **differing: Any) -> Demand:
    """A forecast that is all level, unless its parts are told."""
    parts = {"trend": 0.0, "season": 0.0, "burst": 0.0, "doubt": 0.0} | {
        name: value for name, value in differing.items() if name in ("trend", "season", "burst", "doubt")
    }
    rest = {name: value for name, value in differing.items() if name not in parts}
    usual: dict[str, Any] = {
        "error": 0.0,
        "horizon_s": odds.horizon_s,
        "quantile": 0.95,
        "age_s": 1.0,
        "history": 0.5,
        "memory": 1.0,
        "ordinary": work,
        "changed_s_ago": None,
        "rate_per_s": None,
        "tokens_per_s": None,
    }
    return Demand(Forecast(work=work + sum(parts.values()), level=work, **parts, **(usual | rest)), odds)


def needed(demand: Demand, ready: int, backlog_gpu_s: float = 0.0, replica_work: float = REPLICA_WORK) -> Need:
    """What `needs` would say of a tier whose load line is straight."""
    work = demand.forecast.work + (0.0 if ready else backlog_gpu_s / demand.forecast.horizon_s)
    told = demand.forecast
    margin = float(margin_of(*(np.array(part) for part in (work, told.error, told.memory))))
    replicas, release = (math.ceil(work * share / replica_work - 1e-9) for share in (1.0, margin))
    return Need(
        replicas, release, work / REQUEST_GPU_S, REQUEST_GPU_S, replica_work, Constraint.TPOT, 0.8, 0.6, 0.071, None
    )


def tier(
    demand: Demand | Unknown | float, replicas: int, ready: int | None = None, **differing: Any
) -> TierObservation:
    """A tier as observed; a number stands for a forecast that is all level."""
    found = coming(demand) if isinstance(demand, int | float) else demand
    here = replicas if ready is None else ready
    waiting = differing.get("backlog_gpu_s", 0.0)
    if "need" not in differing:
        differing["need"] = found if isinstance(found, Unknown) else needed(found, here, waiting)
    return TierObservation(replicas, here, LEDGER, found, **differing)


def quiet(away_s: float) -> Pause:
    """No request for so long, and nothing is known of earlier pauses."""
    return BUSY._replace(active=False, away_s=away_s)


def bounds(least: int = 1, most: int = 16, **differing: Any) -> TierPolicy:
    return TierPolicy(least, most, **differing)


def decided(
    seen: TierObservation,
    policy: TierPolicy | None = None,
    now_s: float = 0.0,
    state: State | None = None,
    pause: Pause | Unknown = BUSY,
    **rest: Any,
) -> TierDecision:
    """The decision on a service of one tier. rest: of the Policy."""
    observation = Observation({"serve": seen}, state or State(), pause=pause)
    return decide(observation, Policy({"serve": policy or bounds()}, SLO, **rest), now_s).tiers["serve"]


def pair(
    prefill: TierObservation,
    decode: TierObservation,
    now_s: float = 0.0,
    state: State | None = None,
    granted: int | None = None,
    least: int = 0,
    pause: Pause | Unknown = BUSY,
    **rest: Any,
) -> Decision:
    """The decision on a service of two tiers."""
    observation = Observation({"prefill": prefill, "decode": decode}, state or State(), granted, pause)
    return decide(observation, Policy({"prefill": bounds(least), "decode": bounds(least)}, SLO, **rest), now_s)


def counts(decision: Decision) -> tuple[int, ...]:
    return tuple(one.replicas for one in decision.tiers.values())


def said(decision: TierDecision, name: str) -> Step:
    return next(step for step in decision.steps if step.name == name)


CHAT = from_samples([400.0, 1000.0, 2500.0], [0.0, 0.0, 0.0], [100.0, 200.0, 400.0])
SMALL = StepModel(4.742e-3, -1.3e-3, 2.265e-5, 1.035e-9, 1.816e-5, 3.048e-8)
ROOMY = EngineLimits(1024, 919_824, 8192)
SERVE = Tier(Role.SERVE, SMALL, CHAT, ROOMY, SLO)
PREFILL = Tier(Role.PREFILL, SMALL, CHAT, ROOMY, Slo(0.95, 0.5))
DECODE = Tier(Role.DECODE, SMALL, CHAT, ROOMY, Slo(0.95, 0.5, 0.0, 0.025), KvTransfer(32, 128))


def lined(kind: Tier, replicas: int = 1) -> Line:
    found = lines([kind], [replicas])[0]
    assert isinstance(found, Line)
    return found


def ask(kind: Tier, rate: float, replicas: int, **differing: Any) -> Ask:
    made = lined(kind)
    usual: dict[str, Any] = {"ready": replicas}
    return Ask(made, coming(rate * made.request_gpu_s).forecast, replicas, **(usual | differing))


def one(asked: Ask) -> Need:
    (found,) = needs([asked])
    assert isinstance(found, Need)
    return found
