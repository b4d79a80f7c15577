"""`hpa-queue` and `hpa-concurrency` as they are typed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.core.types import Role
from plimsoll.sim.errors import BadInput
from plimsoll.sim.policies.base import Observation, PolicyContext
from tests.sim import sim_harness
from tests.sim.policies import observations


def _first_order(text: str, loads: list[tuple[float, float]], ordered: int = 2, starting: int = 0) -> int:
    return observations.policy(text).desired_replicas(observations.observe(0.0, ordered, loads, starting))[Role.SERVE]


def test_hpa_queue_counts_waiting_and_concurrency_counts_all() -> None:
    loads = [(30.0, 6.0), (2.0, 9.0)]
    assert _first_order("hpa-queue", loads) == 3  # 7.5 / 5 of 2
    assert _first_order("hpa-concurrency", loads) == 3  # 23.5 / 16 of 2: 2.94
    assert _first_order("hpa-concurrency:target=8", loads) == 6  # 5.9 of 2
    assert _first_order("hpa-queue:target=2.5", loads) == 6


def test_hpa_queue_starting_replica_counts_as_idle_on_rise() -> None:
    assert _first_order("hpa-queue", [(0.0, 10.0)], ordered=1) == 2
    assert _first_order("hpa-queue", [(0.0, 10.0)], ordered=2, starting=1) == 2


def test_hpa_silent_engines_are_missing_and_none_holds_count() -> None:
    silent = observations.engine_reading("s", running=None, waiting=None)
    reading = observations.engine_reading("t", running=0.0, waiting=20.0)
    result = observations.policy("hpa-queue").desired_replicas(observations.observe_readings(0.0, 2, [silent, reading]))
    assert result == {Role.SERVE: 4}  # 2 of two: the silent one is idle
    assert observations.policy("hpa-concurrency").desired_replicas(observations.observe_readings(0.0, 3, [silent])) == {
        Role.SERVE: 3
    }
    assert observations.policy("hpa-concurrency").desired_replicas(
        observations.observe_readings(0.0, 3, [], starting=3)
    ) == {Role.SERVE: 3}


def test_hpa_between_syncs_reads_and_orders_nothing() -> None:
    class Dear(dict[Role, tuple[()]]):
        def __getitem__(self, role: Role) -> tuple[()]:
            reads.append(role)
            return ()

    reads: list[Role] = []
    policy = observations.policy("hpa-queue")
    for second in range(31):
        result = policy.desired_replicas(replace(observations.observe(second, 1, []), engine_readings=Dear()))
        assert bool(result) == (second % 15 == 0)
    assert len(reads) == 3


def test_hpa_concurrency_rises_at_once_and_falls_after_window() -> None:
    rates = observations.drive_policy(
        observations.policy("hpa-concurrency:target=10"), {0: 10.0, 60: 60.0, 200: 20.0}, 600
    )
    assert rates[59] == 1
    assert rates[60] == 5
    assert rates[75] == 6
    assert rates[494] == 6  # the last sync that proposed six was at 195 s
    assert rates[495] == 2
    quick = observations.drive_policy(
        observations.policy("hpa-concurrency:target=10,down=60"), {0: 10.0, 60: 60.0, 200: 20.0}, 600
    )
    assert (quick[254], quick[255]) == (6, 2)


def test_hpa_queue_scales_each_tier_by_its_own_engines() -> None:
    look = Observation(
        0.0,
        {Role.PREFILL: 2, Role.DECODE: 2},
        engine_readings={
            Role.PREFILL: observations.engine_readings([(1.0, 20.0)] * 2),
            Role.DECODE: observations.engine_readings([(40.0, 5.0)] * 2),
        },
        ready={Role.PREFILL: 2, Role.DECODE: 2},
    )
    assert observations.policy("hpa-queue", observations.BOTH).desired_replicas(look) == {
        Role.PREFILL: 6,
        Role.DECODE: 2,
    }


def test_hpa_queue_minimum_zero_keeps_one_replica() -> None:
    scene = PolicyContext({Role.SERVE: (0, 4)}, sim_harness.make_plant())
    policy = observations.policy("hpa-queue:down=0", scene)
    assert policy.desired_replicas(observations.observe(0.0, 0, [])) == {Role.SERVE: 1}
    assert policy.desired_replicas(observations.observe(15.0, 2, [(0.0, 0.0)] * 2)) == {Role.SERVE: 1}


def test_hpa_admission_is_off_unless_gated() -> None:
    assert not observations.policy("hpa-queue").runs_operator
    assert observations.policy("hpa-concurrency:gated=1").runs_operator


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("target=0", "target is a number above 0"),
        ("target=nan", "target is a number above 0"),
        ("target=0.0001", "at least 0.001"),
        ("down=-1", "down is a number of at least 0"),
        ("up=4000", "at most 3600"),
        ("tolerance=2", "at most 1"),
        ("sync=0", "sync is a number above 0"),
        ("metric=kv", "unknown metric"),
        ("16", "options are key=value"),
    ],
)
def test_hpa_queue_invalid_options_are_rejected(options: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        observations.policy(f"hpa-queue:{options}")


def test_hpa_concurrency_fleet_scales_with_load() -> None:
    requests = sim_harness.PoissonLoad(100, 2.0, seed=1).requests_drawn()
    requests += [
        replace(one, at_s=one.at_s + requests[-1].at_s)
        for one in sim_harness.PoissonLoad(900, 30.0, seed=2).requests_drawn()
    ]
    done = sim_harness.simulate(
        requests,
        observations.policy("hpa-concurrency:target=4", PolicyContext({Role.SERVE: (1, 4)}, sim_harness.make_plant())),
    )
    desired = [count for _, _, count, *_ in done.world.log.replicas]
    assert desired[0] == 1
    assert max(desired) == 4
    assert len(done.attempts) == len(requests)
