"""The fleet in virtual time: nobody is lost or counted twice, and the same seed gives the same bytes."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest

from plimsoll.core.admission.replica import MIN_RETRY_S
from plimsoll.core.ports import EngineReading
from plimsoll.core.types import Role
from plimsoll.sim.attempt import AttemptOutcome, TraceRequest
from plimsoll.sim.plant import min_drain_s
from plimsoll.sim.policies.base import Observation, PlimsollPolicy, StaticPolicy
from plimsoll.sim.result import request_row
from tests.sim import sim_harness

STEP = sim_harness.PoissonLoad(120, 4.0, seed=1).requests_drawn()
STEP += [
    replace(one, at_s=one.at_s + STEP[-1].at_s) for one in sim_harness.PoissonLoad(1200, 30.0, seed=2).requests_drawn()
]


class Course:
    """A policy by the clock: replicas from these moments on."""

    runs_operator = False
    initial = None

    def __init__(self, rates: dict[float, dict[Role, int]]) -> None:
        self._course = rates

    def on_arrival(self, requests: TraceRequest, now_s: float) -> None:
        """Of no interest."""

    def desired_replicas(self, observation: Observation) -> dict[Role, int]:
        return next((w for at_s, w in sorted(self._course.items(), reverse=True) if at_s <= observation.now_s), {})


@pytest.fixture(scope="module")
def autoscaled_run() -> sim_harness.FinishedRun:
    return sim_harness.simulate(STEP, gateways=2)


@pytest.fixture(scope="module")
def moved() -> sim_harness.FinishedRun:
    hardware = sim_harness.make_plant(replace(sim_harness.H200_CAPPED, max_num_seqs=32, block_size=128))
    requests = sim_harness.PoissonLoad(400, 5.0, 2500, 60, seed=3).requests_drawn()
    return sim_harness.simulate(requests, of=sim_harness.pd_manifest(), hardware=hardware)


def test_simulator_every_request_has_exactly_one_outcome(
    autoscaled_run: sim_harness.FinishedRun, moved: sim_harness.FinishedRun
) -> None:
    for done, count in ((autoscaled_run, len(STEP)), (moved, 400)):
        assert sorted(attempt.id for attempt in done.attempts) == list(range(1, count + 1))
        assert all(
            attempt.outcome is not None and attempt.outcome is not AttemptOutcome.UNFINISHED
            for attempt in done.attempts
        )
        assert done.world.in_flight == 0


def test_simulator_gateways_and_engines_are_empty_at_end(
    autoscaled_run: sim_harness.FinishedRun, moved: sim_harness.FinishedRun
) -> None:
    for done in (autoscaled_run, moved):
        for gateway in done.world.gateways:
            assert not gateway.queued
            assert not gateway.running
            assert gateway.admission is None or not gateway.admission.queued
            assert gateway.admission is None or all(
                not r.running for r in gateway.admission.controller.pool.replicas.values()
            )
        for tier in done.world.tiers.values():
            for replica in tier.replicas.values():
                assert replica.engine.idle
                assert replica.engine.kv_cache.free == replica.engine.kv_cache.total


def test_simulator_gateway_counters_match_outcomes(autoscaled_run: sim_harness.FinishedRun) -> None:
    readings = [gateway.reading() for gateway in autoscaled_run.world.gateways]
    ends = Counter(attempt.outcome for attempt in autoscaled_run.attempts)
    assert sum(one.arrived for one in readings) == len(STEP)
    assert sum(one.succeeded for one in readings) == ends[AttemptOutcome.OK]
    assert sum(sum(one.rejected.values()) for one in readings) == ends[AttemptOutcome.SHED]
    assert all(one.succeeded > 0.4 * ends[AttemptOutcome.OK] for one in readings)


def test_simulator_operator_scales_with_load_within_slo(autoscaled_run: sim_harness.FinishedRun) -> None:
    counts = [desired for _, role, desired, *_ in autoscaled_run.world.log.replicas if role is Role.SERVE]
    assert counts[0] == 1
    assert max(counts) > 1
    ok = [attempt for attempt in autoscaled_run.attempts if attempt.outcome is AttemptOutcome.OK]
    met = [attempt for attempt in ok if (attempt.ttft_s or 0) <= 2.0 and (attempt.tpot_s or 0) <= 0.05]
    assert len(met) >= 0.95 * len(ok)
    assert {attempt.reason for attempt in autoscaled_run.attempts if attempt.outcome is AttemptOutcome.SHED} <= {
        "overloaded"
    }


def test_simulator_disaggregated_requests_use_both_tiers(moved: sim_harness.FinishedRun) -> None:
    ok = [attempt for attempt in moved.attempts if attempt.outcome is AttemptOutcome.OK]
    assert len(ok) > 300
    for attempt in ok:
        assert attempt.address.startswith("decode")
        assert attempt.prefill_address.startswith("prefill")
        assert attempt.prefill_sequence is not None
        assert attempt.sequence is not None
        assert attempt.prefill_sequence.last_token_s is not None
        assert attempt.sequence.arrived_s > attempt.prefill_sequence.last_token_s
        assert attempt.sequence.transferred_tokens == attempt.trace_request.prompt_tokens


def test_simulator_request_times_are_ordered(
    autoscaled_run: sim_harness.FinishedRun, moved: sim_harness.FinishedRun
) -> None:
    for attempt in (*autoscaled_run.attempts, *moved.attempts):
        if attempt.outcome is AttemptOutcome.OK:
            assert attempt.admitted_s is not None
            assert attempt.first_token_s is not None
            assert attempt.end_s is not None
            assert attempt.trace_request.at_s <= attempt.admitted_s < attempt.first_token_s <= attempt.end_s


def _bytes(done: sim_harness.FinishedRun) -> str:
    rows = [request_row(attempt) for attempt in done.attempts]
    return json.dumps([rows, [(*one[:3], str(one[3])) for one in done.world.log.changes], done.world.log.replicas])


def test_simulator_same_seed_gives_same_bytes(autoscaled_run: sim_harness.FinishedRun) -> None:
    assert _bytes(sim_harness.simulate(STEP, gateways=2)) == _bytes(autoscaled_run)


def test_simulator_another_seed_gives_another_run(autoscaled_run: sim_harness.FinishedRun) -> None:
    assert _bytes(sim_harness.simulate(STEP, gateways=2, seed=1)) != _bytes(autoscaled_run)


def test_simulator_skipping_steps_changes_no_outcome(autoscaled_run: sim_harness.FinishedRun) -> None:
    slow = sim_harness.simulate(STEP, hardware=sim_harness.make_plant(fast_forward=False), gateways=2)
    assert [attempt.outcome for attempt in slow.attempts] == [attempt.outcome for attempt in autoscaled_run.attempts]
    for one, other in zip(slow.attempts, autoscaled_run.attempts, strict=True):
        assert one.id == other.id
        # A gate looks at who waits every SOON_S: a rounding of the last digit decides on which look one is refused.
        assert one.end_s == pytest.approx(
            other.end_s, abs=1e-6 if one.outcome is AttemptOutcome.OK else MIN_RETRY_S + 1e-6
        )


def test_simulator_without_admission_all_wait_in_engines() -> None:
    done = sim_harness.simulate(STEP, StaticPolicy({Role.SERVE: 1}, runs_operator=False))
    assert {attempt.outcome for attempt in done.attempts} == {AttemptOutcome.OK}
    assert not any(attempt.was_queued for attempt in done.attempts)
    assert max(attempt.tpot_s or 0.0 for attempt in done.attempts) > 0.05


def test_simulator_static_fleet_costs_its_duration() -> None:
    done = sim_harness.simulate(STEP, StaticPolicy({Role.SERVE: 3}, runs_operator=True), initial={Role.SERVE: 3})
    assert done.world.tiers[Role.SERVE].replica_seconds(100.0) == 300.0
    assert {counts[2] for counts in done.world.log.replicas} == {3}


def test_simulator_startup_takes_time_and_is_paid_from_order() -> None:
    requests = [TraceRequest(float(n), 100, 2) for n in range(60)]
    done = sim_harness.simulate(requests, Course({10.0: {Role.SERVE: 2}}))
    ready = next(at_s for at_s, _, _, live, _, _ in done.world.log.replicas if live == 2)
    assert ready == pytest.approx(30.0)
    assert done.world.tiers[Role.SERVE].replica_seconds(60.0) == pytest.approx(60.0 + 50.0)
    assert {attempt.address for attempt in done.attempts if attempt.trace_request.at_s > 31.0} == {"serve-1", "serve-2"}


def test_simulator_draining_replica_finishes_its_requests() -> None:
    requests = [TraceRequest(0.1 * n, 500, 400) for n in range(100)]
    done = sim_harness.simulate(requests, Course({0.0: {Role.SERVE: 2}, 5.0: {Role.SERVE: 1}}), initial={Role.SERVE: 2})
    assert {attempt.outcome for attempt in done.attempts} == {AttemptOutcome.OK}
    last = max(attempt.end_s or 0.0 for attempt in done.attempts if attempt.address == "serve-1")
    gone = max(at_s for at_s, *_, draining in done.world.log.replicas if draining == 0)
    assert gone >= max(last, 5.0 + min_drain_s()) - 1e-9
    assert all(attempt.address == "serve-2" for attempt in done.attempts if attempt.trace_request.at_s > 5.01)


def test_simulator_starting_replica_is_removed_first_at_once() -> None:
    requests = [TraceRequest(float(n), 100, 2) for n in range(30)]
    done = sim_harness.simulate(requests, Course({2.0: {Role.SERVE: 3}, 8.0: {Role.SERVE: 1}}))
    assert done.world.tiers[Role.SERVE].replica_seconds(30.0) == pytest.approx(30.0 + 2 * 6.0)
    assert all(draining == 0 for *_, draining in done.world.log.replicas)


def test_simulator_killed_engine_fails_only_its_streams() -> None:
    requests = [TraceRequest(0.05 * n, 500, 100) for n in range(1000)]
    done = sim_harness.simulate(
        requests,
        StaticPolicy({Role.SERVE: 2}, runs_operator=True),
        initial={Role.SERVE: 2},
        kills=((Role.SERVE, 25.0),),
    )
    failed = [attempt for attempt in done.attempts if attempt.outcome is AttemptOutcome.FAILED]
    assert failed
    assert len({attempt.address for attempt in failed}) == 1
    assert all(attempt.admitted_s is not None and attempt.admitted_s <= 25.0 for attempt in failed)
    assert done.world.tiers[Role.SERVE].desired == 2
    assert {attempt.outcome for attempt in done.attempts if attempt.trace_request.at_s > 25.0} <= {
        AttemptOutcome.OK,
        AttemptOutcome.SHED,
    }


@pytest.mark.parametrize(("per_s", "ttft"), [(16.0, "2s"), (16.0, "500ms"), (10.0, "500ms")])
def test_requests_after_an_outage_do_not_wait_for_those_before(per_s: float, ttft: str) -> None:
    """The only engine dies at 20 s, and its successor is ready 20 s later."""
    done = sim_harness.simulate(
        sim_harness.PoissonLoad(round(64 * per_s), per_s).requests_drawn(),
        StaticPolicy({Role.SERVE: 1}, runs_operator=True),
        of=sim_harness.serve_manifest(slo={"ttft": ttft, "tpot": "50ms"}),
        kills=((Role.SERVE, 20.0),),
    )
    target_s = 2.0 if ttft == "2s" else 0.5
    after = [attempt for attempt in done.attempts if 42.0 < attempt.trace_request.at_s < 52.0]
    in_time = [attempt for attempt in after if attempt.ttft_s is not None and attempt.ttft_s <= target_s]
    assert len(in_time) > 0.95 * len(after)
    queued = [attempt for attempt in done.attempts if 25.0 < attempt.trace_request.at_s < 35.0]
    assert any(attempt.outcome is AttemptOutcome.OK for attempt in queued)


def test_simulator_killed_prefill_engine_falls_back_to_decode() -> None:
    hardware = sim_harness.make_plant(replace(sim_harness.H200_CAPPED, max_num_seqs=32, block_size=128))
    requests = [TraceRequest(0.4 * n, 3000, 30) for n in range(100)]
    done = sim_harness.simulate(
        requests, of=sim_harness.pd_manifest(), hardware=hardware, kills=((Role.PREFILL, 20.1),)
    )
    assert {attempt.outcome for attempt in done.attempts} <= {AttemptOutcome.OK, AttemptOutcome.SHED}
    read_here = [
        attempt
        for attempt in done.attempts
        if attempt.outcome is AttemptOutcome.OK and attempt.sequence and not attempt.sequence.transferred_tokens
    ]
    assert read_here
    assert all(attempt.trace_request.at_s <= 41.0 for attempt in read_here)


def test_simulator_request_too_long_for_any_engine_is_rejected() -> None:
    for policy in (StaticPolicy({Role.SERVE: 1}, runs_operator=False), PlimsollPolicy()):
        done = sim_harness.simulate(
            [TraceRequest(30.0, 100, 5), TraceRequest(31.0, 50_000, 5), TraceRequest(32.0, 100, 5)], policy
        )
        assert [attempt.outcome for attempt in sorted(done.attempts, key=lambda v: v.id)] == [
            AttemptOutcome.OK,
            AttemptOutcome.REFUSED,
            AttemptOutcome.OK,
        ]


def test_simulator_truncated_run_reports_unfinished() -> None:
    done = sim_harness.simulate(
        [TraceRequest(0.0, 100, 30_000)], StaticPolicy({Role.SERVE: 1}, runs_operator=False), tail_s=5.0
    )
    assert [attempt.outcome for attempt in done.attempts] == [AttemptOutcome.UNFINISHED]


def test_simulator_service_without_slo_keeps_replicas() -> None:
    done = sim_harness.simulate(STEP[:300], of=sim_harness.serve_manifest(slo=None))
    assert not done.world.log.changes
    assert {attempt.outcome for attempt in done.attempts} == {AttemptOutcome.OK}


def test_simulator_time_never_goes_back() -> None:
    visited: list[float] = []

    class Watching(StaticPolicy):
        def desired_replicas(self, observation: Observation) -> dict[Role, int]:
            visited.append(observation.now_s)
            return {}

    sim_harness.simulate(STEP[:200], Watching({Role.SERVE: 1}, runs_operator=True))
    assert all(b - a == pytest.approx(1.0) for a, b in pairwise(visited))
    assert math.isclose(visited[0], 0.0)


class ObservingPolicy(StaticPolicy):
    """Looks at everything, and wants nothing else for it."""

    def __init__(self) -> None:
        super().__init__({Role.SERVE: 2}, runs_operator=False)
        self.looks: list[tuple[Observation, tuple[EngineReading, ...]]] = []

    def desired_replicas(self, observation: Observation) -> Mapping[Role, int]:
        self.looks.append((observation, observation.engine_readings[Role.SERVE]))
        return super().desired_replicas(observation)


def test_simulator_peer_policy_observes_without_side_effects() -> None:
    peeping, requests = ObservingPolicy(), sim_harness.PoissonLoad(300, 10.0, seed=4).requests_drawn()
    observed = sim_harness.simulate(requests, peeping, initial={Role.SERVE: 2})
    blind = sim_harness.simulate(requests, StaticPolicy({Role.SERVE: 2}, runs_operator=False), initial={Role.SERVE: 2})
    assert _bytes(observed) == _bytes(blind)
    look, engines = peeping.looks[-1]
    assert list(look.engine_readings) == [Role.SERVE]
    assert (look.ready, look.starting) == ({Role.SERVE: 2}, {Role.SERVE: 0})
    assert sum(sum(one.output_tokens.counts) for one in engines if one.output_tokens) == 300
    assert sum(one.succeeded for one in look.gateway_readings) == 300
    assert max(one.running or 0.0 for _, engines in peeping.looks for one in engines) > 1.0
