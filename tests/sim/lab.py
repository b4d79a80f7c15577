"""Engines and fleets small enough to know what must come out."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from plimsoll.api.v1alpha1 import InferenceService, parse
from plimsoll.core.picking.endpoint import Role
from plimsoll.sim import profile
from plimsoll.sim.blocks import Blocks
from plimsoll.sim.engine import Engine
from plimsoll.sim.job import Job
from plimsoll.sim.meters import Meters
from plimsoll.sim.pace import Pace
from plimsoll.sim.plant import Plant
from plimsoll.sim.policies.base import Plimsoll, Policy
from plimsoll.sim.profile import Profile
from plimsoll.sim.setting import Setting
from plimsoll.sim.startup import StartUp
from plimsoll.sim.visit import Asked, Visit
from plimsoll.sim.wire import Wire
from plimsoll.sim.world import World
from tests import builders

H200 = profile.load("h200-8b")
CAPPED = profile.load("h200-70b-capped")

Lengths = tuple[float, int, int]  # arrival in seconds, tokens in and out


@dataclass(frozen=True)
class Load:
    """Poisson arrivals with lognormal lengths of these means."""

    requests: int
    per_s: float
    prompt: float = 1200.0
    output: float = 220.0
    seed: int = 1

    def draw(self) -> list[Lengths]:
        random, now_s, found = Random(self.seed), 0.0, []
        for _ in range(self.requests):
            now_s += random.expovariate(self.per_s)
            prompt, output = random.lognormvariate(-0.18, 0.6), random.lognormvariate(-0.125, 0.5)
            found.append((now_s, max(1, int(self.prompt * prompt)), max(1, int(self.output * output))))
        return found

    def asked(self) -> list[Asked]:
        return [Asked(*lengths) for lengths in self.draw()]


def engine(own: Profile, *, leap: bool = True, noise: float = 0.0, chunk: int = 0, seed: int = 1) -> Engine:
    return Engine(
        own.max_num_seqs,
        own.budget,
        Blocks(own.kv_tokens // own.block_size, own.block_size, chunk),
        Pace(own, noise, Random(seed)),
        Wire(own.layers, own.block_size, own.kv_bytes_per_token),
        Meters(own.max_model_len),
        leap,
    )


def jobs(lengths: Sequence[Lengths], *, remote: bool = False) -> list[Job]:
    return [Job(name, prompt, output, remote=remote) for name, (_, prompt, output) in enumerate(lengths)]


def drive(one: Engine, todo: Sequence[Job], at_s: Sequence[float]) -> None:
    """Adds the jobs at their moments, delivers KV when it is there, until nothing is left."""
    events = [(moment, 0, place) for place, moment in enumerate(at_s)]
    heapq.heapify(events)
    while events or one.due_s < math.inf:
        if events and events[0][0] < one.due_s:
            now_s, loaded, place = heapq.heappop(events)
            (one.loaded if loaded else one.add)(todo[place], now_s)
        else:
            one.advance(one.due_s)
        for job, there_s in one.sent:
            heapq.heappush(events, (there_s, 1, job.name))
        one.sent.clear()


def run(one: Engine, lengths: Sequence[Lengths], *, remote: bool = False) -> list[Job]:
    todo = jobs(lengths, remote=remote)
    drive(one, todo, [at_s for at_s, _, _ in lengths])
    return todo


def service(**spec: Any) -> InferenceService:
    """One serve tier of 1 to 4 with a promise, unless the spec says otherwise."""
    usual: dict[str, Any] = {
        "tiers": {"serve": {"minReplicas": 1, "maxReplicas": 4}},
        "slo": {"ttft": "2s", "tpot": "50ms"},
    }
    return parse(builders.service(**{**usual, **spec}))


def disaggregated() -> InferenceService:
    tiers = {"prefill": {"minReplicas": 1, "maxReplicas": 4}, "decode": {"minReplicas": 1, "maxReplicas": 4}}
    return service(tiers=tiers, slo={"ttft": "3s", "tpot": "60ms"})


def plant(own: Profile = H200, start_s: float = 20.0, **differing: Any) -> Plant:
    return replace(Plant(own, StartUp(start_s, start_s)), **differing)


@dataclass
class Done:
    """A run and its requests, as they ended."""

    world: World
    visits: list[Visit]


def simulate(
    asked: Sequence[Asked],
    policy: Policy | None = None,
    of: InferenceService | None = None,
    hardware: Plant | None = None,
    **setting: Any,
) -> Done:
    of = of or service()
    usual: dict[str, Any] = {
        "initial": {Role(name): tier.bounds[0] for name, tier in of.spec.tiers.items()},
        "end_s": asked[-1].at_s,
    }
    visits: list[Visit] = []
    world = World(of, hardware or plant(), policy or Plimsoll(), Setting(**{**usual, **setting}), visits.append)
    world.run(asked)
    return Done(world, visits)
