"""Laws that hold whatever the load is: nothing is lost or made up, and no engine rests beside work."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from bench.trust import invariants
from plimsoll.core.types import Role
from plimsoll.sim import profile
from plimsoll.sim.attempt import AttemptOutcome
from plimsoll.sim.policies.base import StaticPolicy
from plimsoll.sim.profile import HardwareProfile
from tests.sim import sim_harness

PROFILE = profile.load("h200-8b")


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "own",
    [PROFILE, replace(PROFILE, kv_tokens=60_000, block_size=128), replace(PROFILE, max_num_seqs=8, budget=256)],
    ids=["roomy", "short of blocks", "few slots, small chunks"],
)
def test_engine_tokens_and_blocks_balance(own: HardwareProfile, seed: int, separate: bool) -> None:
    sent = invariants.poisson_load(300, 25.0, seed)
    left = invariants.leaked(sent, invariants.replay(own, sent, separate))
    assert {**left, "preemptions": 0} == dict.fromkeys(left, 0)
    if own.kv_tokens == 60_000:
        assert left["preemptions"] > 0


@pytest.mark.parametrize("separate", [False, True])
def test_leaks_lost_or_invented_request_is_detected(separate: bool) -> None:
    sent = invariants.poisson_load(20, 25.0, 1)
    engines = invariants.replay(PROFILE, sent[:-1], separate)
    lost, made_up = invariants.leaked(sent, engines), invariants.leaked(sent[:-2], engines)
    assert lost["prompt tokens"] == len(engines) * sent[-1].prompt
    assert made_up["prompt tokens"] == -len(engines) * sent[-2].prompt
    assert lost["output tokens"] == sent[-1].output + separate
    assert made_up["output tokens"] == -sent[-2].output - separate


def test_engine_mean_concurrency_obeys_littles_law() -> None:
    observed, law = invariants.littles_law(PROFILE, invariants.poisson_load(1200, 18.0, 4), 0.02)
    assert observed == pytest.approx(law, rel=0.005)


@pytest.mark.parametrize("seed", range(4))
def test_engine_burst_takes_exactly_its_work(seed: int) -> None:
    random = Random(seed)
    lengths = [(random.randint(2, 4000), random.randint(1, 300)) for _ in range(120)]
    own = replace(invariants.without_nonlinearities(PROFILE), kv_tokens=10**9, budget=10**9)
    assert invariants.idle_share(own, lengths) == pytest.approx(0.0, abs=1e-9)


def test_engine_burst_short_of_blocks_takes_more_than_its_work() -> None:
    lengths = [(2000, 300)] * 60
    own = replace(invariants.without_nonlinearities(PROFILE), kv_tokens=70_000)
    assert invariants.idle_share(own, lengths) > 0.001  # prompts read twice


@pytest.mark.parametrize("kills", [(), ((Role.SERVE, 5.0), (Role.SERVE, 9.0))])
@pytest.mark.parametrize("tail_s", [600.0, 0.5])
def test_simulate_every_request_ends_exactly_once(kills: tuple[tuple[Role, float], ...], tail_s: float) -> None:
    requests = sim_harness.PoissonLoad(400, 30.0, seed=8).requests_drawn()
    done = sim_harness.simulate(
        requests,
        StaticPolicy({Role.SERVE: 2}, runs_operator=False),
        initial={Role.SERVE: 2},
        kills=kills,
        tail_s=tail_s,
    )
    assert sorted(one.id for one in done.attempts) == list(range(1, 401))
    ends = Counter(one.outcome for one in done.attempts)
    assert None not in ends
    assert (ends[AttemptOutcome.FAILED] > 0) == bool(kills)
    assert ends[AttemptOutcome.UNFINISHED] == 0 if tail_s > 1.0 else ends[AttemptOutcome.UNFINISHED] > 0 or kills
    for one in done.attempts:
        if one.outcome is AttemptOutcome.OK:
            assert one.first_token_s is not None
            assert one.end_s is not None
            assert one.trace_request.at_s < one.first_token_s <= one.end_s


def test_simulate_memory_does_not_grow_with_completed_requests() -> None:
    invariants.peak_bytes(50)  # what is loaded once
    few, many = 300, 1200
    more = invariants.peak_bytes(many) - invariants.peak_bytes(few)
    assert more / (many - few) < 100.0  # bytes: a request that was kept would take several hundred
