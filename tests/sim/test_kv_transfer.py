"""Prompts over a slow fabric, in virtual time: counters, operator, gates and engines as in a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.core.autoscaling import admission_publisher
from plimsoll.core.engine_model.kv_transfer import TransferStats
from plimsoll.core.types import Unavailable
from plimsoll.sim.attempt import Attempt, AttemptOutcome
from tests.sim import sim_harness

RDMA = 1e10  # bytes a second: 100 Gbit/s pays for an 8B; a twentieth of it is what TCP was measured to carry
TCP = RDMA / 20
TTFT_S, TPOT_S = 1.0, 0.04


def run(bytes_per_s: float, rate_per_s: float = 6.0) -> sim_harness.FinishedRun:
    tiers = {name: {"minReplicas": 1, "maxReplicas": 4} for name in ("prefill", "decode")}
    requests = sim_harness.PoissonLoad(int(120 * rate_per_s), rate_per_s, 2048.0, 256.0).requests_drawn()
    hardware = sim_harness.make_plant(replace(sim_harness.H200, block_size=128), bytes_per_s=bytes_per_s)
    return sim_harness.simulate(
        requests, of=sim_harness.serve_manifest(tiers=tiers, slo={"ttft": "1s", "tpot": "40ms"}), hardware=hardware
    )


def attainment(done: sim_harness.FinishedRun) -> float:
    """Share of all requests that were in promise."""
    ok = [attempt for attempt in done.attempts if attempt.outcome is AttemptOutcome.OK]
    return sum((v.ttft_s or 0.0) <= TTFT_S and (v.tpot_s or 0.0) <= TPOT_S for v in ok) / len(done.attempts)


def local_prefills(done: sim_harness.FinishedRun) -> list[Attempt]:
    return [
        attempt for attempt in done.attempts if attempt.outcome is AttemptOutcome.OK and not attempt.prefill_address
    ]


@pytest.fixture
def unknown_transit(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(moved: TransferStats) -> Unavailable:
        return Unavailable("nobody looks at the counters")

    monkeypatch.setattr(admission_publisher, "transit_s", unknown)


def test_slow_kv_fabric_disables_remote_prefill(
    request: pytest.FixtureRequest,
) -> None:
    measured = run(TCP)
    request.getfixturevalue("unknown_transit")
    always = run(TCP)
    assert not local_prefills(always)
    read = local_prefills(measured)
    assert len(read) > 100
    for attempt in read:
        assert attempt.prefill_sequence is None
        assert attempt.sequence is not None
        assert attempt.sequence.transferred_tokens == 0
    assert attainment(always) < 0.9
    assert attainment(measured) > 0.95


def test_fast_kv_fabric_keeps_remote_prefill(request: pytest.FixtureRequest) -> None:
    measured = run(RDMA)
    admission = measured.world.gateways[0].admission
    assert admission is not None
    assert admission.cost_model.kv_transfer_token_s == pytest.approx(
        sim_harness.H200.kv_bytes_per_token / RDMA, rel=0.3
    )
    request.getfixturevalue("unknown_transit")
    always = run(RDMA)
    assert [(v.id, v.address, v.prefill_address) for v in measured.attempts] == [
        (v.id, v.address, v.prefill_address) for v in always.attempts
    ]
    assert all(attempt.prefill_address for attempt in measured.attempts if attempt.trace_request.prompt_tokens >= 128)
