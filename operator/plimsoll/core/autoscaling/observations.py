"""Inputs of a decision. An unknown value is `Unavailable`, never 0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from plimsoll.core.autoscaling.decision_state import DecisionState
from plimsoll.core.autoscaling.itl_limit import ItlLimit
from plimsoll.core.autoscaling.startup_time import StartingPod, StartupModel
from plimsoll.core.capacity.sizing import Infeasible
from plimsoll.core.capacity.tier_model import Constraint
from plimsoll.core.demand.forecasting import Forecast
from plimsoll.core.demand.idle_periods import IdlePeriod
from plimsoll.core.demand.standby_value import GrowthDistribution
from plimsoll.core.types import Unavailable

NOT_MEASURED: Final = Unavailable("not measured")
IDLE_UNKNOWN: Final = Unavailable("it is unknown whether requests arrive")
LATENCY_WINDOW_S: Final = 60.0  # window of the latency percentiles


@dataclass(frozen=True, slots=True)
class TierDemand:
    """Forecast for one start-up time, and the distribution of load growth within it."""

    forecast: Forecast
    growth: GrowthDistribution


class NoDemand(NamedTuple):
    """A known demand of zero, which needs no sizing. idle_s: for how long no request has arrived, waited or run, s."""

    idle_s: float


class Mismatch(NamedTuple):
    """What measurement contradicts in the model. evidence: measured and predicted value. advice: what to check."""

    evidence: str
    advice: str


def name_constraint(constraint: Constraint, target_classes: Mapping[str, str]) -> str:
    """Return the constraint with the class whose target it is, if that is no target of the service.

    Such as `TPOT of class chat`.
    """
    class_name = target_classes.get(constraint)
    return str(constraint) if class_name is None else f"{constraint} of class {class_name}"


@dataclass(frozen=True, slots=True)
class SizingResult:
    """Sizing of one tier for a forecast; `sizing_batch.size_batch` computes it for many tiers.

    replicas: fewest that carry the forecast with `headroom`. scale_down_replicas: fewest that carry it with the margin
    against noise, if more are ordered. rate_per_s: the forecast in requests/s of the current mix. retained_rate_per_s:
    that with the margin. request_gpu_s: work of one request. replica_work: SLO capacity of one replica, GPU-seconds per
    second. constraint: tightest constraint. attainment, tpot_s: attainment and TPOT at the SLO's percentile for the
    forecast on the ordered replicas; tpot_s is None without a TPOT target, infinite if they are overloaded.
    attainment_one_fewer: attainment with one replica fewer than needed. model_tpot_s: modelled TPOT percentile of the
    ready replicas at the current level; None if unknown. infeasible: no number of replicas meets the SLO, and the
    sizing uses the feasible SLO that it names. capacity_correction: factor from observed rejections or ITL, included in
    `replicas`. itl_limit: what it is by, None for rejections. ttft_offset_s: TTFT beyond the model, from late first
    tokens, included too. engine_mismatches: how engines differ from what they announced and from the prior,
    included too. target_classes: the request class whose own target replaces that of the service, by the target's name.
    """

    replicas: int
    scale_down_replicas: int
    rate_per_s: float
    request_gpu_s: float
    replica_work: float
    constraint: Constraint
    attainment: float
    attainment_one_fewer: float
    tpot_s: float | None = None
    model_tpot_s: float | None = None
    headroom: float = 0.0
    infeasible: Infeasible | None = None
    retained_rate_per_s: float = 0.0
    capacity_correction: float = 1.0
    itl_limit: ItlLimit | None = None
    ttft_offset_s: float = 0.0
    engine_mismatches: tuple[Mismatch, ...] = ()
    target_classes: Mapping[str, str] = field(default_factory=dict)

    @property
    def limited_by(self) -> str:
        """The tightest constraint, as `name_constraint` names it."""
        return name_constraint(self.constraint, self.target_classes)

    @property
    def well_used_replicas(self) -> int:
        """Number of needed replicas that the forecast fills by more than half."""
        capacity = self.replica_work * (1.0 - self.headroom) / self.capacity_correction
        return well_used_replicas(self.rate_per_s * self.request_gpu_s, capacity, self.replicas)

    def utilization(self, work: float, replicas: int) -> float:
        """Return `work` (GPU-seconds per second) as a share of the SLO capacity; infinite if the capacity is 0."""
        capacity = replicas * self.replica_work
        if capacity > 0.0:
            return work / capacity
        return math.inf if work > 0.0 else 0.0


def well_used_replicas(work: float, capacity: float, limit: int) -> int:
    """Return how many replicas of `capacity` the work (GPU-seconds per second) fills by more than half, at most
    `limit`."""
    return min(limit, math.floor(work / capacity + 0.5)) if work < capacity * limit else limit


@dataclass(frozen=True, slots=True)
class LaggingSignals:
    """Lagging signals of one tier: latencies at the SLO's percentile (s), waiting requests, share of the KV cache in
    use, preemptions per s. itl_s: 99th percentile of the inter-token latency.

    They adjust the scale of the modelled TPOT tail. If the demand is unknown, they alone show that a tier needs more
    replicas.
    """

    tpot_s: float | Unavailable = NOT_MEASURED
    ttft_s: float | Unavailable = NOT_MEASURED
    waiting: float | Unavailable = NOT_MEASURED
    kv_used: float | Unavailable = NOT_MEASURED
    preemptions_per_s: float | Unavailable = NOT_MEASURED
    e2e_s: float | Unavailable = NOT_MEASURED
    itl_s: float | Unavailable = NOT_MEASURED


@dataclass(frozen=True)
class TierObservation:
    """One tier. Raises ValueError for impossible counts.

    replicas: ordered. ready: of those, able to serve. starting: of those, not ready. backlog_gpu_s: work queued for the
    tier at the gateways. coverage: share of the endpoints that reported, above 0 to 1; `scaled_sum` extrapolates sums
    to all, and below 1 no tier scales down. carried_per_s: load per replica, requests/s, below which not too many first
    tokens were late; infinite if none were. replicas_set_by: who else ordered the count, None if no other. serving_s:
    for how long each tier of the service has had a ready replica, s; infinite if no request arrived before.
    """

    replicas: int
    ready: int
    startup_model: StartupModel
    demand: TierDemand | NoDemand | Unavailable
    sizing: SizingResult | Unavailable
    starting: tuple[StartingPod, ...] = ()
    backlog_gpu_s: float | Unavailable = 0.0
    coverage: float = 1.0
    lagging: LaggingSignals = LaggingSignals()
    carried_per_s: float = math.inf
    replicas_set_by: str | None = None
    serving_s: float = math.inf

    def __post_init__(self) -> None:
        if self.replicas < 0 or self.ready < 0:
            raise ValueError(f"counts are 0 or more, not {self.replicas} ordered and {self.ready} ready")
        if not 0.0 < self.coverage <= 1.0:
            raise ValueError(f"coverage is a share above 0, up to 1, not {self.coverage}; without any, all is Unknown")

    @property
    def horizon_s(self) -> float:
        """Expected start-up time of a replica ordered now, seconds."""
        return self.demand.forecast.horizon_s if isinstance(self.demand, TierDemand) else self.startup_model.horizon_s


@dataclass(frozen=True)
class ServiceObservation:
    """One service. tiers: the observed tiers. state: state of the last decision. idle_period: time without requests,
    from all gateways and engines.
    """

    tiers: Mapping[str, TierObservation] = field(default_factory=dict)
    state: DecisionState = field(default_factory=DecisionState)
    idle_period: IdlePeriod | Unavailable = IDLE_UNKNOWN


def scaled_sum(parts: Sequence[float | Unavailable]) -> tuple[float | Unavailable, float]:
    """Return the sum over all endpoints, extrapolated from those that reported, and the share that reported.

    NaN, infinite and negative parts count as missing. Returns Unavailable and 0.0 if all are missing.
    """
    known = [part for part in parts if not isinstance(part, Unavailable) and 0.0 <= part < math.inf]
    if not known:
        return Unavailable("no endpoint reported a value"), 0.0
    coverage = len(known) / len(parts)
    return math.fsum(known) / coverage, coverage
