"""The plant against recorded requests: the runs in which it is near, and how the comparison itself counts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bench.trust import distserve_replay, pd_replay, recorded_runs, sweep_replay
from bench.trust.check import SimulatorCheck
from bench.trust.engine_driver import RecordedRequest, ReplayedRequest
from bench.trust.recorded_runs import RequestRecord, SweepRun

RUNS = {one.name: one for one in recorded_runs.load_sweeps()}
PAIRS = recorded_runs.load_pairs()


@pytest.mark.parametrize("name", ["8b 4/s", "8b 8/s", "8b 15/s", "8b 18/s", "8b 21/s", "long 1024", "earlier 512"])
def test_recorded_run_replay_matches_slo_scales_and_tpot(name: str) -> None:
    own = [one for one in sweep_replay.run_checks(sweep_replay.replay_sweep(RUNS[name])) if one.bound is not None]
    assert len(own) == 3
    assert [one.name for one in own if not one.holds] == []


@pytest.mark.parametrize("kind", ["agg", "pd128"])
def test_recorded_pair_replay_matches_ttft_and_tpot(kind: str) -> None:
    observed = PAIRS[kind, "prefill", "6"]
    found = [one for one in pd_replay.checks({(kind, "prefill", "6"): observed}) if one.name[:4] in ("TTFT", "TPOT")]
    assert len(found) == 4
    assert [one.name for one in found if not one.holds] == []


def test_records_are_complete() -> None:
    assert sum(len(one.requests) for one in RUNS.values()) > 5000
    assert {kind for kind, _, _ in PAIRS} == {"agg", "pd", "pd128"}
    for one in RUNS.values():
        times = [each.request.at_s for each in one.requests]
        assert times == sorted(times)
        assert 0 < one.measured_requests <= len(one.requests)
    assert len(recorded_runs.load_distserve()) == 14


def test_replay_truncated_request_misses_on_both_sides() -> None:
    sweep = SweepRun("x", "8b", 8192, 1.0, 2, 1.0, 0.1, ())
    observed = [
        RequestRecord(RecordedRequest(0.0, 10, 100), 0.1, math.nan, False),
        RequestRecord(RecordedRequest(0.0, 10, 1), 0.1, math.nan, True),
    ]
    one = sweep_replay.SweepReplay(
        sweep, observed, [ReplayedRequest(0.1, 0.2), ReplayedRequest(0.1, 0.1)], [False, True]
    )
    assert one.attained(1.0) == (50.0, 50.0)


def test_replay_ten_slo_scales_detect_slow_tpot() -> None:
    sweep = RUNS["8b 15/s"]
    slow = replace(sweep, requests=tuple(replace(one, tpot_s=1.15 * one.tpot_s) for one in sweep.requests))
    one = sweep_replay.replay_sweep(slow)
    assert one.attained(2.0) == (100.0, 100.0)
    assert (
        max(abs(ours - real) for real, ours in map(one.attained, sweep_replay.SLO_SCALES))
        > sweep_replay.MAX_SWEEP_POINTS
    )


def test_crossing_interpolates_goodput_knee() -> None:
    assert sweep_replay.crossing_rate([(10.0, 100.0), (20.0, 100.0), (30.0, 90.0)]) == 25.0
    with pytest.raises(ValueError, match="does not fall"):
        sweep_replay.crossing_rate([(10.0, 100.0), (20.0, 96.0)])


def test_replay_old_schedule_runs_prompts_first() -> None:
    own = distserve_replay.distserve_profile("vllm", 1)
    c = own.coefficients
    observed = [
        RequestRecord(RecordedRequest(0.0, 1000, 50), 0.1, 0.05, True),
        RequestRecord(RecordedRequest(0.3, 2000, 1), 0.1, 0.05, True),
    ]
    first, second = distserve_replay.replay_records("vllm", observed)
    alone_s = c.base + c.anypre + 2000 * c.pretok + 2_000_000 * c.preattn
    assert alone_s <= second.first_s <= alone_s + c.base + c.dec + c.ctx * 1050
    [undisturbed] = distserve_replay.replay_records("vllm", observed[:1])
    assert first.last_s == pytest.approx(undisturbed.last_s + alone_s, abs=1e-3)


def test_check_bound_is_two_sided() -> None:
    assert SimulatorCheck("g", "n", -2.0, 2.0).holds
    assert not SimulatorCheck("g", "n", -2.1, 2.0).holds
    assert SimulatorCheck("g", "n", 99.0, None).holds
