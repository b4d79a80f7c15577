"""One step time model for both simulators, as far as Dynamo's supports it.

Problem: Dynamo's engines take a step's time from two tables, by the step's prompt tokens and by its KV tokens and their
contexts, and add the two. The base of a step would count twice if both had it, and the cost of attention depends on the
prompt, which the table does not know. Idea: only the decode table, which is read at every step, has the base of a step,
and each prompt token has the attention of a mean token's prompt. All policies that need a step model get this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from plimsoll.core.types import Role
from plimsoll.sim.attempt import TraceRequest
from plimsoll.sim.engine.iteration import StepWork
from plimsoll.sim.plant import Plant
from plimsoll.sim.policies import dynamo_profile
from plimsoll.sim.policies.dynamo_profile import BenchmarkSample
from plimsoll.sim.profile import HardwareProfile

_CONTEXTS: Final = (
    64, 128, 256, 512, 768, 1024, 1536, 2048, 2560, 3072, 3584, 4096, 4608, 5120, 6144, 7168, 8192, 12288, 16384, 32768,
)  # fmt: skip
_KV_POINTS: Final = 31
_PROMPTS: Final = 33
_MIXED_POINTS: Final = 4  # batches of decoding sequences beside each prompt of a benchmark


@dataclass(frozen=True)
class StepLaw:
    """Step times. profile: without heat and without the hinge. mean_prompt: mean prompt length, averaged over prompt
    tokens.
    """

    profile: HardwareProfile
    mean_prompt: float

    @classmethod
    def of(cls, profile: HardwareProfile, requests: Sequence[TraceRequest]) -> StepLaw:
        """The law under this load."""
        tokens = np.array([request.prompt_tokens for request in requests], float)
        return cls(profile, float((tokens**2).sum() / tokens.sum()))

    def prefill_s(self, tokens: float) -> float:
        """What a step's prompt tokens add to it."""
        c = self.profile.coefficients
        return max(0.0, c.anypre + tokens * (c.pretok + c.preattn * self.mean_prompt / 2.0)) if tokens else 0.0

    def decode_s(self, sequences: float, context: float) -> float:
        """The rest of a step: its base, and decoding. context: KV tokens of all sequences together."""
        c = self.profile.coefficients
        return c.base + c.dec * sequences + c.ctx * context

    def step_s(self, work: StepWork) -> float:
        """A step, as their engines reckon it."""
        return self.prefill_s(work.tokens) + self.decode_s(work.decodes, work.context)

    def tables(self) -> dict[str, NDArray[np.float64]]:
        """The arrays of their profile file, milliseconds: (tokens,) and (KV tokens, mean context)."""
        c = self.profile.coefficients
        tokens = np.unique(np.append(1, np.linspace(0, self.profile.budget, _PROMPTS).astype(int)))
        kv, contexts = np.linspace(0.0, self.profile.kv_tokens, _KV_POINTS), np.array(_CONTEXTS, float)
        decodes = [[c.base + c.dec * all_kv / each + c.ctx * all_kv for each in contexts] for all_kv in kv]
        return {
            "prefill_isl": tokens.astype(float),
            "prefill_ttft_ms": np.array([1000.0 * self.prefill_s(n) for n in tokens]),
            "decode_active_kv_tokens": kv,
            "decode_context_length": contexts,
            "decode_itl": 1000.0 * np.array(decodes),
        }

    def benchmark(self, plant: Plant, role: Role) -> list[BenchmarkSample]:
        """A tier's engine's benchmark of itself for Dynamo's planner: its prompts, its batches, and where it does both
        prompts beside batches."""
        prompts = [] if role is Role.DECODE else dynamo_profile.prefill(plant, role)
        batches = [] if role is Role.PREFILL else dynamo_profile.decode(plant, role)
        work = [one for _, one in (*prompts, *batches)]
        subset = [one for _, one in batches[:: max(1, len(batches) // _MIXED_POINTS)]]
        work += [one._replace(decodes=b.decodes, context=b.context) for _, one in prompts for b in subset]
        return [(self.step_s(one), one) for one in work]
