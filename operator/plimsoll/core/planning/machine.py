"""One replica as a plan sees it: what its steps take in each role, and what it may hold.

Problem: a plan compares engines with more or fewer GPUs, other chunk budgets, and other roles, and a measured profile
says other things of them than a data sheet does. Idea: both become a `Machine`, and the rest does not know which.

Power-capped cards are slower under load. A card that only prefills is planned hot and one that only decodes cool, as
measured on two H200s; in between the heat follows the share of time that goes into matrix products, at the load that
the promise allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Final

from plimsoll.core.knee import kv_sequences
from plimsoll.core.latency import EngineLimits, KvTransfer, StepModel, serve_tier
from plimsoll.core.roofline import Accelerator, ModelShape, kv_tokens, prior
from plimsoll.core.workload import Workload

BUDGETS: Final = (1024, 2048, 4096, 8192, 16384)  # below 1,024 the law of the first token was seen to fail
MAX_SEQUENCES: Final = 1024  # vLLM's default on cards of 70 GB and more
BLOCK_TOKENS: Final = 128  # what the operator starts prefill and decode engines with
_ROUNDS: Final = 12
_HOTTEST: Final = 1.2  # how far beyond the hot figures a card may get


@dataclass(frozen=True)
class Machine:
    """hot: the steps of a power-capped card. cool: of one that is not; the same where power never binds.

    prefill_factor: steps of an engine that only prefills, over `hot`. From hinge_sequences on a sequence costs
    hinge_s more; what is left out is that prompt tokens of the same step count as sequences do, see `serving`.
    cool_share, hot_share: of time in matrix products, up to which a card is cool, and at which it is hot: fitted to
    recorded loads. mixture: whether experts make the base depend on the batch. measured: by a profile.
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
    mixture: bool = False
    measured: bool = False

    def budgeted(self, token_budget: int) -> Machine:
        """The same with another chunk budget; its cache stays as it is."""
        return replace(self, limits=replace(self.limits, token_budget=token_budget))

    @property
    def prefilling(self) -> StepModel:
        """The steps of an engine that only prefills."""
        f, m = self.prefill_factor, self.hot
        return replace(
            m,
            base_s=m.base_s * f,
            any_prefill_s=m.any_prefill_s * f,
            prefill_token_s=m.prefill_token_s * f,
            prefill_pair_s=m.prefill_pair_s * f,
        )

    def serving(self, workload: Workload, tpot_target_s: float) -> StepModel:
        """The steps of an engine that prefills and decodes, at the largest batch that the target, slots or cache allow.

        Heat and the hinge are those at that batch: exact at the load that is planned for, and too slow below, where
        less is at stake. In a real step, and in the simulator's, a prompt of hinge_sequences tokens makes every
        sequence beside it cost hinge_s. Charged in the share of steps with a prompt, TPOT at 80 % of an 8B's line came
        out too high for the bounds of `tests/core/test_planning_simulated.py`, so it is left out.
        """
        return self._at_batch(workload, tpot_target_s, lambda share: self._heated(share))

    def decoding(self, workload: Workload, tpot_target_s: float) -> StepModel:
        """The same of an engine that only decodes, before `transfer.step_factor`."""
        return self._at_batch(workload, tpot_target_s, lambda _: self.cool)

    def _at_batch(self, workload: Workload, target_s: float, steps: Callable[[float], StepModel]) -> StepModel:
        most = min(self.limits.max_sequences, kv_sequences(workload, self.limits.kv_tokens))
        batch, share = most, 1.0
        for _ in range(_ROUNDS):  # the batch falls as the line rises: halfway each time, so that it settles
            line = steps(share)
            extra_s = self.hinge_s * max(0.0, 1 - self.hinge_sequences / max(batch, 1.0))
            found = replace(line, sequence_s=line.sequence_s + extra_s)
            work = serve_tier(found, workload)
            batch = (batch + min(most, work.batch(target_s))) / 2
            reading_s = found.cached_token_s * workload.mean(
                workload.output_tokens * (workload.prompt_tokens + workload.output_tokens / 2)
            )
            share = work.rate_per_s(max(batch, 1e-9)) * max(0.0, work.work_s - reading_s)
        return found

    def _heated(self, share: float) -> StepModel:
        heat = min(_HOTTEST, max(0.0, (share - self.cool_share) / (self.hot_share - self.cool_share)))
        pairs = {f.name: (getattr(self.cool, f.name), getattr(self.hot, f.name)) for f in fields(StepModel)}
        between = {name: cool + heat * (hot - cool) for name, (cool, hot) in pairs.items()}
        base_s = max(between["base_s"], min(pairs["base_s"]) / 2)  # heat beyond what was measured takes no more off it
        least = dict.fromkeys(between, 0.0) | {"base_s": base_s, "any_prefill_s": -base_s}
        return StepModel(**{name: max(value, least[name]) for name, value in between.items()})


def of_shape(shape: ModelShape, gpu: Accelerator, gpus: int, token_budget: int) -> Machine | None:
    """A replica on so many GPUs by the roofline, before any measurement; None where its weights leave no cache.

    gpus must divide the attention heads; raises ValueError.
    """
    tokens = kv_tokens(shape, gpu, gpus, token_budget=token_budget)
    if tokens is None:
        return None
    model = prior(shape, gpu, gpus)
    return Machine(
        model,
        model,
        EngineLimits(min(MAX_SEQUENCES, token_budget), tokens, token_budget),
        KvTransfer(shape.layers, BLOCK_TOKENS),
        shape.kv_bytes_per_token,
        gpus,
        mixture=shape.experts > 1,
    )
