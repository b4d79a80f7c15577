"""Followers over the light engine's own core, on loads small enough to know what must come out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from e2e.demo import reactive_baseline as fo
from e2e.demo.figures import Targets
from e2e.demo.plant import ReplicaKind, SimulatedRequest, TierSimulation, load_profile, replay
from tests.demo.demo_records import make_request

PROFILE = load_profile("h200-70b-capped")
TARGETS = Targets(3.0, 0.06)
KIND = ReplicaKind(PROFILE, 1.0, 32, 128, (20.0, 20.0))
KINDS = {"prefill": KIND, "decode": KIND}
BOUNDS = {"prefill": fo.ReplicaBounds(1, 6), "decode": fo.ReplicaBounds(1, 4)}
SCENE = fo.BaselineContext(KINDS, BOUNDS, 60.0, None, 60.0)
BASE_STEP_S = KIND.profile.coefficients.base + KIND.profile.coefficients.anypre


def job(at_s: float, tokens: int = 2000, output: int = 1) -> SimulatedRequest:
    return SimulatedRequest(at_s, tokens, output, 0.25, 1.0)


def test_tier_idle_replica_takes_profile_time() -> None:
    tier, one = TierSimulation(KIND, 1, None, 3.0, 1), job(5.0)
    replay(tier, [one], 10.0, lambda _: 1, None)
    c = PROFILE.coefficients
    law_s = BASE_STEP_S + c.pretok * 2000 + c.preattn * 2000**2 / 2
    assert one.first_token_s is not None
    assert one.first_token_s - 5.0 == pytest.approx(law_s, rel=0.2)  # spread and noise
    assert tier.paid_s(10.0) == 10.0


def test_tier_requests_wait_for_starting_replica() -> None:
    tier, jobs = TierSimulation(KIND, 0, None, 3.0, 1), [job(1.0)]
    replay(tier, jobs, 40.0, lambda now: 1 if now >= 2 else 0, None)
    assert jobs[0].first_token_s is not None
    assert 22.0 <= jobs[0].first_token_s < 24.0
    assert tier.paid_s(40.0) == pytest.approx(38.0)


def test_tier_cap_rejects_only_what_waited_too_long() -> None:
    jobs = [SimulatedRequest(1.0, 2000, 1, 0.3, 1.0) for _ in range(30)]
    capped, free = TierSimulation(KIND, 1, 1.0, 1.5, 1), TierSimulation(KIND, 1, None, 1.5, 1)
    mine = [
        SimulatedRequest(*(getattr(one, name) for name in ("at_s", "prompt_tokens", "output_tokens", "work_s", "cost")))
        for one in jobs
    ]
    replay(capped, jobs, 20.0, lambda _: 1, None, tick_s=0.1)
    replay(free, mine, 20.0, lambda _: 1, None, tick_s=0.1)
    served = [one.first_token_s - 1.0 for one in jobs if one.first_token_s is not None]
    assert 3 <= len(served) < 30
    assert max(served) < 2.2
    assert all(one.first_token_s is not None for one in mine)


def test_tier_scale_down_drains_and_removes_starting_first() -> None:
    tier, long = TierSimulation(KIND, 2, None, 3.0, 1), job(1.0, output=500)
    replay(tier, [long], 30.0, lambda now: 3 if now < 4 else 1, None)
    assert long.first_token_s is not None
    assert long.last_token_s is not None
    gone = [one.gone_s for one in tier.replicas]
    assert gone.count(None) == 1
    assert gone[2] == 4.0


def test_tier_killed_replica_loses_requests_and_is_replaced() -> None:
    tier, jobs = TierSimulation(KIND, 1, None, 3.0, 1), [job(1.0, output=500), job(9.0)]
    replay(tier, jobs, 40.0, lambda _: 1, kill_s=3.0)
    assert jobs[0].first_token_s is None
    assert jobs[1].first_token_s is not None
    assert jobs[1].first_token_s > 23.0
    assert len(tier.replicas) == 2


def test_baseline_orders_for_window_and_holds() -> None:
    work = [job(t / 2) for t in range(120)]  # 0.5 GPU-seconds a second for 60 s
    follower = fo.ReactiveScaler(fo.Setting(0.25, 1, 30.0, 10.0, None), fo.ReplicaBounds(1, 9), work)
    assert [follower.desired(t) for t in (30.0, 59.0, 80.0, 101.0)] == [3, 3, 3, 1]
    assert fo.ReactiveScaler(fo.Setting(0.01, 0, 0, 10, None), fo.ReplicaBounds(1, 4), work).desired(30.0) == 4


def test_baseline_learns_output_length_only_as_generated() -> None:
    requests = fo.tier_jobs([make_request(10.0, prompt_tokens=2000, output_tokens_asked=500)], SCENE)["decode"]
    work = [one for one in requests if one]
    follower = fo.ReactiveScaler(fo.Setting(0.01, 0, 0.0, 10.0, None), fo.ReplicaBounds(1, 9), work)
    assert 9.0 < work[0].known_s < 13.0
    assert [follower.desired(t) for t in (15.0, 25.0)] == [1, 5]


def test_baseline_more_replicas_raise_attainment_over_both_tiers() -> None:
    requests = [make_request(0.15 * n, prompt_tokens=2500, output_tokens_asked=40) for n in range(300)]
    trace_requests = fo.tier_jobs(requests, SCENE)
    cheap, rich = (
        fo.run_setting("prefill", fo.Setting(m, s, 30, 10, None), trace_requests["prefill"], SCENE, TARGETS)
        for m, s in ((0.95, 0), (0.4, 2))
    )
    decode = fo.run_setting("decode", fo.Setting(0.5, 0, 30, 10, None), trace_requests["decode"], SCENE, TARGETS)
    found = fo.combine_settings([cheap, rich], [decode], [2500] * 300, TARGETS)
    assert rich.paid_s > cheap.paid_s
    assert found[1].attainment > found[0].attainment
    assert found[0].paid_s == pytest.approx(cheap.paid_s + decode.paid_s)
    assert fo.best_within_cost(found, found[0].paid_s) == found[0]
    assert fo.best_within_cost(found, 1e9) == found[1]
    assert fo.best_within_cost(found, 1.0) is None
    assert fo.pareto_front(found) == found


def test_baseline_short_prompts_are_prefilled_locally() -> None:
    requests = [make_request(0.0, prompt_tokens=100), make_request(1.0, prompt_tokens=128)]
    trace_requests = fo.tier_jobs(requests, SCENE)
    assert [one is None for one in trace_requests["prefill"]] == [True, False]
    assert [one.remote for one in trace_requests["decode"] if one] == [False, True]
    result = fo.run_setting("prefill", fo.Setting(0.5, 0, 0, 10, None), trace_requests["prefill"], SCENE, TARGETS)
    assert result.first_s[0] == 0.0
    assert result.tpot_s[0] == 0.0


def test_baseline_request_without_response_is_missed() -> None:
    result = fo.TierResult(fo.Setting(0.5, 0, 0, 10, None), np.array([0.1, math.inf]), np.array([0.0, 0.0]), 1.0)
    [pair] = fo.combine_settings([result], [result], [10, 10], TARGETS)
    assert pair.attainment == 0.5


def test_baseline_grid_has_caps_only_with_admission() -> None:
    open_, gated = fo.setting_grid(False), fo.setting_grid(True)
    assert all(one.cap is None for settings in open_.values() for one in settings)
    assert all(one.cap is not None for settings in gated.values() for one in settings)
    assert len(open_["prefill"]) * len(open_["decode"]) >= 100
