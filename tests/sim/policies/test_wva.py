"""The saturation law of llm-d's autoscaler."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plimsoll.core.ports import EngineReading, ServiceReading
from plimsoll.core.types import Role
from plimsoll.sim.attempt import AttemptOutcome
from plimsoll.sim.errors import BadInput
from plimsoll.sim.policies import registry, wva
from plimsoll.sim.policies.base import Observation
from plimsoll.sim.policies.sliding_windows import CounterIncrease, SlidingMax
from tests.sim import sim_harness
from tests.sim.policies.observations import SERVE, buckets, engine_reading, observe_readings, policy

LIMITS = wva.WvaEngineLimits(kv_tokens=720_000, budget=8_192, sequences=256)
RULES = wva.WvaRules()
CHAT = wva.ReplicaSample(in_use=100_000.0, waiting=0.0, prompt=2_048.0, output=256.0)


def test_derived_compute_is_bound_by_step_budget_or_slots() -> None:
    assert wva.derived_capacity(LIMITS, 2_048.0, 256.0) == 256 * (2_048 + 128)  # slots bind
    assert wva.derived_capacity(LIMITS, 8_000.0, 100.0) == pytest.approx(
        8_192 * 100 / 8_100 * 8_050
    )  # the budget binds
    assert wva.derived_capacity(LIMITS, 0.0, 256.0) == wva.derived_capacity(LIMITS, 2_048.0, 0.0) == 0.0


def test_capacity_is_lesser_of_memory_and_compute() -> None:
    assert wva.WvaCapacity(RULES, LIMITS).tokens(CHAT) == 256 * (2_048 + 128)
    memory = 0.8 * 720_000
    assert wva.WvaCapacity(RULES, LIMITS).tokens(replace(CHAT, prompt=4_096.0)) == memory
    assert wva.WvaCapacity(RULES, LIMITS).tokens(replace(CHAT, prompt=0.0)) == memory


def test_capacity_long_queue_is_learned_per_length() -> None:
    one = wva.WvaCapacity(RULES, LIMITS)
    assert one.tokens(replace(CHAT, waiting=4.9)) == 256 * (2_048 + 128)
    assert one.tokens(replace(CHAT, in_use=90_000.0, waiting=5.0)) == 90_000.0
    assert one.tokens(replace(CHAT, in_use=110_000.0, waiting=50.0)) == 110_000.0
    assert one.tokens(CHAT) == 100_000.0
    assert one.tokens(replace(CHAT, output=499.0)) == 100_000.0
    assert one.tokens(replace(CHAT, output=99.0)) != 100_000.0
    assert one.tokens(replace(CHAT, output=500.0)) != 100_000.0
    for _ in range(10):
        one.tokens(replace(CHAT, in_use=50_000.0, waiting=9.0))
    assert one.tokens(CHAT) == 50_000.0


def test_load_waiting_requests_add_prompt_and_output_by_role() -> None:
    waiting = replace(CHAT, waiting=2.0)
    assert wva.replica_load(Role.SERVE, waiting) == wva.replica_load(Role.DECODE, waiting) == 100_000 + 2 * 2_304
    assert wva.replica_load(Role.PREFILL, waiting) == 100_000 + 2 * 2_048


@pytest.mark.parametrize(
    ("demand", "ready", "starting", "wanted"),
    [
        (85.0, 1, 0, 1),
        (85.1, 1, 0, 2),
        (85.1, 1, 1, 2),  # it is on its way already
        (600.0, 2, 1, 8),
        (70.1, 2, 0, 2),
        (70.0, 2, 0, 1),
        (0.0, 5, 0, 1),
        (0.0, 1, 0, 1),
        (70.0, 2, 1, 2),  # what starts is no spare
    ],
)
def test_replicas_between_thresholds(demand: float, ready: int, starting: int, desired_replicas_for: int) -> None:
    assert wva.target_replicas(RULES, 100.0, demand, ready, starting) == desired_replicas_for


def test_wva_scales_up_at_once_and_down_after_window() -> None:
    made, ordered, orders = policy("wva"), 1, {}
    for second in range(0, 700, 5):
        full = second < 200
        readings = [engine_reading(f"e{n}", kv=0.9 if full else 0.01) for n in range(ordered)]
        desired = made.desired_replicas(observe_readings(float(second), ordered, readings)).get(Role.SERVE, ordered)
        if desired != ordered:
            orders[second] = desired
        ordered = desired
    first, *_, last = orders
    assert (first, orders[first]) == (0, 2)
    assert ordered == 1
    assert last >= 200 + 60 + 285  # the largest of a minute, and the window


def test_wva_gauges_use_maximum_of_last_minute() -> None:
    made, found = policy("wva"), []
    for second in range(0, 120, 15):
        kv = 0.9 if second == 15 else 0.1
        found.append(
            made.desired_replicas(observe_readings(float(second), 1, [engine_reading("a", kv=kv)]))[Role.SERVE]
        )
    assert found == [1, 2, 2, 2, 2, 2, 1, 1]


def test_wva_requests_queued_at_gateways_count_as_load() -> None:
    lengths = {"prompt_tokens": 2_048.0, "output_tokens": 256.0}
    histograms = {key: buckets(10.0)._replace(value_sum=10.0 * mean) for key, mean in lengths.items()}
    reading = EngineReading("a", 0.0, "a", running=1.0, waiting=0.0, kv_used=0.1, **histograms)
    holding = ServiceReading(0.0, None, 0.0, 0.0, 0.0, 0.0, {}, None, queued=400.0)

    def desired_replicas_for(*gateways: ServiceReading) -> int:
        shown = replace(observe_readings(15.0, 1, [reading]), gateway_readings=gateways)
        return policy("wva").desired_replicas(shown)[Role.SERVE]

    assert desired_replicas_for() == 1
    capacity, load = 256 * (2_048 + 128), 72_000 + 400 * 2_304
    assert desired_replicas_for(holding) == -(-load / 0.85 // capacity)


def test_wva_no_ready_engine_changes_nothing() -> None:
    shown = Observation(
        0.0, {Role.SERVE: 2}, engine_readings={Role.SERVE: ()}, ready={Role.SERVE: 0}, starting={Role.SERVE: 2}
    )
    assert policy("wva").desired_replicas(shown) == {Role.SERVE: 2}


@pytest.mark.parametrize(
    ("text", "words"),
    [("wva:up_at=0.7", "down_at is below up_at"), ("wva:kv=1.1", "at most 1"), ("wva:cycle=0", "above 0")],
)
def test_wva_invalid_setting_is_rejected(text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        registry.parse(text, SERVE)


def test_sliding_windows_forget_old_values_and_removed_pods() -> None:
    gauge = SlidingMax(60.0)
    assert [gauge.add(at_s, "a", value) for at_s, value in ((0.0, 9.0), (30.0, 1.0), (60.0, 2.0), (61.0, 0.0))] == [
        9.0, 9.0, 9.0, 2.0,
    ]  # fmt: skip
    gauge.retain(["b"])
    assert gauge.add(62.0, "a", 0.5) == 0.5
    counter = CounterIncrease(60.0)
    grown = [counter.add(at_s, "a", at_s, 2.0 * at_s) for at_s in (15.0, 30.0, 60.0, 75.0, 90.0, 120.0)]
    assert grown == [(15.0, 30.0), (30.0, 60.0), (60.0, 120.0), (60.0, 120.0), (60.0, 120.0), (60.0, 120.0)]


def test_wva_fleet_grows_when_requests_wait() -> None:
    requests = sim_harness.PoissonLoad(700, 60.0).requests_drawn()
    small = sim_harness.make_plant(replace(sim_harness.H200, max_num_seqs=16), start_s=2.0)
    run = sim_harness.simulate(requests, policy("wva", replace(SERVE, plant=small)), hardware=small)
    assert {attempt.outcome for attempt in run.attempts} == {AttemptOutcome.OK}
    assert max(desired for _, _, desired, *_ in run.world.log.replicas) > 1
