"""What an engine composes: one step's work, and a run of steps that are alike."""

from __future__ import annotations

from dataclasses import dataclass, field

from plimsoll.sim.iteration import NOTHING, Did
from plimsoll.sim.job import Job
from plimsoll.sim.pace import Stretch


@dataclass(eq=False, slots=True)
class Run:
    """Steps of one batch. start_s: of the first one. second_s: when a second one is composed. prompts: which get a
    token of the only step without having decoded before it. finals: which end with the last step."""

    stretch: Stretch
    start_s: float
    second_s: float
    after_s: float
    count: int
    emits: int
    composed: int = 0
    completed: int = 0
    end_s: float = 0.0
    last_s: float = 0.0  # when what follows is composed
    prompts: list[Job] = field(default_factory=list)
    finals: list[Job] = field(default_factory=list)
    did: Did = NOTHING  # of the first step


@dataclass(slots=True)
class Batch:
    """What one step does beside decoding."""

    tokens: int = 0
    pairs: float = 0.0
    single: int = 0  # sequences that lack one token without being in the decoding batch
    read: int = 0
    prefills: int = 0
    cached: int = 0
    prompts: list[Job] = field(default_factory=list)
    finals: list[Job] = field(default_factory=list)
    joining: list[Job] = field(default_factory=list)
    fetches: list[Job] = field(default_factory=list)
