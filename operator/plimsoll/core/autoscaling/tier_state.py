"""State of one tier: its engines, its start-up models, its demand and its SLO capacity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from plimsoll.core.autoscaling.capacity_state import CapacityState
from plimsoll.core.autoscaling.itl_limit import NO_ITL_LIMIT, ItlLimit, update_itl_limit
from plimsoll.core.autoscaling.observations import LATENCY_WINDOW_S
from plimsoll.core.autoscaling.sizing_batch import TierCapacity
from plimsoll.core.autoscaling.startup_models import StartupModels
from plimsoll.core.autoscaling.startup_time import StartupModel, startup_prior
from plimsoll.core.autoscaling.tier_engines import TierEngines, announced_limits
from plimsoll.core.capacity.sizing import Infeasible
from plimsoll.core.demand.demand_state import DemandState, rescale
from plimsoll.core.engine_model.measured_limits import is_one_configuration
from plimsoll.core.ports import EngineInfo
from plimsoll.core.types import Role, Unavailable
from plimsoll.core.workload import Workload

# Prior of the start-up time: a 10 GB image over 1 GB/s, 16 GB of weights from a volume at 2 GB/s.
PRIOR_STARTUP_MODEL: Final = startup_prior(10e9, 0.0, 16e9, 1e9, 2e9)
NO_STARTUPS: Final = StartupModels(PRIOR_STARTUP_MODEL)
NO_DEMAND: Final = DemandState()
NO_REQUEST_LENGTHS: Final = Unavailable("no completed request has shown the lengths of prompts and outputs yet")


@dataclass
class TierState:
    """State of one tier. Each part is updated by one phase of a tick (see `fleet_decisions`).

    first_arrival_s: first arrivals, if none were known before.
    """

    engines: TierEngines
    startup_models: StartupModels = NO_STARTUPS
    capacity_state: CapacityState = field(default_factory=CapacityState)
    forecast_state: DemandState = NO_DEMAND
    itl_limit: ItlLimit = NO_ITL_LIMIT
    first_arrival_s: float = -math.inf
    _settled_since: tuple[float, int] | None = field(default=None, repr=False)  # and the number of replicas
    _startup_cache: tuple[StartupModels, float] | None = field(default=None, repr=False)

    @classmethod
    def for_role(cls, role: Role) -> TierState:
        """Return the state of a tier of which nothing is known."""
        return cls(TierEngines(role))

    @property
    def role(self) -> Role:
        return self.engines.role

    @property
    def startup_model(self) -> StartupModel:
        """Start-up model of new pods."""
        return self.startup_models.current_model

    @property
    def startup_s(self) -> float:
        """Horizon of the start-up model, seconds."""
        if self._startup_cache is None or self._startup_cache[0] is not self.startup_models:
            self._startup_cache = self.startup_models, self.startup_model.horizon_s
        return self._startup_cache[1]

    @property
    def capacity(self) -> TierCapacity | Unavailable:
        """SLO capacity for sizing; Unavailable names what is missing."""
        if self.capacity_state.result is not None:
            return self.capacity_state.result
        return self.engines.no_model if self.engines.posterior is None else NO_REQUEST_LENGTHS

    def on_engine_info(self, engine_info: EngineInfo) -> None:
        """Process an engine's report."""
        former = self.engines.announced
        if self.engines.on_engine_info(engine_info):
            self.capacity_state.expire()
            self.itl_limit = NO_ITL_LIMIT
        if former is not None and not is_one_configuration((former, announced_limits(engine_info))):
            self.itl_limit = NO_ITL_LIMIT

    def ends_settled_minute(self, ready: int, is_fully_ready: bool, now_s: float) -> bool:
        """Whether this tick ends a minute in which all ordered replicas were ready, and as many as now."""
        since = self._settled_since
        if not is_fully_ready or since is None or since[1] != ready or now_s < since[0]:
            self._settled_since = (now_s, ready) if is_fully_ready else None
            return False
        if now_s - since[0] < LATENCY_WINDOW_S:
            return False
        self._settled_since = now_s, ready
        return True

    def update_itl(
        self, measured_s: float | Unavailable, target_s: float | None, replica_rate_per_s: float, now_s: float
    ) -> None:
        """Update the load within the ITL target with a settled minute. replica_rate_per_s: requests/s per replica."""
        if not isinstance(measured_s, Unavailable):
            self.itl_limit = update_itl_limit(self.itl_limit, measured_s, target_s, replica_rate_per_s, now_s)

    def apply_capacity(self, capacity: TierCapacity | Infeasible) -> None:
        """Store a new SLO capacity, and convert earlier work to the new work of a request."""
        ratio = self.capacity_state.apply(capacity)
        if ratio != 1.0:
            self.forecast_state = rescale(self.forecast_state, ratio)


def ttft_outside_tier_s(tiers: Sequence[TierState], tier: TierState, workload: Workload) -> float:
    """Return the part of a mean request's TTFT that the other tiers take, s."""
    return math.fsum(other.engines.ttft_part_s(workload) for other in tiers if other is not tier)
