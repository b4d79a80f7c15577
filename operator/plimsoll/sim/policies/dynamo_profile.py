"""The engine benchmark that Dynamo's planner gets before the first request, taken from the plant.

Problem: the planner's latency model is a regression that needs initial data. In a cluster a worker benchmarks itself
when it starts and sends the planner one record per point: the step time and the work of the step.

Idea: the same grid, and the step time of each point as an undisturbed, mean, cool replica of the plant would measure
it. Prefill: single prompts, with lengths in even steps from 10 tokens to the token budget. Decode: context lengths in
even steps from a block to the longest, each with batch sizes in even steps from one to what the cache and
`max_num_seqs` allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from plimsoll.core.types import Role
from plimsoll.sim.engine.iteration import StepWork
from plimsoll.sim.engine.step_timing import StepTiming
from plimsoll.sim.plant import Plant

BenchmarkSample = tuple[float, StepWork]  # seconds of a step, and what it did
_MIN_PROMPT_TOKENS: Final = 10
_PROMPT_POINTS: Final = 16
_CONTEXT_POINTS: Final = 6
_BATCH_POINTS: Final = 6
_RESERVED_TOKENS: Final = 10  # of the longest context


def prefill(plant: Plant, role: Role) -> Sequence[BenchmarkSample]:
    """Single prompts."""
    profile = plant.profile_for(role)
    timing = StepTiming(profile)
    lengths = _evenly_spaced(_MIN_PROMPT_TOKENS, profile.budget, _PROMPT_POINTS)
    return [(timing.series(0, n, n * n / 2.0, 0, 0).first_s, StepWork(prefills=1, tokens=n)) for n in lengths]


def decode(plant: Plant, role: Role) -> Sequence[BenchmarkSample]:
    """Batches of equal contexts."""
    profile = plant.profile_for(role)
    timing, blocks, samples = StepTiming(profile), profile.kv_tokens // profile.block_size, []
    for context in _evenly_spaced(profile.block_size, profile.max_model_len - _RESERVED_TOKENS, _CONTEXT_POINTS):
        max_batch = min(profile.max_num_seqs, blocks // -(-(context + 1) // profile.block_size))
        for batch in _evenly_spaced(1, max_batch, _BATCH_POINTS) if max_batch else ():
            step_s = timing.series(0, 0, 0.0, batch, batch * context).first_s
            samples.append((step_s, StepWork(decodes=batch, context=batch * context)))
    return samples


def _evenly_spaced(minimum: int, maximum: int, count: int) -> list[int]:
    return [int(one) for one in np.unique(np.linspace(minimum, max(minimum, maximum), count, dtype=int))]
