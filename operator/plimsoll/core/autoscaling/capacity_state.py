"""The SLO capacity of a tier, and what it was computed from.

Problem: computing the SLO capacity takes milliseconds, and its inputs change slightly at every scrape.

Idea: the SLO capacity is kept until an input has changed by more than its uncertainty, which is checked every few
seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from plimsoll.core.autoscaling.sizing_batch import TierCapacity
from plimsoll.core.autoscaling.tier_engines import TierEngines
from plimsoll.core.capacity.sizing import Infeasible
from plimsoll.core.capacity.tier_model import TierSpec, tpot_target
from plimsoll.core.demand.demand_state import DemandState
from plimsoll.core.demand.noise_model import arrival_dispersion
from plimsoll.core.engine_model.step_time import EngineLimits, TierWork
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable
from plimsoll.core.workload import Workload

CAPACITY_CHECK_S: Final = 5.0  # interval of the checks of the SLO capacity
TTFT_TOLERANCE: Final = 0.01  # of the TTFT target: what is outside the tier
INPUT_TOLERANCE: Final = 0.03  # relative change of an input that recomputes the SLO capacity
ARRIVAL_CV2_TOLERANCE: Final = (
    0.1  # or relative change of `arrival_cv2`; half of a wait is due to service, so the SLO capacity changes by less
)
NO_TARGET: Final = Unavailable("spec.slo.ttft is not set, so the prefill tier is not sized")


@dataclass(frozen=True, slots=True)
class _CapacityInputs:
    """Inputs of an SLO capacity, as comparable numbers.

    base_s: of a step. work_s: of a mean request. e2e_token_budget_s: time that the e2e target leaves for each token
    with the tail of the output lengths, 0 without that target. stall_s: root mean square of a request's prefill stalls
    with an ITL target, else 0. arrival_cv2: as in `tier_model.TierSpec`.
    """

    slo: Slo
    limits: EngineLimits
    base_s: float
    work_s: float
    output_tokens: float
    tpot_tail_scale: float
    ttft_outside_s: float
    e2e_token_budget_s: float
    stall_s: float
    arrival_cv2: float
    gateway_count: int

    def matches(self, other: _CapacityInputs) -> bool:
        exact = (self.slo, self.limits, self.arrival_cv2, self.gateway_count)
        if exact != (other.slo, other.limits, other.arrival_cv2, other.gateway_count):
            return False
        pairs = (
            (self.base_s, other.base_s),
            (self.work_s, other.work_s),
            (self.output_tokens, other.output_tokens),
            (self.tpot_tail_scale, other.tpot_tail_scale),
            (self.e2e_token_budget_s, other.e2e_token_budget_s),
            (self.stall_s, other.stall_s),
        )
        changed = any(abs(new - old) > INPUT_TOLERANCE * old for old, new in pairs)
        return not changed and abs(other.ttft_outside_s - self.ttft_outside_s) <= TTFT_TOLERANCE * (
            self.slo.ttft_s or 1.0
        )


@dataclass
class CapacityState:
    """State of one tier's SLO capacity. result: the last one, or why there is none; None before the first.

    checked_s: time of the last check. tier_spec: inputs of the SLO capacity.
    """

    result: TierCapacity | Unavailable | None = None
    checked_s: float = -math.inf
    tier_spec: TierSpec | None = None
    _arrival_cv2: float = field(default=1.0, repr=False)
    _inputs: _CapacityInputs | None = field(default=None, repr=False)

    def expire(self) -> None:
        """Have the SLO capacity computed again. The last one is valid until then."""
        self.checked_s, self._inputs, self.tier_spec = -math.inf, None, None

    def is_due(self, now_s: float) -> bool:
        """Return whether the inputs of the SLO capacity are to be checked."""
        return not 0.0 <= now_s - self.checked_s < CAPACITY_CHECK_S

    def plan(
        self,
        engines: TierEngines,
        demand: DemandState,
        now_s: float,
        slo: Slo,
        workload: Workload,
        tpot_tail_scale: float,
        ttft_outside_s: float,
        gateway_count: int,
    ) -> TierSpec | None:
        """Return the inputs for a new SLO capacity; None if the current one is valid, or if it cannot be computed."""
        self.checked_s = now_s
        model, limits = engines.model, engines.limits
        if model is None or limits is None:
            return None
        if not slo.has_target_for(engines.role):
            self.result, self._inputs = NO_TARGET, None
            return None
        tier_spec = TierSpec(
            engines.role,
            model,
            workload,
            limits,
            slo,
            transfer=engines.transfer if engines.role is Role.DECODE else None,
            tpot_tail_scale=tpot_tail_scale,
            arrival_cv2=self.measured_arrival_cv2(demand),
            ttft_outside_s=ttft_outside_s,
            itl_model=None if slo.itl_s is None else engines.averaged_model(model, now_s),
            gateways=gateway_count,
        )
        inputs = _inputs_of(engines, tier_spec)
        if self._inputs is not None and self._inputs.matches(inputs):
            return None
        self._inputs, self.tier_spec = inputs, tier_spec
        return tier_spec

    def apply(self, capacity: TierCapacity | Infeasible) -> float:
        """Store the SLO capacity that was computed from the last `tier_spec`.

        Returns the new work of a request over the one before; 1 if one of them is unknown.
        """
        before, self.result = self.result, capacity if isinstance(capacity, TierCapacity) else _infeasible(capacity)
        if isinstance(before, TierCapacity) and isinstance(self.result, TierCapacity):
            return self.result.request_gpu_s / before.request_gpu_s
        return 1.0

    @property
    def arrival_cv2(self) -> float:
        """Squared coefficient of variation of interarrival times in the current SLO capacity; 1 without one."""
        return 1.0 if self._inputs is None else self._inputs.arrival_cv2

    def measured_arrival_cv2(self, demand: DemandState) -> float:
        """Return the measured squared coefficient of variation of interarrival times, over seconds.

        Samples are of arrivals, each with the work of the mix. It changes only by more than ARRIVAL_CV2_TOLERANCE.
        """
        if self.result is not None and not isinstance(self.result, Unavailable) and demand.last_sample_s is not None:
            measured = arrival_dispersion(demand.noise, self.result.request_gpu_s)
            if abs(measured - self._arrival_cv2) > ARRIVAL_CV2_TOLERANCE * self._arrival_cv2:
                self._arrival_cv2 = measured
        return self._arrival_cv2


def _inputs_of(engines: TierEngines, tier_spec: TierSpec) -> _CapacityInputs:
    work, workload = engines.work(tier_spec.model, tier_spec.workload), tier_spec.workload
    return _CapacityInputs(
        tier_spec.slo,
        tier_spec.limits,
        tier_spec.model.base_s,
        work.work_s,
        workload.mean(workload.output_tokens),
        tier_spec.tpot_tail_scale,
        tier_spec.ttft_outside_s,
        0.0 if tier_spec.slo.e2e_s is None or math.isinf(tpot_target(tier_spec)[0]) else tpot_target(tier_spec)[0],
        0.0 if tier_spec.itl_model is None else _stall_s(engines.work(tier_spec.itl_model, workload)),
        tier_spec.arrival_cv2,
        tier_spec.gateways,
    )


def _stall_s(work: TierWork) -> float:
    return math.sqrt(work.workload.moment(work.stall_s, 2))


def _infeasible(infeasible: Infeasible) -> Unavailable:
    return Unavailable(f"no number of replicas meets the SLO or any looser one: limited by {infeasible.constraint}")
