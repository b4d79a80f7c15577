"""State of one tier: step-time model, start-up models, demand and SLO capacity.

Problem: computing the SLO capacity takes milliseconds, and its inputs change slightly at every scrape.

Idea: the SLO capacity is kept until an input has changed by more than its uncertainty, which is checked every few
seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from plimsoll.core.autoscaling.itl_limit import NO_ITL_LIMIT, ItlLimit, update_itl_limit
from plimsoll.core.autoscaling.observations import LATENCY_WINDOW_S
from plimsoll.core.autoscaling.sizing_batch import TierCapacity
from plimsoll.core.autoscaling.startup_models import StartupModels
from plimsoll.core.autoscaling.startup_time import StartupModel, startup_prior
from plimsoll.core.capacity.sizing import Infeasible
from plimsoll.core.capacity.tier_model import HTTP_OVERHEAD_PER_TOKEN_S, HTTP_OVERHEAD_S, TierSpec, tpot_target
from plimsoll.core.demand.demand_state import DemandState, rescale
from plimsoll.core.demand.noise_model import arrival_dispersion
from plimsoll.core.engine_model import self_benchmark
from plimsoll.core.engine_model.calibration.counter_window import WindowSums, context_lengths, fill_missing
from plimsoll.core.engine_model.calibration.estimates import quantile_model
from plimsoll.core.engine_model.calibration.posterior_model import Posterior, initial_posterior
from plimsoll.core.engine_model.calibration.posterior_update import rejection_reason, update_all
from plimsoll.core.engine_model.calibration.replica_speed import ReplicaSpeeds
from plimsoll.core.engine_model.calibration.serialization import EngineKey
from plimsoll.core.engine_model.measured_limits import (
    NO_MEASURED_LIMITS,
    EngineBatch,
    MeasuredLimits,
    count_preemptions,
    is_one_configuration,
    update_limits,
)
from plimsoll.core.engine_model.step_time import EngineLimits, KvTransfer, StepModel, TierWork, decode_tier, serve_tier
from plimsoll.core.ports import EngineInfo
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role, Unavailable
from plimsoll.core.workload import Workload

PESSIMISM: Final = 0.75  # quantile of the posterior step time to size for
STEP_MODEL_MEMORY_S: Final = 600.0  # window of the steps for inter-token latency
CAPACITY_CHECK_S: Final = 5.0  # interval of the checks of the SLO capacity
TTFT_TOLERANCE: Final = 0.01  # of the TTFT target: what is outside the tier
INPUT_TOLERANCE: Final = 0.03  # relative change of an input that recomputes the SLO capacity
ARRIVAL_CV2_TOLERANCE: Final = (
    0.1  # or relative change of `arrival_cv2`; half of a wait is due to service, so the SLO capacity changes by less
)

# For engines that do not report limits: vLLM's defaults, and a KV cache that is no constraint.
DEFAULT_MAX_SEQUENCES: Final = 256
DEFAULT_TOKEN_BUDGET: Final = 8192
DEFAULT_KV_TOKENS: Final = 1 << 24
DEFAULT_BLOCK_TOKENS: Final = 16
DEFAULT_LAYERS: Final = 32

# Prior of the start-up time: a 10 GB image over 1 GB/s, 16 GB of weights from a volume at 2 GB/s.
PRIOR_STARTUP_MODEL: Final = startup_prior(10e9, 0.0, 16e9, 1e9, 2e9)

_IDENTIFYING_FIELDS: Final = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
NO_STARTUPS: Final = StartupModels(PRIOR_STARTUP_MODEL)
NO_DEMAND: Final = DemandState()
NO_ENGINE_INFO: Final = Unavailable("no engine of the tier has reported its configuration yet")
NO_REQUEST_LENGTHS: Final = Unavailable("no completed request has shown the lengths of prompts and outputs yet")
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
class TierState:
    """State of one tier. capacity: SLO capacity for sizing; Unavailable names what is missing."""

    role: Role
    startup_models: StartupModels = NO_STARTUPS
    forecast_state: DemandState = NO_DEMAND
    engine_key: EngineKey | None = None
    posterior: Posterior | None = None
    limits: EngineLimits | None = None  # as announced, or less where measured
    announced: EngineLimits | None = None
    measured_limits: MeasuredLimits = NO_MEASURED_LIMITS
    itl_limit: ItlLimit = NO_ITL_LIMIT
    layers: int = DEFAULT_LAYERS
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    capacity: TierCapacity | Unavailable = NO_ENGINE_INFO
    first_arrival_s: float = -math.inf  # first arrivals, if none were known before
    last_window: WindowSums | None = None  # newest usable window: the load for which the model is pessimistic
    checked_s: float = -math.inf  # last check of the SLO capacity
    tier_spec: TierSpec | None = None  # inputs of the SLO capacity
    replica_speeds: ReplicaSpeeds = field(default_factory=ReplicaSpeeds, repr=False)  # relative speed of each replica
    _arrival_cv2: float = field(default=1.0, repr=False)
    _capacity_inputs: _CapacityInputs | None = field(default=None, repr=False)
    _model_cache: tuple[Posterior, WindowSums | None, StepModel] | None = field(default=None, repr=False)
    _settled_since: tuple[float, int] | None = field(default=None, repr=False)  # and the number of replicas
    _startup_cache: tuple[StartupModels, float] | None = field(default=None, repr=False)
    _averaged_model: tuple[float, float, StepModel] | None = field(
        default=None, repr=False
    )  # start and end of the window, mean model

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

    def on_engine_info(self, engine_info: EngineInfo) -> None:
        """Process an engine's report. Another build, model or accelerator resets the step-time model."""
        config = engine_info.config or {}
        announced = announced_limits(engine_info)
        if self.announced is not None and not is_one_configuration((self.announced, announced)):
            self.measured_limits = NO_MEASURED_LIMITS
        self.announced, self.limits = announced, self.measured_limits.apply(announced)
        self.block_tokens = engine_info.block_tokens or DEFAULT_BLOCK_TOKENS
        layers = config.get("num_hidden_layers")
        self.layers = layers if isinstance(layers, int) and layers > 0 else DEFAULT_LAYERS
        key = engine_key_of(engine_info)
        if self.posterior is not None and key == self.engine_key:
            return
        prior_models = self_benchmark.choose_prior(engine_info)
        if isinstance(prior_models, Unavailable):
            if self.posterior is None:
                self.capacity = prior_models
            return
        if self.posterior is None and isinstance(self.capacity, Unavailable):
            self.capacity = NO_REQUEST_LENGTHS
        self.engine_key, self.posterior, self.last_window, self.replica_speeds = (
            key,
            initial_posterior(*prior_models),
            None,
            ReplicaSpeeds(),
        )
        self.checked_s, self._capacity_inputs, self.tier_spec, self._averaged_model = -math.inf, None, None, None

    def update_model(self, windows: Sequence[WindowSums], workload: Workload | Unavailable) -> None:
        """Update the step-time model with the engines' work and the request lengths."""
        if self.posterior is None or self.limits is None or not windows or isinstance(workload, Unavailable):
            return
        lengths = context_lengths(workload, self.limits.token_budget)
        usable = [fill_missing(window, lengths) for window in windows]
        usable = [window for window in usable if rejection_reason(self.posterior, window) is None]
        if usable:
            self.posterior, self.last_window = update_all(self.posterior, usable, self.replica_speeds), usable[-1]

    def update_limits(self, batches: Sequence[EngineBatch], now_s: float) -> None:
        """Update the limits with what single engines hold. Those of prefill engines hold nothing for long."""
        if self.announced is None or self.limits is None:  # `announced` alone is of before a restart
            return
        if self.role is Role.PREFILL or not batches:
            return
        self._apply_limits(update_limits(self.measured_limits, batches, self.announced, now_s), self.announced)

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

    def update_preemptions(self, preemptions_per_s: float | Unavailable, requests: float) -> None:
        """Update the limits with the preemptions and requests of a settled minute."""
        if self.announced is None or self.limits is None or self.role is Role.PREFILL:
            return
        if not isinstance(preemptions_per_s, Unavailable):
            preemptions = preemptions_per_s * LATENCY_WINDOW_S
            self._apply_limits(count_preemptions(self.measured_limits, preemptions, requests), self.announced)

    def update_itl(
        self, measured_s: float | Unavailable, target_s: float | None, replica_rate_per_s: float, now_s: float
    ) -> None:
        """Update the load within the ITL target with a settled minute. replica_rate_per_s: requests/s per replica."""
        if not isinstance(measured_s, Unavailable):
            self.itl_limit = update_itl_limit(self.itl_limit, measured_s, target_s, replica_rate_per_s, now_s)

    def _apply_limits(self, measured: MeasuredLimits, announced: EngineLimits) -> None:
        self.measured_limits, limits = measured, measured.apply(announced)
        if limits != self.limits:
            self.limits = limits

    @property
    def model(self) -> StepModel | None:
        """Return the step-time model to size for; it is pessimistic until engines have reported."""
        posterior, last_window = self.posterior, self.last_window
        if posterior is None:
            return None
        if (
            self._model_cache is None
            or self._model_cache[0] is not posterior
            or self._model_cache[1] is not last_window
        ):
            is_usable = last_window is not None and rejection_reason(posterior, last_window) is None
            self._model_cache = (
                posterior,
                last_window,
                quantile_model(posterior, PESSIMISM, last_window if is_usable else None),
            )
        return self._model_cache[2]

    def is_due(self, now_s: float) -> bool:
        """Return whether the inputs of the SLO capacity are to be checked."""
        return not 0.0 <= now_s - self.checked_s < CAPACITY_CHECK_S

    def plan_capacity(
        self,
        now_s: float,
        slo: Slo,
        workload: Workload,
        tpot_tail_scale: float,
        ttft_outside_s: float,
        gateway_count: int,
    ) -> TierSpec | None:
        """Return the inputs for a new SLO capacity; None if the current one is valid, or if it cannot be computed."""
        self.checked_s = now_s
        model, limits = self.model, self.limits
        if model is None or limits is None:
            return None
        if not slo.has_target_for(self.role):
            self.capacity, self._capacity_inputs = NO_TARGET, None
            return None
        tier_spec = TierSpec(
            self.role,
            model,
            workload,
            limits,
            slo,
            transfer=self.transfer if self.role is Role.DECODE else None,
            tpot_tail_scale=tpot_tail_scale,
            arrival_cv2=self.measured_arrival_cv2(),
            ttft_outside_s=ttft_outside_s,
            itl_model=None if slo.itl_s is None else self.averaged_model(model, now_s),
            gateways=gateway_count,
        )
        inputs = self._inputs_of(tier_spec)
        if self._capacity_inputs is not None and self._capacity_inputs.matches(inputs):
            return None
        self._capacity_inputs, self.tier_spec = inputs, tier_spec
        return tier_spec

    def apply_capacity(self, capacity: TierCapacity | Infeasible) -> None:
        """Store the SLO capacity that was computed from the last `tier_spec`."""
        if isinstance(capacity, TierCapacity) and isinstance(
            self.capacity, TierCapacity
        ):  # convert earlier work to the new work of a request
            self.forecast_state = rescale(self.forecast_state, capacity.request_gpu_s / self.capacity.request_gpu_s)
        self.capacity = capacity if isinstance(capacity, TierCapacity) else _infeasible(capacity)

    def _inputs_of(self, tier_spec: TierSpec) -> _CapacityInputs:
        work, workload = self._work(tier_spec.model, tier_spec.workload), tier_spec.workload
        return _CapacityInputs(
            tier_spec.slo,
            tier_spec.limits,
            tier_spec.model.base_s,
            work.work_s,
            workload.mean(workload.output_tokens),
            tier_spec.tpot_tail_scale,
            tier_spec.ttft_outside_s,
            0.0 if tier_spec.slo.e2e_s is None or math.isinf(tpot_target(tier_spec)[0]) else tpot_target(tier_spec)[0],
            0.0 if tier_spec.itl_model is None else _stall_s(self._work(tier_spec.itl_model, workload)),
            tier_spec.arrival_cv2,
            tier_spec.gateways,
        )

    def averaged_model(self, model: StepModel, now_s: float) -> StepModel:
        """Return the mean of the step-time models of the last ten minutes.

        Engine totals hardly show how work divides into prompts and outputs: models that agree on the work of a request
        differ by a quarter in this division within minutes.
        """
        if self._averaged_model is None or now_s < self._averaged_model[1]:
            self._averaged_model = now_s, now_s, model
        since_s, until_s, mean = self._averaged_model
        if now_s > until_s:
            share = (now_s - until_s) / min(now_s - since_s, STEP_MODEL_MEMORY_S)
            self._averaged_model = since_s, now_s, mean.interpolate(model, min(share, 1.0))
        return self._averaged_model[2]

    @property
    def arrival_cv2(self) -> float:
        """Squared coefficient of variation of interarrival times in the current SLO capacity; 1 without one."""
        return 1.0 if self._capacity_inputs is None else self._capacity_inputs.arrival_cv2

    def measured_arrival_cv2(self) -> float:
        """Return the measured squared coefficient of variation of interarrival times, over seconds.

        Samples are of arrivals, each with the work of the mix. It changes only by more than ARRIVAL_CV2_TOLERANCE.
        """
        if not isinstance(self.capacity, Unavailable) and self.forecast_state.last_sample_s is not None:
            measured = arrival_dispersion(self.forecast_state.noise, self.capacity.request_gpu_s)
            if abs(measured - self._arrival_cv2) > ARRIVAL_CV2_TOLERANCE * self._arrival_cv2:
                self._arrival_cv2 = measured
        return self._arrival_cv2

    @property
    def transfer(self) -> KvTransfer:
        """Cost of receiving KV; once an engine has reported steps, these include the cost."""
        if self.last_window is not None:
            return KvTransfer(self.layers, self.block_tokens, step_factor=1.0)
        return KvTransfer(self.layers, self.block_tokens)

    def ttft_part_s(self, workload: Workload) -> float:
        """Return the part of a mean request's TTFT that this tier takes, s."""
        model = self.model
        if model is None or self.limits is None:
            return 0.0
        if self.role is Role.DECODE:
            post_s = workload.mean(self.transfer.post_s(workload.uncached_tokens))
            return model.base_s + post_s
        prefill = model.prefill_s(workload.uncached_tokens, workload.cached_tokens, self.limits.token_budget)
        return (
            workload.mean(prefill) + HTTP_OVERHEAD_S + HTTP_OVERHEAD_PER_TOKEN_S * workload.mean(workload.prompt_tokens)
        )

    def _work(self, model: StepModel, workload: Workload) -> TierWork:
        if self.role is Role.DECODE:
            return decode_tier(model, workload, self.transfer)
        return serve_tier(model, workload)


def _stall_s(work: TierWork) -> float:
    return math.sqrt(work.workload.moment(work.stall_s, 2))


def announced_limits(engine_info: EngineInfo) -> EngineLimits:
    """Return the limits that an engine reports, or the defaults of those that it does not."""
    reported = engine_info.max_sequences, engine_info.kv_tokens, engine_info.token_budget
    defaults = DEFAULT_MAX_SEQUENCES, DEFAULT_KV_TOKENS, DEFAULT_TOKEN_BUDGET
    return EngineLimits(*(value or default for value, default in zip(reported, defaults, strict=True)))


def engine_key_of(engine_info: EngineInfo) -> EngineKey:
    """Return what a calibration applies to: model, accelerator, parallelism and engine version."""
    config = engine_info.config or {}
    model = " ".join(f"{name}={config[name]}" for name in _IDENTIFYING_FIELDS if name in config) or "model unknown"
    parallelism = "1 GPU" if engine_info.gpus == 1 else f"{engine_info.gpus} GPUs"
    is_versioned = engine_info.engine_version != engine_info.engine
    version = f"{engine_info.engine} {engine_info.engine_version}" if is_versioned else engine_info.engine
    return EngineKey(model, engine_info.accelerator, parallelism, version)


def _infeasible(infeasible: Infeasible) -> Unavailable:
    return Unavailable(f"no number of replicas meets the SLO or any looser one: limited by {infeasible.constraint}")


def ttft_outside_tier_s(tiers: Sequence[TierState], tier: TierState, workload: Workload) -> float:
    """Return the part of a mean request's TTFT that the other tiers take, s."""
    return math.fsum(other.ttft_part_s(workload) for other in tiers if other is not tier)


def without_kv_posting(windows: Sequence[WindowSums], post_share: float | Unavailable) -> list[WindowSums]:
    """Return windows of a decode engine without the time in which it posted KV reads, which is modelled separately."""
    if isinstance(post_share, Unavailable) or not 0.0 < post_share < 1.0:
        return list(windows)
    lost_share = KvTransfer(1, 1).post_loss_share * post_share
    return [replace(window, busy_s=window.busy_s * (1.0 - lost_share)) for window in windows]
