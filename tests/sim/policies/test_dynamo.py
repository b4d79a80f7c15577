"""Dynamo's planner as a policy: what it is told, what becomes of its orders, and the package itself where it is."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from plimsoll.core.ports import EngineReading, ServiceReading
from plimsoll.core.types import Role
from plimsoll.sim.attempt import AttemptOutcome
from plimsoll.sim.engine.iteration import NO_QUEUED_WORK, NO_WORK, Iteration, QueuedWork, StepWork
from plimsoll.sim.errors import BadInput
from plimsoll.sim.policies import dynamo, dynamo_profile, registry
from plimsoll.sim.policies.base import Observation, PolicyContext
from tests.sim import sim_harness
from tests.sim.policies import fake_dynamo_planner
from tests.sim.policies.observations import BOTH, SERVE, buckets

needs_package = pytest.mark.skipif(find_spec("dynamo") is None, reason="ai-dynamo is not installed")


@pytest.fixture
def fake_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "load", fake_dynamo_planner.fake_package)


def policy(text: str, scene: PolicyContext = SERVE) -> dynamo.DynamoPolicy:
    made = registry.parse(text, scene)
    assert isinstance(made, dynamo.DynamoPolicy)
    return made


def planner(of: dynamo.DynamoPolicy) -> Any:
    return of._planner


def gateway(answered: float) -> ServiceReading:
    return ServiceReading(answered, None, 0.0, answered, 0.0, 0.0, {}, None)


def completed_reading(pod: str, requests: float, prompt: float, output: float, cached: float = 0.0) -> EngineReading:
    """An engine at which so many requests ended, of these mean lengths."""
    of = {"prompt_tokens": prompt, "output_tokens": output}
    histograms: dict[str, Any] = {
        key: buckets(requests)._replace(value_sum=requests * mean) for key, mean in of.items()
    }
    return EngineReading(
        pod, 0.0, pod, cached_prompt_tokens=cached, local_prompt_tokens=requests * prompt, **histograms
    )


def look(
    now_s: float,
    ordered: int = 1,
    ready: int | None = None,
    step: StepWork = NO_WORK,
    queued: QueuedWork = NO_QUEUED_WORK,
    **more: Any,
) -> Observation:
    live = ordered if ready is None else ready
    steps = tuple(Iteration(f"e{number}", 0.01, step, queued) for number in range(live))
    usual = Observation(
        now_s,
        {Role.SERVE: ordered},
        engine_readings={Role.SERVE: ()},
        ready={Role.SERVE: live},
        starting={Role.SERVE: ordered - live},
        iterations={Role.SERVE: steps},
    )
    return replace(usual, **more)


def make_observation(now_s: float, ordered: tuple[int, int], ready: tuple[int, int]) -> Observation:
    roles = (Role.PREFILL, Role.DECODE)
    return Observation(
        now_s,
        dict(zip(roles, ordered, strict=True)),
        engine_readings={role: () for role in roles},
        ready=dict(zip(roles, ready, strict=True)),
        iterations={role: (Iteration(f"{role}-1"),) for role in roles},
    )


def test_dynamo_without_package_names_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dynamo", None)
    with pytest.raises(BadInput, match=r"pip install '\.\[dynamo\]'.*ai-dynamo==1\.2\.1"):
        registry.parse("dynamo-load", SERVE)


@pytest.mark.usefixtures("fake_planner")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dynamo-load:target=cost", "target is throughput or latency or sla"),
        ("dynamo-load:floor=1", "goes with target=sla"),
        ("dynamo-load:target=sla,floor=1,interval=60,floor_interval=60", "shorter than"),
        ("dynamo-load:sensitivity=101", "percentage"),
        ("dynamo-load:interval=2.5", "whole number"),
        ("dynamo-throughput:predictor=oracle", "predictor is constant"),
        ("dynamo-throughput:sensitivity=80", "unknown sensitivity"),
        ("dynamo-throughput:interval=0", "at least 1"),
    ],
)
def test_dynamo_invalid_setting_is_rejected(text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        registry.parse(text, SERVE)


@pytest.mark.usefixtures("fake_planner")
class TestStoodIn:
    def test_planner_config_has_service_targets_and_bounds(self) -> None:
        config = planner(policy("dynamo-load", replace(SERVE, gpus={Role.SERVE: 2}))).config
        assert (config.mode, config.optimization_target, config.enable_load_scaling) == ("agg", "throughput", True)
        assert (config.ttft_ms, config.itl_ms, config.max_gpu_budget) == (3000.0, 100.0, 16)
        assert (config.load_predictor, config.throughput_adjustment_interval_seconds) == ("arima", 180)
        slow = planner(policy("dynamo-throughput", BOTH)).config
        assert (slow.mode, slow.optimization_target) == ("disagg", "sla")
        assert (slow.enable_throughput_scaling, slow.enable_load_scaling) == (True, False)

    def test_planner_capabilities_have_engine_limits(self) -> None:
        found = planner(policy("dynamo-load", BOTH)).capabilities.decode
        own = BOTH.plant.profile
        assert (found.max_num_batched_tokens, found.max_num_seqs) == (own.budget, own.max_num_seqs)
        assert (found.max_kv_tokens, found.context_length) == (own.kv_tokens, own.max_model_len)

    def test_planner_is_called_only_at_its_own_ticks(self) -> None:
        made = policy("dynamo-load")
        for second in range(12):
            made.desired_replicas(look(float(second)))
        assert [observed.now_s for observed in planner(made).received] == [5.0, 10.0]

    def test_planner_order_is_applied_once_and_clamped(self) -> None:
        made = policy("dynamo-load")
        planner(made).orders = [
            fake_dynamo_planner.make_order(decode=3),
            None,
            fake_dynamo_planner.make_order(decode=99),
            fake_dynamo_planner.make_order(decode=0),
        ]
        found = [made.desired_replicas(look(float(second))) for second in range(21)]
        assert [one for one in found if one] == [{Role.SERVE: 3}, {Role.SERVE: 8}, {Role.SERVE: 1}]

    def test_planner_orders_are_dropped_while_a_replica_starts(self) -> None:
        made = policy("dynamo-load", BOTH)
        planner(made).orders = [fake_dynamo_planner.make_order(2, 3)] * 3
        made.desired_replicas(make_observation(0.0, (1, 1), (1, 1)))
        assert made.desired_replicas(make_observation(5.0, (2, 1), (1, 1))) == {}
        assert made.desired_replicas(make_observation(10.0, (1, 2), (1, 1))) == {}
        assert made.desired_replicas(make_observation(15.0, (2, 2), (2, 2))) == {Role.PREFILL: 2, Role.DECODE: 3}
        first, _, last = planner(made).received
        assert first.worker_counts.expected_num_prefill is None
        assert (last.worker_counts.ready_num_prefill, last.worker_counts.expected_num_decode) == (2, 2)

    def test_planner_input_has_newest_step_and_queue_per_engine(self) -> None:
        made = policy("dynamo-load")
        step, queued = StepWork(2, 300, 40, 16, 32_000), QueuedWork(5, 9_000, 1, 700)
        made.desired_replicas(look(0.0))
        made.desired_replicas(look(5.0, ordered=2, step=step, queued=queued))
        (observed,) = planner(made).received
        assert set(observed.fpm_observations.decode) == {("e0", 0), ("e1", 0)}
        one = observed.fpm_observations.decode["e1", 0]
        assert (one.wall_time, one.worker_id) == (0.01, "e1")
        done, waits = one.scheduled_requests, one.queued_requests
        assert (done.num_prefill_requests, done.sum_prefill_tokens, done.sum_prefill_kv_tokens) == (2, 300, 40)
        assert (done.num_decode_requests, done.sum_decode_kv_tokens) == (16, 32_000)
        assert (waits.num_prefill_requests, waits.sum_prefill_tokens) == (5, 9_000)
        assert (waits.num_decode_requests, waits.sum_decode_kv_tokens) == (1, 700)

    def test_planner_traffic_counts_completions_since_slow_tick(self) -> None:
        made = policy("dynamo-throughput")
        for second in range(0, 361, 5):
            readings = (
                completed_reading("a", 2.0 * second, 1000.0, 100.0),
                completed_reading("b", 1.0 * second, 4000.0, 400.0),
            )
            if second > 200:  # one is gone, what it had counted stays counted
                readings = readings[:1]
            counted = (gateway(3.0 * second),)
            shown = look(float(second), engine_readings={Role.SERVE: readings}, gateway_readings=counted)
            made.desired_replicas(shown)
        first, second_one = [observed.traffic for observed in planner(made).received if observed.traffic is not None]
        assert (first.duration_s, first.num_req, first.isl, first.osl) == (180.0, 540.0, 2000.0, 200.0)
        assert second_one.num_req == 540.0
        assert second_one.isl == pytest.approx((360 * 1000 + 20 * 4000) / 380)

    def test_planner_fast_loop_gets_only_kv_hit_rate(self) -> None:
        made = policy("dynamo-load")
        made.desired_replicas(look(0.0))
        made.desired_replicas(look(5.0))
        made.desired_replicas(
            look(10.0, engine_readings={Role.SERVE: (completed_reading("a", 3.0, 1000.0, 10.0, cached=1000.0),)})
        )
        nothing, hits = planner(made).received
        assert nothing.traffic is None
        assert (hits.traffic.num_req, hits.traffic.kv_hit_rate) == (0.0, 0.25)

    def test_planner_aggregated_benchmark_is_decode_only(self) -> None:
        own = planner(policy("dynamo-load:target=sla")).benchmark["agg_fpms"]
        full = planner(policy("dynamo-load:target=sla,profile=full")).benchmark["agg_fpms"]
        assert {one.scheduled_requests.num_prefill_requests for one in own} == {0}
        assert len(full) == len(own) + 16
        assert set(planner(policy("dynamo-load", BOTH)).benchmark) == {"prefill_fpms", "decode_fpms"}


def test_dynamo_profile_is_plant_step_time_on_benchmark_grid() -> None:
    plant, c = SERVE.plant, SERVE.plant.profile.coefficients
    prompts = dynamo_profile.prefill(plant, Role.SERVE)
    assert (len(prompts), prompts[0][1].tokens, prompts[-1][1].tokens) == (16, 10, 8192)
    took_s, did = prompts[-1]
    assert took_s == pytest.approx(c.base + c.anypre + c.pretok * did.tokens + c.preattn * did.tokens**2 / 2)
    batches = dynamo_profile.decode(plant, Role.SERVE)
    assert max(did.decodes for _, did in batches) == plant.profile.max_num_seqs
    assert all(did.context <= plant.profile.kv_tokens for _, did in batches)
    assert batches[0][0] == pytest.approx(c.base + c.dec + c.ctx * 16)
    slow = dynamo_profile.prefill(replace(plant, scale=2.0), Role.SERVE)
    assert slow[-1][0] == pytest.approx(2.0 * took_s)


# ---------------------------------------------------------------- with the package


@needs_package
@pytest.mark.filterwarnings("ignore")
class TestPackage:
    def test_planner_latency_target_adds_one_replica_at_a_time(self) -> None:
        made = policy("dynamo-load:target=latency")
        kv = SERVE.plant.profile.kv_tokens
        busy, idle = StepWork(decodes=100, context=int(0.41 * kv)), StepWork(decodes=10, context=int(0.09 * kv))
        made.desired_replicas(look(0.0, step=busy))
        assert made.desired_replicas(look(5.0, step=busy)) == {Role.SERVE: 2}
        assert made.desired_replicas(look(10.0, ordered=2, ready=1, step=busy)) == {}
        assert made.desired_replicas(look(15.0, ordered=2, step=busy)) == {Role.SERVE: 3}
        assert made.desired_replicas(look(20.0, ordered=3, step=idle)) == {Role.SERVE: 2}

    def test_planner_throughput_target_scales_up_on_full_kv_cache(self) -> None:
        made = policy("dynamo-load")
        kv = SERVE.plant.profile.kv_tokens
        nearly, beyond = StepWork(decodes=200, context=int(0.99 * kv)), QueuedWork(prefills=9, tokens=int(0.02 * kv))
        made.desired_replicas(look(0.0, step=nearly))
        assert made.desired_replicas(look(5.0, step=nearly)) == {}
        assert made.desired_replicas(look(10.0, step=nearly, queued=beyond)) == {Role.SERVE: 2}

    def test_planner_slow_loop_orders_demand_per_engine_capacity(self) -> None:
        made = policy("dynamo-throughput:predictor=constant,profile=full")
        orders = []
        for second in range(0, 181, 5):
            readings = (completed_reading("e0", 60.0 * second, 1480.0, 200.0),)
            counted = (gateway(60.0 * second),)
            shown = look(float(second), engine_readings={Role.SERVE: readings}, gateway_readings=counted)
            orders.append(made.desired_replicas(shown))
        limits = planner(made)._capabilities.decode
        rate, _, _ = planner(made).agg_regression.find_best_engine_agg_rps(
            1480.0, 200.0, limits.max_num_batched_tokens, 3000.0, 100.0, limits.max_kv_tokens, limits.max_num_seqs
        )
        assert orders[:-1] == [{}] * 36
        assert orders[-1] == {Role.SERVE: min(8, -(-60 // rate))}

    def test_dynamo_fleet_steady_load_serves_all_requests(self) -> None:
        requests = sim_harness.PoissonLoad(300, 3.0).requests_drawn()
        run = sim_harness.simulate(
            requests, policy("dynamo-load:target=latency", replace(SERVE, bounds={Role.SERVE: (1, 4)}))
        )
        assert {attempt.outcome for attempt in run.attempts} == {AttemptOutcome.OK}
