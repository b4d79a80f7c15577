"""Prompts over a slow fabric, in virtual time: counters, operator, gates and engines as in a cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.core.autoscaler import gatekeeper
from plimsoll.core.forecast import Unknown
from plimsoll.core.transfer import Moved
from plimsoll.sim.visit import End, Visit
from tests.sim import lab

RDMA = 1e10  # bytes a second: 100 Gbit/s pays for an 8B; a twentieth of it is what TCP was measured to carry
TCP = RDMA / 20
TTFT_S, TPOT_S = 1.0, 0.04


def run(bytes_per_s: float, rate_per_s: float = 6.0) -> lab.Done:
    tiers = {name: {"minReplicas": 1, "maxReplicas": 4} for name in ("prefill", "decode")}
    asked = lab.Load(int(120 * rate_per_s), rate_per_s, 2048.0, 256.0).asked()
    hardware = lab.plant(replace(lab.H200, block_size=128), bytes_per_s=bytes_per_s)
    return lab.simulate(asked, of=lab.service(tiers=tiers, slo={"ttft": "1s", "tpot": "40ms"}), hardware=hardware)


def attainment(done: lab.Done) -> float:
    """Share of all requests that were in promise."""
    ok = [visit for visit in done.visits if visit.end is End.OK]
    return sum((v.ttft_s or 0.0) <= TTFT_S and (v.tpot_s or 0.0) <= TPOT_S for v in ok) / len(done.visits)


def local_prefills(done: lab.Done) -> list[Visit]:
    return [visit for visit in done.visits if visit.end is End.OK and not visit.prefill]


@pytest.fixture
def nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(moved: Moved) -> Unknown:
        return Unknown("nobody looks at the counters")

    monkeypatch.setattr(gatekeeper, "travel_s", unknown)


def test_slow_kv_fabric_disables_remote_prefill(
    request: pytest.FixtureRequest,
) -> None:
    measured = run(TCP)
    request.getfixturevalue("nobody_looks")
    always = run(TCP)
    assert not local_prefills(always)
    read = local_prefills(measured)
    assert len(read) > 100
    for visit in read:
        assert visit.leg is None
        assert visit.job is not None
        assert visit.job.moved == 0
    assert attainment(always) < 0.9
    assert attainment(measured) > 0.95


def test_fast_kv_fabric_keeps_remote_prefill(request: pytest.FixtureRequest) -> None:
    measured = run(RDMA)
    told = measured.world.gateways[0].told
    assert told is not None
    assert told.limits is not None
    assert told.limits.move_token_s == pytest.approx(lab.H200.kv_bytes_per_token / RDMA, rel=0.3)
    request.getfixturevalue("nobody_looks")
    always = run(RDMA)
    assert [(v.id, v.address, v.prefill) for v in measured.visits] == [
        (v.id, v.address, v.prefill) for v in always.visits
    ]
    assert all(visit.prefill for visit in measured.visits if visit.asked.prompt_tokens >= 128)
