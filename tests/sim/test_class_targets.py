"""Targets of a class stricter than its service's: one replica meets the service's, and two those of the class."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from plimsoll.core.types import Role
from plimsoll.sim.attempt import Attempt, AttemptOutcome
from plimsoll.sim.policies.base import StaticPolicy
from tests.sim.sim_harness import FinishedRun, PoissonLoad, make_plant, serve_manifest, simulate

SERVICE = serve_manifest(
    admission={"classes": [{"name": "chat", "slo": {"ttft": "500ms", "tpot": "15ms"}}, {"name": "default"}]}
)
SLOS = {one.name: one.slo for one in SERVICE.classes}
SETTLED_S = 100.0  # until the replicas that the first load needs have started


def run(seed: int, replicas: int | None = None) -> FinishedRun:
    """Four minutes of 16 requests/s, three in ten of them in the class `chat`. replicas: a constant count."""
    random = Random(seed)
    requests = [
        replace(one, request_class="chat" if random.random() < 0.3 else "default")
        for one in PoissonLoad(3840, 16.0, seed=seed).requests_drawn()
    ]
    policy = None if replicas is None else StaticPolicy({Role.SERVE: replicas}, runs_operator=True)
    return simulate(requests, policy, of=SERVICE, hardware=make_plant(start_s=30.0), seed=seed)


def share_within(finished: FinishedRun, name: str) -> float:
    """The share of all requests of a class within its targets, rejected ones included."""
    slo = SLOS[name]

    def is_within(one: Attempt) -> bool:
        deadlines = slo.deadlines(one.trace_request.prompt_tokens)
        paced = (one.tpot_s or 0.0) <= deadlines.tpot_s
        return one.outcome is AttemptOutcome.OK and (one.ttft_s or 0.0) <= deadlines.ttft_s and paced

    found = [
        one
        for one in finished.attempts
        if one.trace_request.request_class == name and one.trace_request.at_s > SETTLED_S
    ]
    return sum(map(is_within, found)) / len(found)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_fleet_sized_with_class_targets_meets_them(seed: int) -> None:
    sized, single = run(seed), run(seed, replicas=1)
    assert share_within(sized, "chat") >= 0.95
    assert share_within(sized, "default") >= 0.95
    assert max(desired for _, _, desired, *_ in sized.world.log.replicas) >= 2
    assert share_within(single, "chat") < 0.95
    assert share_within(single, "default") >= 0.95
