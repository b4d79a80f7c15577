"""Plants that differ from what their engines report: slower hosts, other speeds, less memory, fewer slots.

An engine reports the profile that `announced` names, and no self-benchmark, so that Plimsoll begins with the prior that
it computes from the model's shape and the GPU's data sheet. What the engine does is the profile of the plant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from plimsoll.core.ports import EngineInfo
from plimsoll.core.types import Role
from plimsoll.sim.engine.simulated_engine import SimulatedEngine
from plimsoll.sim.plant import Plant
from plimsoll.sim.profile import HardwareProfile


@dataclass(frozen=True)
class MismatchedPlant(Plant):
    """announced: the profile that engines report; None for the plant's own.

    host_s: what the host adds to each first token. host_s_per_sequence: what it adds for each running sequence of an
    engine, as a mean over the busy engines. pace: factor on the steps of the n-th engine, counted from 0.
    """

    announced: HardwareProfile | None = None
    host_s: float = 0.0
    host_s_per_sequence: float = 0.0
    pace: Callable[[int], float] = lambda _: 1.0
    _engines: list[SimulatedEngine] = field(default_factory=list, compare=False)

    def engine(self, role: Role, random: Random) -> SimulatedEngine:
        """Engine of a new replica."""
        pace = self.pace(len(self._engines))
        made = Plant.engine(self if pace == 1.0 else replace(self, scale=self.scale * pace), role, random)
        self._engines.append(made)
        return made

    def frontend_s(self, tokens: int) -> float:
        """Time of a request on its way to the engine core, what the host adds included."""
        batches = [engine.running for engine in self._engines if engine.running] if self.host_s_per_sequence else []
        batch = sum(batches) / len(batches) if batches else 0.0
        return super().frontend_s(tokens) + self.host_s + self.host_s_per_sequence * batch

    def engine_info(self, role: Role) -> EngineInfo:
        """What engines report, without a self-benchmark."""
        reported = self if self.announced is None else replace(self, profile=self.announced)
        return replace(Plant.engine_info(reported, role), self_benchmark=None)
