"""The law sizes fleets of other engines as those of vLLM, from what they report: the same load, the same fleet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random

import pytest

from plimsoll.core.types import Role
from plimsoll.sim.attempt import Attempt, AttemptOutcome, TraceRequest
from plimsoll.sim.policies.base import PlimsollPolicy
from plimsoll.sim.run_config import RunConfig
from plimsoll.sim.simulator import Simulator
from tests.sim.other_engines import OtherEngines
from tests.sim.sim_harness import make_plant, serve_manifest

SERVICE = serve_manifest(
    tiers={"serve": {"minReplicas": 1, "maxReplicas": 8}}, slo={"ttft": "4s", "tpot": "100ms"}
)  # of engines whose steps take 40 ms and more
PLANT = make_plant(scale=8.0)
TTFT_S, TPOT_S = 4.0, 0.1
LOADS = {"constant": ((4.0, 360.0),), "step": ((1.0, 150.0), (5.0, 210.0), (1.0, 330.0))}
MAX_SEQUENCES = 256
MAX_LOSS = 0.05  # of the offered requests: one standby replica less when the load steps up


@dataclass(frozen=True)
class Run:
    """desired: ordered replicas at the end of each phase. offered_in_time, served_in_time: shares within the SLO of the
    offered and of the served requests.
    """

    desired: tuple[int, ...]
    offered_in_time: float
    served_in_time: float
    replica_hours: float
    admits: bool


def requests(phases: Sequence[tuple[float, float]], seed: int) -> list[TraceRequest]:
    """Poisson arrivals with the rates of the phases, each of some seconds."""
    random, now_s, end_s, found = Random(seed), 0.0, 0.0, []
    for rate, seconds in phases:
        end_s += seconds
        while (now_s := now_s + random.expovariate(rate)) < end_s:
            prompt, output = random.lognormvariate(-0.18, 0.6), random.lognormvariate(-0.125, 0.5)
            found.append(TraceRequest(now_s, max(1, int(1200 * prompt)), max(1, int(220 * output))))
        now_s = end_s
    return found


@cache
def run(engine: str, load: str, seed: int) -> Run:
    phases = LOADS[load]
    ends_s = [sum(seconds for _, seconds in phases[: n + 1]) for n in range(len(phases))]
    config = RunConfig({Role.SERVE: 2 if load == "constant" else 1}, end_s=ends_s[-1], tail_s=60.0, seed=seed)
    ended: list[Attempt] = []
    world = Simulator(SERVICE, PLANT, PlimsollPolicy(), config, ended.append)
    if engine != "vllm":
        world.operator = OtherEngines(SERVICE, engine, MAX_SEQUENCES)
    world.run(requests(phases, seed))
    desired = tuple(_desired(world, end_s) for end_s in ends_s)
    assert world.operator is not None
    published = world.operator.published
    in_time = sum(map(_in_time, ended))
    served = sum(attempt.outcome is AttemptOutcome.OK for attempt in ended)
    hours = world.tiers[Role.SERVE].replica_seconds(ends_s[-1]) / 3600.0
    return Run(
        desired,
        in_time / len(ended),
        in_time / served,
        hours,
        published is not None and published.cost_model is not None,
    )


def _desired(world: Simulator, at_s: float) -> int:
    return next(row[2] for row in reversed(world.log.replicas) if row[0] <= at_s)


def _in_time(attempt: Attempt) -> bool:
    if attempt.outcome is not AttemptOutcome.OK:
        return False
    tpot_s = attempt.tpot_s
    return (attempt.ttft_s or 0.0) <= TTFT_S and (tpot_s is None or tpot_s <= TPOT_S)


@pytest.mark.parametrize(
    ("engine", "load", "seed"),
    [("sglang", "constant", 0), ("sglang", "step", 0), ("llama-cpp", "step", 0), ("tensorrt-llm", "step", 0)],
)
def test_fleet_has_the_size_of_vllm(engine: str, load: str, seed: int) -> None:
    counted, derived = run("vllm", load, seed), run(engine, load, seed)
    assert derived.admits
    for one, other in zip(counted.desired, derived.desired, strict=True):
        assert abs(one - other) <= 1
    assert derived.served_in_time >= 0.95
    assert derived.offered_in_time >= counted.offered_in_time - MAX_LOSS
