"""The plant: what engines, starts and the road between them are like. The controller never sees it.

A replica's speed is drawn at its start, within `spread` of the profile; `scale` stretches all times of all steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from plimsoll.api.contract import contract
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import About, Ladder
from plimsoll.sim.blocks import Blocks
from plimsoll.sim.engine import Engine
from plimsoll.sim.meters import Meters
from plimsoll.sim.pace import Pace
from plimsoll.sim.profile import Profile
from plimsoll.sim.startup import StartUp
from plimsoll.sim.wire import FABRIC, Wire

_RUNGS: Final = ((16, 128, 1024), (1, 4, 8), 16)  # a warm-up's prompt lengths, batch sizes and tokens of each
_VERSION: Final = "simulated"


@dataclass(frozen=True)
class Plant:
    """profile: of an engine of any tier. noise: relative standard deviation of a step. chunk: tokens that one of a
    trace's block names stands for, 0 without. leg_s: HTTP of a further leg. config: the model's config.json, which
    engines tell, None where they do not find it. gpus: of a replica. bytes_per_s: of the fabric between engines.
    leap: see `Engine`."""

    profile: Profile
    start: StartUp
    scale: float = 1.0
    spread: float = 0.1
    noise: float = 0.02
    chunk: int = 0
    leg_s: float = 0.002
    config: Mapping[str, Any] | None = None
    gpus: Mapping[Role, int] = field(default_factory=dict)
    bytes_per_s: float = FABRIC
    leap: bool = True

    def of_role(self, role: Role) -> Profile:
        """The profile of a tier's engines."""
        factors = {Role.PREFILL: self.profile.producer_factor, Role.DECODE: self.profile.consumer_factor}
        return self.profile.scaled(self.scale * factors.get(role, 1.0))

    def engine(self, role: Role, random: Random) -> Engine:
        """A new replica's engine."""
        own = self.of_role(role).scaled(1.0 + self.spread * random.uniform(-1.0, 1.0))
        return Engine(
            own.max_num_seqs,
            own.budget,
            Blocks(own.kv_tokens // own.block_size, own.block_size, self.chunk),
            Pace(own, self.noise, random),
            self.wire(),
            Meters(own.max_model_len),
            self.leap,
        )

    def wire(self) -> Wire:
        """What KV reads cost a decode engine."""
        own = self.profile
        return Wire(own.layers, own.block_size, own.kv_bytes_per_token, self.bytes_per_s)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that an engine takes."""
        return min(
            self.profile.max_model_len, self.profile.kv_tokens // self.profile.block_size * self.profile.block_size
        )

    def frontend_s(self, tokens: int) -> float:
        """A request's way to the engine core."""
        return self.profile.frontend + self.profile.frontend_token * tokens

    def about(self, role: Role) -> About:
        """What an engine says of itself, its warm-up's ladder included."""
        own = self.profile
        return About(
            engine=_VERSION,
            engine_version=_VERSION,
            accelerator=own.accelerator,
            gpus=self.gpus.get(role, 1),
            max_sequences=own.max_num_seqs,
            kv_tokens=own.kv_tokens - own.kv_tokens % own.block_size,
            token_budget=own.budget,
            block_tokens=own.block_size,
            max_model_len=own.max_model_len,
            config=self.config,
            ladder=self._ladder(role),
        )

    def _ladder(self, role: Role) -> Ladder:
        """What the warm-up of an undisturbed, cool engine measures, HTTP included."""
        c = self.of_role(role).coefficients
        lengths, sizes, outputs = _RUNGS
        prefill = tuple(
            (n, self.frontend_s(n) + c.base + c.anypre + c.pretok * n + c.preattn * n * n / 2) for n in lengths
        )
        batches = [(size, min(lengths) + outputs // 2) for size in sizes]
        batches.append((max(sizes), max(lengths) + outputs // 2))
        decode = tuple((size, context, c.base + c.dec * size + c.ctx * size * context) for size, context in batches)
        return Ladder(prefill, () if role is Role.PREFILL else decode)


def quiet_s() -> float:
    """Seconds for which an engine that is to end waits at least."""
    drain = contract().drain
    return float(drain["min_unready_seconds"] + drain["quiet_seconds"])
