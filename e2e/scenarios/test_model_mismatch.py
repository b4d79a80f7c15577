"""Engines that differ from the model by which their service is sized: the fleet settles at a size that keeps the SLO.

A constant load after a start from the prior of the data sheet. The smallest constant fleet is the simulator's, with the
engines' true parameters and the same arrivals.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from e2e.lib import stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster
from e2e.lib.load import Arrival, Load, OpenLoop, poisson, unique_text
from e2e.lib.mismatched_engines import SLO_SHARE, MismatchedEngines
from e2e.lib.request_log import RequestRecord
from e2e.lib.service import Service
from e2e.lib.simulated_fleet import desired_replicas, format_records, unexpected_failures
from e2e.lib.wait import sleep
from plimsoll.sim.attempt import TraceRequest

LOAD_S: Final = 420.0
PROMPT_TOKENS, OUTPUT_TOKENS = 700, 40
TOKEN_BYTES: Final = 4  # of a light engine's token
WINDOW_S: Final = 60.0
SETTLE_S: Final = 120.0  # after the first full fleet: late first tokens are counted by the minute
MAX_REVERSALS: Final = 1

# With what `explain` and the condition say.
CASES = (
    (MismatchedEngines("slow", 6.5, 1.5, scale=1.4), "steps of the engines take 1."),
    (MismatchedEngines("host-350ms", 8.0, 0.9, host_s=0.35), "first tokens take "),
)


@dataclass(frozen=True)
class FleetSample:
    """Replicas at one time, s since the epoch."""

    at_s: float
    desired: int
    ready: int


def _arrivals(mismatch: MismatchedEngines) -> list[Arrival]:
    started = f"{mismatch.name} {time.time()}"
    size = PROMPT_TOKENS * TOKEN_BYTES

    def prompt(n: int) -> Prompt:
        return Prompt(unique_text(PROMPT_TOKENS, f"{started} {n}")[:size], OUTPUT_TOKENS)

    return list(poisson(mismatch.rate, LOAD_S, prompt, seed=7).arrivals)


def _trace(arrivals: Sequence[Arrival]) -> list[TraceRequest]:
    return [TraceRequest(one.at_s, PROMPT_TOKENS, OUTPUT_TOKENS) for one in arrivals]


def _observe(service: Service) -> list[FleetSample]:
    """The fleet once a second while the load lasts."""
    samples, end_s = [], time.time() + LOAD_S
    while time.time() < end_s:
        samples.append(FleetSample(time.time(), desired_replicas(service), len(service.ready_pods("serve"))))
        sleep(1.0)
    return samples


def _window_shares(mismatch: MismatchedEngines, records: Sequence[RequestRecord], from_s: float) -> list[float]:
    """The share of the offered requests within the SLO, by window; what is left at the end belongs to the last."""
    windows: dict[int, list[RequestRecord]] = {}
    last = int((max(one.sent_at for one in records) - from_s) // WINDOW_S) - 1
    for one in records:
        if one.sent_at >= from_s:
            windows.setdefault(min(last, int((one.sent_at - from_s) // WINDOW_S)), []).append(one)
    return [sum(map(mismatch.is_within_slo, windows[n])) / len(windows[n]) for n in sorted(windows)]


def _reversals(counts: Sequence[int]) -> int:
    """How often the desired count changes in the opposite direction to its previous change."""
    steps = [after - before for before, after in itertools.pairwise(counts) if after != before]
    return sum(before * after < 0 for before, after in itertools.pairwise(steps))


def _changes(samples: Sequence[FleetSample]) -> list[FleetSample]:
    """The first sample, and each whose desired count differs from that before it."""
    return [samples[0], *(after for before, after in itertools.pairwise(samples) if after.desired != before.desired)]


@pytest.mark.parametrize(("mismatch", "evidence"), CASES, ids=["slow", "host-350ms"])
def test_fleet_of_wrong_model_keeps_slo(
    mismatch: MismatchedEngines, evidence: str, cluster: Cluster, namespace: str
) -> None:
    arrivals = _arrivals(mismatch)
    least = mismatch.smallest_fleet(_trace(arrivals))
    cluster.apply(*mismatch.objects(), namespace=namespace)
    service = Service(cluster, namespace, mismatch.name, stack.GATEWAY_URL)
    service.wait_ready()
    plimsoll = str(Path(sys.executable).with_name("plimsoll"))
    with Load(service.target, OpenLoop(arrivals), source=mismatch.name) as load:
        samples = _observe(service)
        explained = cluster.run(plimsoll, "explain", service.name, "-n", namespace)
        condition = service.condition("ModelMismatch")
    cluster.delete("inferenceservices", service.name, namespace=namespace)

    start_s, records = samples[0].at_s, load.ledger.records
    changes = [(f"{one.at_s - start_s:.0f} s", one.desired) for one in _changes(samples)]
    print(f"{least} constant engines keep the SLO; desired {changes}; {load.ledger.summary()}\n{explained}")
    full = [one.at_s for one in samples if samples[0].desired < one.desired <= one.ready]
    assert full, f"never all engines: {changes}"
    settled_s = full[0] + SETTLE_S
    shares = _window_shares(mismatch, records, settled_s)
    settled = [one.desired for one in samples if one.at_s >= settled_s]
    print(f"full after {full[0] - start_s:.0f} s; offered within the SLO, by settled minute {shares}; {condition}")
    lost = unexpected_failures(records)
    assert not lost, format_records(lost)
    assert min(shares) >= SLO_SHARE, shares
    assert max(settled) <= least + 1
    assert _reversals(settled) <= MAX_REVERSALS
    assert evidence in explained
    assert evidence in condition.get("message", ""), condition
