"""Prefill and decode are sized apart: what only one of them is asked for moves only that one, up and down.

Two pairs side by side, to save time: one gets long prompts and short answers, the other short prompts and long answers.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from e2e.lib import simulated_fleet, stack
from e2e.lib.kube import Cluster
from e2e.lib.load import Load, poisson
from e2e.lib.request_log import RequestLog
from e2e.lib.service import Service
from e2e.lib.wait import sleep, wait_until

MAX_REPLICAS = 4
SLOTS = 8  # of an engine: two or three long answers a second fill it
SCALE_DOWN_TIMEOUT_S = 360.0  # twice a start on a busy machine, and begun anew whenever somebody is not heard
AT_THE_TOP_S = 15.0


@dataclass(frozen=True)
class Workload:
    """Requests that are work for one tier; so many a second are few, and so many are several replicas' work."""

    tier: str
    words: int
    tokens: int
    low: float
    high: float

    @property
    def name(self) -> str:
        return f"only-{self.tier}"

    @property
    def other(self) -> str:
        return {"prefill": "decode", "decode": "prefill"}[self.tier]


PROMPTS = Workload("prefill", 2500, 4, 0.3, 4.0)  # half a second of prefill each
ANSWERS = Workload("decode", 20, 60, 0.5, 7.0)  # two and a half seconds in a slot each


@dataclass(frozen=True)
class RunResult:
    """What became of the requests, and what the service said of every move."""

    ledger: RequestLog
    moves: list[str]


def _run(pair: Service, kind: Workload) -> RunResult:
    """Few requests, then many, then none."""
    prompts = simulated_fleet.prompts(kind.name, kind.words, kind.tokens)
    pair.wait_ready()
    simulated_fleet.wait_calibrated(pair, poisson(kind.low, 200, prompts, seed=1))
    with Load(pair.target, poisson(kind.high, 200, prompts, seed=2)) as load:
        wait_until(
            f"{kind.tier} grows",
            lambda: simulated_fleet.desired_replicas(pair, kind.tier) > 1,
            simulated_fleet.PUBLISH_TIMEOUT_S,
        )
        wait_until(
            "its new engines serve", lambda: len(pair.ready_pods(kind.tier)) > 1, simulated_fleet.PUBLISH_TIMEOUT_S
        )
        sleep(AT_THE_TOP_S)
    wait_until(
        "they are given back", lambda: simulated_fleet.desired_replicas(pair, kind.tier) == 1, SCALE_DOWN_TIMEOUT_S
    )
    return RunResult(load.ledger, [e["message"] for e in pair.events() if e["reason"] in ("ScaledUp", "ScaledDown")])


@pytest.fixture(scope="module")
def observed(cluster: Cluster, namespace: str) -> dict[str, Future[RunResult]]:
    """By the tier that is asked for more; both are over."""
    tiers = {tier: simulated_fleet.replica_bounds(1, MAX_REPLICAS) for tier in ("prefill", "decode")}
    kinds = (PROMPTS, ANSWERS)
    cluster.apply(
        *(simulated_fleet.fleet_manifest(kind.name, tiers, max_num_seqs=SLOTS) for kind in kinds), namespace=namespace
    )
    pairs = [Service(cluster, namespace, kind.name, stack.GATEWAY_URL) for kind in kinds]
    with ThreadPoolExecutor(len(kinds)) as pool:
        found = {kind.tier: pool.submit(_run, pair, kind) for pair, kind in zip(pairs, kinds, strict=True)}
    for pair in pairs:
        cluster.kubectl("delete", "plim", pair.name, "-n", namespace)
    return found


@pytest.mark.parametrize("kind", [PROMPTS, ANSWERS], ids=["prompts", "answers"])
def test_load_on_one_tier_scales_only_that_tier(kind: Workload, observed: dict[str, Future[RunResult]]) -> None:
    found = observed[kind.tier].result()
    ledger, moves = found.ledger, found.moves
    print(ledger.summary() + "\n" + "\n".join(moves))
    lost = simulated_fleet.unexpected_failures(ledger.records)
    assert not lost, simulated_fleet.format_records(lost)
    assert [said for said in moves if said.startswith(f"{kind.tier} 1 -> ")]
    assert not [said for said in moves if said.startswith(kind.other)]
