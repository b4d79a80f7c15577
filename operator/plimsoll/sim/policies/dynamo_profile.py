"""What Dynamo's planner knows of an engine before the first request: the engine's own benchmark, taken from the plant.

Problem: the planner's latency model is a regression that someone must seed. In a cluster a worker runs a benchmark of
itself when it starts and hands the planner one record for each point: how long a step took and what was in it.

Idea: the same grid, and each point's step as an undisturbed, mean, cool replica of the plant would have measured it.
Prefill: single prompts, their lengths in even steps from 10 tokens to the step's budget. Decode: context lengths in
even steps from a block to the longest, each with batch sizes in even steps from one to what the cache and
`max_num_seqs` allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Final

import numpy as np

from plimsoll.core.picking.endpoint import Role
from plimsoll.sim.iteration import Did
from plimsoll.sim.pace import Pace
from plimsoll.sim.plant import Plant

Sample = tuple[float, Did]  # seconds of a step, and what it did
_LEAST_PROMPT: Final = 10
_PROMPTS: Final = 16
_CONTEXTS: Final = 6
_BATCHES: Final = 6
_SPARED_TOKENS: Final = 10  # of the longest context


def prefill(plant: Plant, role: Role) -> Sequence[Sample]:
    """Single prompts."""
    own = plant.of_role(role)
    pace = Pace(own, 0.0, Random(0))
    lengths = _even(_LEAST_PROMPT, own.budget, _PROMPTS)
    return [(pace.stretch(0, n, n * n / 2.0, 0, 0).first_s, Did(prefills=1, tokens=n)) for n in lengths]


def decode(plant: Plant, role: Role) -> Sequence[Sample]:
    """Batches of equal contexts."""
    own = plant.of_role(role)
    pace, blocks, found = Pace(own, 0.0, Random(0)), own.kv_tokens // own.block_size, []
    for context in _even(own.block_size, own.max_model_len - _SPARED_TOKENS, _CONTEXTS):
        most = min(own.max_num_seqs, blocks // -(-(context + 1) // own.block_size))
        for batch in _even(1, most, _BATCHES) if most else ():
            took_s = pace.stretch(0, 0, 0.0, batch, batch * context).first_s
            found.append((took_s, Did(decodes=batch, context=batch * context)))
    return found


def _even(least: int, most: int, count: int) -> list[int]:
    return [int(one) for one in np.unique(np.linspace(least, max(least, most), count, dtype=int))]
