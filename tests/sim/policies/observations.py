"""What a policy may see, made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plimsoll.core.ports import BucketCounts, EngineReading
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.sim.policies import registry
from plimsoll.sim.policies.base import Observation, PolicyContext, SimulatedPolicy
from tests.sim import sim_harness

SLO = Slo(0.95, ttft_s=3.0, tpot_s=0.1)
SERVE = PolicyContext({Role.SERVE: (1, 8)}, sim_harness.make_plant(), SLO)
BOTH = PolicyContext({Role.PREFILL: (1, 8), Role.DECODE: (1, 8)}, sim_harness.make_plant(), SLO)
EDGES = (1.0, 2.0, 4.0, float("inf"))


def engine_reading(
    pod: str, running: float | None = 0.0, waiting: float | None = 0.0, kv: float | None = 0.0
) -> EngineReading:
    return EngineReading(pod, 0.0, pod, running=running, waiting=waiting, kv_used=kv)


def engine_readings(loads: Sequence[tuple[float, float]]) -> tuple[EngineReading, ...]:
    """Running and waiting of each."""
    return tuple(engine_reading(f"e{number}", *load) for number, load in enumerate(loads))


def buckets(*counts: float) -> BucketCounts:
    return BucketCounts(EDGES, tuple(counts), 0.0)


def observe(now_s: float, ordered: int, loads: Sequence[tuple[float, float]], starting: int = 0) -> Observation:
    """At a serve tier."""
    return Observation(
        now_s,
        {Role.SERVE: ordered},
        engine_readings={Role.SERVE: engine_readings(loads)},
        ready={Role.SERVE: len(loads)},
        starting={Role.SERVE: starting},
    )


def observe_readings(now_s: float, ordered: int, readings: Sequence[EngineReading], starting: int = 0) -> Observation:
    return Observation(
        now_s,
        {Role.SERVE: ordered},
        engine_readings={Role.SERVE: tuple(readings)},
        ready={Role.SERVE: len(readings)},
        starting={Role.SERVE: starting},
    )


def policy(text: str, scene: PolicyContext = SERVE) -> SimulatedPolicy:
    return registry.parse(text, scene)


def drive_policy(
    policy: SimulatedPolicy, load: Mapping[int, float], until_s: int, per_engine: float = 1.0
) -> list[int]:
    """Each second's order for so much at the tier (from these seconds on) where replicas are ready at once."""
    ordered, found, now = 1, [], 0.0
    for second in range(until_s):
        now = load.get(second, now)
        shown = observe(second, ordered, [(now / ordered * per_engine, 0.0)] * ordered)
        ordered = policy.desired_replicas(shown).get(Role.SERVE, ordered)
        found.append(ordered)
    return found
