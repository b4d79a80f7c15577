"""What a policy may see, made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import Buckets, EngineReading
from plimsoll.core.slo import Slo
from plimsoll.sim.policies import registry
from plimsoll.sim.policies.base import Look, Policy, Scene
from tests.sim import lab

SLO = Slo(0.95, ttft_s=3.0, tpot_s=0.1)
SERVE = Scene({Role.SERVE: (1, 8)}, lab.plant(), SLO)
BOTH = Scene({Role.PREFILL: (1, 8), Role.DECODE: (1, 8)}, lab.plant(), SLO)
EDGES = (1.0, 2.0, 4.0, float("inf"))


def engine(pod: str, running: float | None = 0.0, waiting: float | None = 0.0, kv: float | None = 0.0) -> EngineReading:
    return EngineReading(pod, 0.0, pod, running=running, waiting=waiting, kv_used=kv)


def engines(loads: Sequence[tuple[float, float]]) -> tuple[EngineReading, ...]:
    """Running and waiting of each."""
    return tuple(engine(f"e{number}", *load) for number, load in enumerate(loads))


def buckets(*counts: float) -> Buckets:
    return Buckets(EDGES, tuple(counts), 0.0)


def look(now_s: float, ordered: int, loads: Sequence[tuple[float, float]], starting: int = 0) -> Look:
    """At a serve tier."""
    return Look(
        now_s,
        {Role.SERVE: ordered},
        engines={Role.SERVE: engines(loads)},
        ready={Role.SERVE: len(loads)},
        starting={Role.SERVE: starting},
    )


def seen(now_s: float, ordered: int, readings: Sequence[EngineReading], starting: int = 0) -> Look:
    return Look(
        now_s,
        {Role.SERVE: ordered},
        engines={Role.SERVE: tuple(readings)},
        ready={Role.SERVE: len(readings)},
        starting={Role.SERVE: starting},
    )


def policy(text: str, scene: Scene = SERVE) -> Policy:
    return registry.parse(text, scene)


def follow(policy: Policy, load: Mapping[int, float], until_s: int, per_engine: float = 1.0) -> list[int]:
    """Each second's order for so much at the tier (from these seconds on) where replicas are ready at once."""
    ordered, found, now = 1, [], 0.0
    for second in range(until_s):
        now = load.get(second, now)
        shown = look(second, ordered, [(now / ordered * per_engine, 0.0)] * ordered)
        ordered = policy.wanted(shown).get(Role.SERVE, ordered)
        found.append(ordered)
    return found
