"""The fleet in virtual time: nobody is lost or counted twice, and the same seed gives the same bytes."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest

from plimsoll.core.admission.replica import SOON_S
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import EngineReading
from plimsoll.sim.plant import quiet_s
from plimsoll.sim.policies.base import Look, Plimsoll, Static
from plimsoll.sim.result import row
from plimsoll.sim.visit import Asked, End
from tests.sim import lab

STEP = lab.Load(120, 4.0, seed=1).asked()
STEP += [replace(one, at_s=one.at_s + STEP[-1].at_s) for one in lab.Load(1200, 30.0, seed=2).asked()]


class Course:
    """A policy by the clock: replicas from these moments on."""

    operator = False
    initial = None

    def __init__(self, course: dict[float, dict[Role, int]]) -> None:
        self._course = course

    def arrived(self, asked: Asked, now_s: float) -> None:
        """Of no interest."""

    def wanted(self, look: Look) -> dict[Role, int]:
        return next((w for at_s, w in sorted(self._course.items(), reverse=True) if at_s <= look.now_s), {})


@pytest.fixture(scope="module")
def autoscaled_run() -> lab.Done:
    return lab.simulate(STEP, gateways=2)


@pytest.fixture(scope="module")
def moved() -> lab.Done:
    hardware = lab.plant(replace(lab.CAPPED, max_num_seqs=32, block_size=128))
    asked = lab.Load(400, 5.0, 2500, 60, seed=3).asked()
    return lab.simulate(asked, of=lab.disaggregated(), hardware=hardware)


def test_simulator_every_request_has_exactly_one_outcome(autoscaled_run: lab.Done, moved: lab.Done) -> None:
    for done, count in ((autoscaled_run, len(STEP)), (moved, 400)):
        assert sorted(visit.id for visit in done.visits) == list(range(1, count + 1))
        assert all(visit.end is not None and visit.end is not End.UNFINISHED for visit in done.visits)
        assert done.world.in_flight == 0


def test_simulator_gateways_and_engines_are_empty_at_end(autoscaled_run: lab.Done, moved: lab.Done) -> None:
    for done in (autoscaled_run, moved):
        for gateway in done.world.gateways:
            assert not gateway.held
            assert not gateway.running
            assert gateway.gate is None or gateway.gate.held == 0
            assert gateway.gate is None or all(not r.residents for r in gateway.gate.fleet.replicas.values())
        for tier in done.world.tiers.values():
            for replica in tier.replicas.values():
                assert replica.engine.idle
                assert replica.engine.blocks.free == replica.engine.blocks.total


def test_simulator_gateway_counters_match_outcomes(autoscaled_run: lab.Done) -> None:
    readings = [gateway.reading() for gateway in autoscaled_run.world.gateways]
    ends = Counter(visit.end for visit in autoscaled_run.visits)
    assert sum(one.arrived for one in readings) == len(STEP)
    assert sum(one.answered for one in readings) == ends[End.OK]
    assert sum(sum(one.refused.values()) for one in readings) == ends[End.SHED]
    assert all(one.arrived > 0.4 * len(STEP) for one in readings)


def test_simulator_operator_scales_with_load_within_slo(autoscaled_run: lab.Done) -> None:
    counts = [desired for _, role, desired, *_ in autoscaled_run.world.log.replicas if role is Role.SERVE]
    assert counts[0] == 1
    assert max(counts) > 1
    ok = [visit for visit in autoscaled_run.visits if visit.end is End.OK]
    met = [visit for visit in ok if (visit.ttft_s or 0) <= 2.0 and (visit.tpot_s or 0) <= 0.05]
    assert len(met) >= 0.95 * len(ok)
    assert {visit.reason for visit in autoscaled_run.visits if visit.end is End.SHED} <= {"overloaded"}


def test_simulator_disaggregated_requests_use_both_tiers(moved: lab.Done) -> None:
    ok = [visit for visit in moved.visits if visit.end is End.OK]
    assert len(ok) > 300
    for visit in ok:
        assert visit.address.startswith("decode")
        assert visit.prefill.startswith("prefill")
        assert visit.leg is not None
        assert visit.job is not None
        assert visit.leg.last_s is not None
        assert visit.job.arrived_s > visit.leg.last_s
        assert visit.job.moved == visit.asked.prompt_tokens


def test_simulator_request_times_are_ordered(autoscaled_run: lab.Done, moved: lab.Done) -> None:
    for visit in (*autoscaled_run.visits, *moved.visits):
        if visit.end is End.OK:
            assert visit.admitted_s is not None
            assert visit.first_s is not None
            assert visit.end_s is not None
            assert visit.asked.at_s <= visit.admitted_s < visit.first_s <= visit.end_s


def _bytes(done: lab.Done) -> str:
    rows = [row(visit) for visit in done.visits]
    return json.dumps([rows, [(*one[:3], str(one[3])) for one in done.world.log.changes], done.world.log.replicas])


def test_simulator_same_seed_gives_same_bytes(autoscaled_run: lab.Done) -> None:
    assert _bytes(lab.simulate(STEP, gateways=2)) == _bytes(autoscaled_run)


def test_simulator_another_seed_gives_another_run(autoscaled_run: lab.Done) -> None:
    assert _bytes(lab.simulate(STEP, gateways=2, seed=1)) != _bytes(autoscaled_run)


def test_simulator_skipping_steps_changes_no_outcome(autoscaled_run: lab.Done) -> None:
    slow = lab.simulate(STEP, hardware=lab.plant(leap=False), gateways=2)
    assert [visit.end for visit in slow.visits] == [visit.end for visit in autoscaled_run.visits]
    for one, other in zip(slow.visits, autoscaled_run.visits, strict=True):
        assert one.id == other.id
        # A gate looks at who waits every SOON_S: a rounding of the last digit decides on which look one is refused.
        assert one.end_s == pytest.approx(other.end_s, abs=1e-6 if one.end is End.OK else SOON_S + 1e-6)


def test_simulator_without_admission_all_wait_in_engines() -> None:
    done = lab.simulate(STEP, Static({Role.SERVE: 1}, gated=False))
    assert {visit.end for visit in done.visits} == {End.OK}
    assert not any(visit.waited for visit in done.visits)
    assert max(visit.tpot_s or 0.0 for visit in done.visits) > 0.05


def test_simulator_static_fleet_costs_its_duration() -> None:
    done = lab.simulate(STEP, Static({Role.SERVE: 3}, gated=True), initial={Role.SERVE: 3})
    assert done.world.tiers[Role.SERVE].paid_s(100.0) == 300.0
    assert {counts[2] for counts in done.world.log.replicas} == {3}


def test_simulator_startup_takes_time_and_is_paid_from_order() -> None:
    asked = [Asked(float(n), 100, 2) for n in range(60)]
    done = lab.simulate(asked, Course({10.0: {Role.SERVE: 2}}))
    ready = next(at_s for at_s, _, _, live, _, _ in done.world.log.replicas if live == 2)
    assert ready == pytest.approx(30.0)
    assert done.world.tiers[Role.SERVE].paid_s(60.0) == pytest.approx(60.0 + 50.0)
    assert {visit.address for visit in done.visits if visit.asked.at_s > 31.0} == {"serve-1", "serve-2"}


def test_simulator_draining_replica_finishes_its_requests() -> None:
    asked = [Asked(0.1 * n, 500, 400) for n in range(100)]
    done = lab.simulate(asked, Course({0.0: {Role.SERVE: 2}, 5.0: {Role.SERVE: 1}}), initial={Role.SERVE: 2})
    assert {visit.end for visit in done.visits} == {End.OK}
    last = max(visit.end_s or 0.0 for visit in done.visits if visit.address == "serve-1")
    gone = max(at_s for at_s, *_, draining in done.world.log.replicas if draining == 0)
    assert gone >= max(last, 5.0 + quiet_s()) - 1e-9
    assert all(visit.address == "serve-2" for visit in done.visits if visit.asked.at_s > 5.01)


def test_simulator_starting_replica_is_removed_first_at_once() -> None:
    asked = [Asked(float(n), 100, 2) for n in range(30)]
    done = lab.simulate(asked, Course({2.0: {Role.SERVE: 3}, 8.0: {Role.SERVE: 1}}))
    assert done.world.tiers[Role.SERVE].paid_s(30.0) == pytest.approx(30.0 + 2 * 6.0)
    assert all(draining == 0 for *_, draining in done.world.log.replicas)


def test_simulator_killed_engine_fails_only_its_streams() -> None:
    asked = [Asked(0.05 * n, 500, 100) for n in range(1000)]
    done = lab.simulate(
        asked, Static({Role.SERVE: 2}, gated=True), initial={Role.SERVE: 2}, kills=((Role.SERVE, 25.0),)
    )
    failed = [visit for visit in done.visits if visit.end is End.FAILED]
    assert failed
    assert len({visit.address for visit in failed}) == 1
    assert all(visit.admitted_s is not None and visit.admitted_s <= 25.0 for visit in failed)
    assert done.world.tiers[Role.SERVE].desired == 2
    assert {visit.end for visit in done.visits if visit.asked.at_s > 25.0} <= {End.OK, End.SHED}


def test_simulator_killed_prefill_engine_falls_back_to_decode() -> None:
    hardware = lab.plant(replace(lab.CAPPED, max_num_seqs=32, block_size=128))
    asked = [Asked(0.4 * n, 3000, 30) for n in range(100)]
    done = lab.simulate(asked, of=lab.disaggregated(), hardware=hardware, kills=((Role.PREFILL, 20.1),))
    assert {visit.end for visit in done.visits} <= {End.OK, End.SHED}
    read_here = [visit for visit in done.visits if visit.end is End.OK and visit.job and not visit.job.moved]
    assert read_here
    assert all(visit.asked.at_s <= 41.0 for visit in read_here)


def test_simulator_request_too_long_for_any_engine_is_rejected() -> None:
    for policy in (Static({Role.SERVE: 1}, gated=False), Plimsoll()):
        done = lab.simulate([Asked(30.0, 100, 5), Asked(31.0, 50_000, 5), Asked(32.0, 100, 5)], policy)
        assert [visit.end for visit in sorted(done.visits, key=lambda v: v.id)] == [End.OK, End.REFUSED, End.OK]


def test_simulator_truncated_run_reports_unfinished() -> None:
    done = lab.simulate([Asked(0.0, 100, 30_000)], Static({Role.SERVE: 1}, gated=False), tail_s=5.0)
    assert [visit.end for visit in done.visits] == [End.UNFINISHED]


def test_simulator_service_without_slo_keeps_replicas() -> None:
    done = lab.simulate(STEP[:300], of=lab.service(slo=None))
    assert not done.world.log.changes
    assert {visit.end for visit in done.visits} == {End.OK}


def test_simulator_time_never_goes_back() -> None:
    seen: list[float] = []

    class Watching(Static):
        def wanted(self, look: Look) -> dict[Role, int]:
            seen.append(look.now_s)
            return {}

    lab.simulate(STEP[:200], Watching({Role.SERVE: 1}, gated=True))
    assert all(b - a == pytest.approx(1.0) for a, b in pairwise(seen))
    assert math.isclose(seen[0], 0.0)


class ObservingPolicy(Static):
    """Looks at everything, and wants nothing else for it."""

    def __init__(self) -> None:
        super().__init__({Role.SERVE: 2}, gated=False)
        self.looks: list[tuple[Look, tuple[EngineReading, ...]]] = []

    def wanted(self, look: Look) -> Mapping[Role, int]:
        self.looks.append((look, look.engines[Role.SERVE]))
        return super().wanted(look)


def test_simulator_peer_policy_observes_without_side_effects() -> None:
    peeping, asked = ObservingPolicy(), lab.Load(300, 10.0, seed=4).asked()
    seen = lab.simulate(asked, peeping, initial={Role.SERVE: 2})
    blind = lab.simulate(asked, Static({Role.SERVE: 2}, gated=False), initial={Role.SERVE: 2})
    assert _bytes(seen) == _bytes(blind)
    look, engines = peeping.looks[-1]
    assert list(look.engines) == [Role.SERVE]
    assert (look.ready, look.starting) == ({Role.SERVE: 2}, {Role.SERVE: 0})
    assert sum(sum(one.output_tokens.counts) for one in engines if one.output_tokens) == 300
    assert sum(one.answered for one in look.gateways) == 300
    assert max(one.running or 0.0 for _, engines in peeping.looks for one in engines) > 1.0
