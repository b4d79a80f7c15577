"""A policy of the scoreboard on what was read of a cluster: a line of JSON in, a line of JSON out.

Problem: `plimsoll.sim.policies` needs the operator's packages, and a machine with GPUs may lack them.
Idea: this file needs nothing but `plimsoll`, so it runs in the files of the operator's image.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, cast

from plimsoll.adapters import engine_metrics
from plimsoll.core.ports import EngineReading
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.engines import launched
from plimsoll.sim.plant import Plant
from plimsoll.sim.policies import registry
from plimsoll.sim.policies.base import Observation, PolicyContext, SimulatedPolicy


def make_policy(text: str, low: int, high: int, slo: Mapping[str, float]) -> SimulatedPolicy:
    """The policy `text` of one tier with these bounds. Raises BadInput.

    slo: arguments of `Slo`. The plant is unknown here; policies that read metrics do not look at it.
    """
    return registry.parse(text, PolicyContext({Role.SERVE: (low, high)}, cast(Plant, None), Slo(**slo)))


def decide(policy: SimulatedPolicy, seen: Mapping[str, Any]) -> dict[str, Any]:
    """Replicas that the policy orders now, None for no change, and the running and waiting requests of each engine.

    seen: `now_s`, the replicas `desired`, `ready` and `starting`, and by ready pod its `pages` of metrics.
    """
    readings = tuple(_reading(page, pod, seen["now_s"]) for pod, page in seen["pages"].items())
    observation = Observation(
        seen["now_s"],
        {Role.SERVE: seen["desired"]},
        engine_readings={Role.SERVE: readings},
        ready={Role.SERVE: seen["ready"]},
        starting={Role.SERVE: seen["starting"]},
    )
    replicas = policy.desired_replicas(observation).get(Role.SERVE)
    return {"replicas": replicas, "engines": {one.pod: [one.running, one.waiting] for one in readings}}


def _reading(page: str, pod: str, at_s: float) -> EngineReading:
    """What a page of metrics says; nothing if it is none."""
    try:
        return engine_metrics.parse_metrics(page.encode(), pod, at_s, launched.METRICS)
    except ValueError:
        return EngineReading(pod, at_s, pod)


def main(text: str, low: str, high: str, slo: str) -> None:
    """Answers each line of the standard input, after an empty object once the policy is there."""
    policy = make_policy(text, int(low), int(high), json.loads(slo))
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(decide(policy, json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
