"""What is known of a tier's engines: their step-time model and their limits.

Problem: engines may hold less than they announce, and a data sheet or a self-benchmark is only a prior of their speed.

Idea: the step counters of stock vLLM refine the prior, and readings of single engines correct the limits. Another
build, model or accelerator resets both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from plimsoll.core.capacity.tier_model import HTTP_OVERHEAD_PER_TOKEN_S, HTTP_OVERHEAD_S
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
    is_one_configuration,
    update_limits,
)
from plimsoll.core.engine_model.step_time import EngineLimits, KvTransfer, StepModel, TierWork, decode_tier, serve_tier
from plimsoll.core.ports import EngineInfo
from plimsoll.core.types import Role, Unavailable
from plimsoll.core.workload import Workload

PESSIMISM: Final = 0.75  # quantile of the posterior step time to size for
STEP_MODEL_MEMORY_S: Final = 600.0  # window of the steps for inter-token latency

# For engines that do not report limits: vLLM's defaults, and a KV cache that is no constraint.
DEFAULT_MAX_SEQUENCES: Final = 256
DEFAULT_TOKEN_BUDGET: Final = 8192
DEFAULT_KV_TOKENS: Final = 1 << 24
DEFAULT_BLOCK_TOKENS: Final = 16
DEFAULT_LAYERS: Final = 32

_IDENTIFYING_FIELDS: Final = ("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
NO_ENGINE_INFO: Final = Unavailable("no engine of the tier has reported its configuration yet")


@dataclass
class TierEngines:
    """State of a tier's engines. no_model: why there is no step-time model, while there is none."""

    role: Role
    engine_key: EngineKey | None = None
    posterior: Posterior | None = None
    no_model: Unavailable = NO_ENGINE_INFO
    limits: EngineLimits | None = None  # as announced, or less where measured
    announced: EngineLimits | None = None
    measured_limits: MeasuredLimits = NO_MEASURED_LIMITS
    layers: int = DEFAULT_LAYERS
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    last_window: WindowSums | None = None  # newest usable window: the load for which the model is pessimistic
    replica_speeds: ReplicaSpeeds = field(default_factory=ReplicaSpeeds, repr=False)  # relative speed of each replica
    _model_cache: tuple[Posterior, WindowSums | None, StepModel] | None = field(default=None, repr=False)
    _averaged_model: tuple[float, float, StepModel] | None = field(
        default=None, repr=False
    )  # start and end of the window, mean model

    def on_engine_info(self, engine_info: EngineInfo) -> bool:
        """Process an engine's report. Returns whether the step-time model is a new one.

        Another build, model or accelerator resets it.
        """
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
            return False
        prior_models = self_benchmark.choose_prior(engine_info)
        if isinstance(prior_models, Unavailable):
            self.no_model = prior_models
            return False
        self.engine_key, self.posterior, self.last_window, self.replica_speeds = (
            key,
            initial_posterior(*prior_models),
            None,
            ReplicaSpeeds(),
        )
        self._averaged_model = None
        return True

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
        self.measured_limits = update_limits(self.measured_limits, batches, self.announced, now_s)
        limits = self.measured_limits.apply(self.announced)
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

    def work(self, model: StepModel, workload: Workload) -> TierWork:
        """Return the work of a mean request by a step-time model."""
        if self.role is Role.DECODE:
            return decode_tier(model, workload, self.transfer)
        return serve_tier(model, workload)


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


def without_kv_posting(windows: Sequence[WindowSums], post_share: float | Unavailable) -> list[WindowSums]:
    """Return windows of a decode engine without the time in which it posted KV reads, which is modelled separately."""
    if isinstance(post_share, Unavailable) or not 0.0 < post_share < 1.0:
        return list(windows)
    lost_share = KvTransfer(1, 1).post_loss_share * post_share
    return [replace(window, busy_s=window.busy_s * (1.0 - lost_share)) for window in windows]
