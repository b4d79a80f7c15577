"""Dynamo's replay as the plant: what its engines are told, what is read out of it, and the package where it is."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from importlib.util import find_spec
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.dynamo_replay import command, controllers, replay
from bench.dynamo_replay.command import ReplayCase
from bench.dynamo_replay.counters import ReplayCounters, pod_name
from bench.dynamo_replay.figures import ReplayRun, run_figures
from bench.dynamo_replay.replay import RecordingController
from bench.dynamo_replay.step_tables import StepLaw
from bench.scoreboard.loads import LengthDistribution, RatePhase
from bench.scoreboard.rows import BOARD_ROWS
from plimsoll.api.v1alpha1 import parse
from plimsoll.core import histogram
from plimsoll.core.types import Role
from plimsoll.sim import profile
from plimsoll.sim.attempt import AttemptOutcome, TraceRequest
from plimsoll.sim.engine.iteration import StepWork
from plimsoll.sim.engine.step_timing import StepTiming
from plimsoll.sim.errors import BadInput
from plimsoll.sim.policies import registry
from plimsoll.sim.policies.base import PolicyContext
from plimsoll.sim.request_cost import RequestCostModel

needs_package = pytest.mark.skipif(find_spec("dynamo") is None, reason="ai-dynamo is not installed")
LENGTHS = LengthDistribution(2048.0, 256.0)
PROMPT = 2048
IDENTICAL_REQUESTS = [TraceRequest(0.05 * n, PROMPT, 256) for n in range(1200)]


@pytest.fixture(scope="module")
def scene() -> PolicyContext:
    return ReplayCase.of(BOARD_ROWS["step-60"], 1).scene


@pytest.fixture(scope="module")
def place(scene: PolicyContext) -> ReplayCase:
    """A minute of requests alike on the row's engines."""
    row = BOARD_ROWS["step-60"]
    return ReplayCase(
        replace(row, load=replace(row.load, phases=(RatePhase(60.0, 20.0, LENGTHS),))), scene, IDENTICAL_REQUESTS, 60.0
    )


@pytest.fixture(scope="module")
def law(scene: PolicyContext) -> StepLaw:
    return StepLaw.of(scene.plant.profile, IDENTICAL_REQUESTS)


def a_step(worker: int = 0, **more: Any) -> dict[str, Any]:
    """A step as their replay shows it."""
    keys = (
        "num_prefill_requests", "sum_prefill_tokens", "sum_prefill_kv_tokens", "num_decode_requests",
        "sum_decode_kv_tokens", "num_queued_prefill", "num_queued_decode",
    )  # fmt: skip
    return {**dict.fromkeys(keys, 0), "worker_id": worker, "dp_rank": 0, "wall_time": 0.01, **more}


def a_look(now_s: float, *steps: dict[str, Any], ended: int = 0, **more: Any) -> dict[str, Any]:
    """What their replay shows at a moment; engine 0 is ready."""
    means = {"avg_isl": float(PROMPT), "avg_osl": 256.0, "avg_ttft_ms": 80.0, "avg_itl_ms": 10.0}
    usual = {
        "now_ms": 1000.0 * now_s,
        "prefill_fpm_snapshots": [],
        "decode_fpm_snapshots": list(steps),
        "traffic": {"shape_count": ended, **means},
        "active_decode_ids": [0],
        "starting_decode_ids": [],
        "total_decode_count": 1,
        "active_prefill_ids": [],
        "starting_prefill_ids": [],
    }
    return {**usual, **more}


def test_law_step_time_equals_profile(scene: PolicyContext, law: StepLaw) -> None:
    own = StepTiming(scene.plant.profile_for(Role.SERVE))
    for sequences in (0, 1, 40, 200):
        context = sequences * 2100
        plain = own.series(0, PROMPT, PROMPT**2 / 2.0, sequences, context).first_s
        reported = law.step_s(StepWork(prefills=1, tokens=PROMPT, decodes=sequences, context=context))
        assert reported == pytest.approx(plain, rel=1e-9)


def test_law_tables_equal_the_law(law: StepLaw) -> None:
    tables = law.tables()
    assert tables["decode_itl"].shape == (len(tables["decode_active_kv_tokens"]), len(tables["decode_context_length"]))
    each, kv = tables["decode_context_length"][6], tables["decode_active_kv_tokens"][10]
    assert tables["decode_itl"][10, 6] == pytest.approx(1000.0 * law.decode_s(kv / each, kv))
    at_most = law.profile.budget
    assert np.interp(at_most / 3, tables["prefill_isl"], tables["prefill_ttft_ms"]) == pytest.approx(
        1000.0 * law.prefill_s(at_most / 3), rel=1e-3
    )
    assert all(np.diff(tables["prefill_ttft_ms"]) >= 0.0)


def test_law_prefill_overhead_is_in_ttft_table() -> None:
    law = StepLaw.of(profile.load("h200-70b"), IDENTICAL_REQUESTS)
    tables = law.tables()
    assert law.profile.coefficients.anypre > 0.0
    for tokens in (0, 1, 100):
        table_ms = np.interp(tokens, tables["prefill_isl"], tables["prefill_ttft_ms"])
        assert table_ms == pytest.approx(1000.0 * law.prefill_s(tokens), rel=1e-6)


def test_law_mean_prompt_is_weighted_by_attention(scene: PolicyContext) -> None:
    assert (
        StepLaw.of(scene.plant.profile, [TraceRequest(0.0, 1000, 1), TraceRequest(0.0, 3000, 1)]).mean_prompt == 2500.0
    )


def test_law_benchmark_covers_prefill_decode_and_both(scene: PolicyContext, law: StepLaw) -> None:
    def kinds(role: Role) -> set[tuple[bool, bool]]:
        return {(did.tokens > 0, did.decodes > 0) for _, did in law.benchmark(scene.plant, role)}

    assert kinds(Role.SERVE) == {(True, False), (False, True), (True, True)}
    assert (kinds(Role.PREFILL), kinds(Role.DECODE)) == ({(True, False)}, {(False, True)})


def test_replay_trace_prompts_share_no_blocks() -> None:
    first, second = (
        json.loads(line) for line in replay.write_trace([TraceRequest(0.5, 1025, 3), TraceRequest(1.0, 512, 4)])
    )
    assert (first["timestamp"], first["input_length"], first["output_length"]) == (500.0, 1025, 3)
    assert (len(first["hash_ids"]), len(second["hash_ids"])) == (3, 1)
    assert not set(first["hash_ids"]) & set(second["hash_ids"])


def test_replay_rows_are_matched_by_time_and_lengths() -> None:
    requests = [TraceRequest(0.0, 10, 3), TraceRequest(0.5, 10, 3), TraceRequest(0.5, 20, 3), TraceRequest(0.5, 20, 1)]
    first, second, third, last = replay.read_attempts(
        requests,
        [_a_line(requests[3], ttft=70.0), _a_line(requests[1], ttft=90.0, itl=20.0), _a_line(requests[2], "rejected")],
    )
    assert [one.id for one in (first, second, third, last)] == [1, 2, 3, 4]
    assert (first.outcome, third.outcome, third.ttft_s) == (AttemptOutcome.UNFINISHED, AttemptOutcome.REFUSED, None)
    assert (second.ttft_s, second.tpot_s) == (pytest.approx(0.09), pytest.approx(0.02))
    assert (last.ttft_s, last.tpot_s) == (pytest.approx(0.07), None)


def test_assess_only_successful_requests_are_in_time(scene: PolicyContext) -> None:
    requests = [TraceRequest(0.1 * n, PROMPT, 256) for n in range(5)]
    lines = [
        _a_line(requests[0], ttft=900.0, itl=39.0),
        _a_line(requests[1], ttft=1100.0, itl=5.0),
        _a_line(requests[2], ttft=90.0, itl=41.0),
        _a_line(requests[3], ttft=90.0, itl=1.0),
        _a_line(requests[4], "rejected", ttft=1.0, itl=1.0),
    ]
    figures = run_figures(a_run(replay.read_attempts(requests, lines), 3600.0, [(0.0, 2)]), scene, 60.0)
    assert (figures["attainment"], figures["gpu_hours"], figures["offered"]) == (2 / 5, 1.0, 5)


def test_assess_counts_windows_reversals_and_replica_hours(scene: PolicyContext) -> None:
    """Two windows of which one is late, three turns, and one replica in the first hour and two in the second."""
    requests = [TraceRequest(7.0 * n, PROMPT, 256) for n in range(1000)]
    lines = [_a_line(one, ttft=90.0 if number < 500 else 2000.0, itl=5.0) for number, one in enumerate(requests)]
    expected = [(0.0, 1), (10.0, 2), (20.0, 1), (30.0, 2), (40.0, 1)]
    run = a_run(replay.read_attempts(requests, lines), 0.0, [(0.0, 1), (3600.0, 2)], expected)
    figures = run_figures(run, scene, 7200.0)
    assert (figures["windows"], figures["passed"], figures["turns"]) == (2, 1, [3])
    assert (figures["later"], figures["peak"]) == ([2.0], [2])
    assert run_figures(run, scene, 7000.0)["later"] is None


def test_assess_disaggregated_run_pays_both_tiers() -> None:
    scene = ReplayCase.of(BOARD_ROWS["step-60-pd"], 1).scene
    visits = replay.read_attempts(IDENTICAL_REQUESTS, [_a_line(one, ttft=90.0, itl=5.0) for one in IDENTICAL_REQUESTS])
    each = {Role.PREFILL: [(0.0, 1)], Role.DECODE: [(0.0, 1), (10.0, 3)]}
    figures = run_figures(ReplayRun(visits, {Role.PREFILL: 60.0, Role.DECODE: 120.0}, each, each), scene, 60.0)
    assert (figures["attainment"], figures["gpu_hours"], figures["peak"]) == (1.0, 0.05, [1, 3])


def a_run(visits: Any, paid_s: float, there: Any, expected: Any = ((0.0, 1),)) -> ReplayRun:
    """Of one tier."""
    return ReplayRun(visits, {Role.SERVE: paid_s}, {Role.SERVE: there}, {Role.SERVE: expected})


def _a_line(requests: TraceRequest, status: str = "completed", ttft: float = 50.0, itl: float | None = None) -> str:
    """Of their report."""
    return json.dumps(
        {
            "arrival_time_ms": 1000.0 * requests.at_s,
            "input_length": requests.prompt_tokens,
            "requested_output_length": requests.output_tokens,
            "terminal_status": status,
            "ttft_ms": ttft,
            "itl_ms": itl,
        }
    )


def test_paid_time_ends_with_the_load() -> None:
    report = {"duration_ms": 110_000.0, "decode_worker_seconds": 320.0, "prefill_worker_seconds": 110.0}
    assert replay.paid_s(report, "decode", 3, 100.0) == 290.0
    assert replay.paid_s(report, "decode", 3, 200.0) == 590.0
    assert replay.paid_s(report, "prefill", 1, 100.0) == 100.0


def test_controller_is_called_until_end_of_load() -> None:
    class Two(controllers.ConstantReplicas):
        def on_tick(self, shown: dict[str, Any]) -> dict[str, Any]:
            return {**super().on_tick(shown), "target_decode": 2}

    until = RecordingController(Two(), 10.0, {Role.SERVE: 1})
    assert until.on_tick(a_look(9.0, total_decode_count=4))["next_tick_ms"] == 10_000.0
    assert until.on_tick(a_look(10.0, total_decode_count=3))["next_tick_ms"] is None
    assert until.desired_counts == {Role.SERVE: [(0.0, 1), (9.0, 2)]}
    assert until.ready_counts == {Role.SERVE: [(0.0, 1), (9.0, 4), (10.0, 3)]}


def test_watch_sums_steps_into_engine_metrics(scene: PolicyContext) -> None:
    watch = ReplayCounters([Role.SERVE], IDENTICAL_REQUESTS, scene.plant)
    watch.observe(a_look(0.1, a_step(num_prefill_requests=2, sum_prefill_tokens=3000, num_queued_prefill=5)))
    busy = a_step(num_decode_requests=7, sum_decode_kv_tokens=72_000)
    watch.observe(a_look(0.2, busy, a_step(1, num_decode_requests=1), ended=2))
    reading = watch.engine(pod_name(Role.SERVE, 0), 0.3, 1000.0)
    assert (reading.at_s, reading.steps, reading.local_prompt_tokens, reading.generated_tokens) == (1000.3, 2, 3000, 9)
    assert (reading.running, reading.waiting) == (7, 0)
    assert reading.kv_used == pytest.approx(0.1)
    assert reading.tpot_s is not None
    assert histogram.total_count(reading.tpot_s) == 2
    assert reading.tpot_s.value_sum == pytest.approx(0.02)
    assert watch.engine(pod_name(Role.SERVE, 0), 2.0, 1000.0).running == 0


def test_watch_disaggregated_prefill_and_transfer_are_split(scene: PolicyContext) -> None:
    watch = ReplayCounters([Role.PREFILL, Role.DECODE], IDENTICAL_REQUESTS, scene.plant)
    prompts = a_step(1, num_prefill_requests=1, sum_prefill_tokens=PROMPT)
    watch.observe(a_look(0.1, prefill_fpm_snapshots=[prompts]))
    watch.observe(a_look(0.2, a_step(num_decode_requests=1, sum_decode_kv_tokens=PROMPT), ended=1))
    reads, answers = (watch.engine(name, 0.3, 0.0) for name in (pod_name(Role.PREFILL, 1), pod_name(Role.DECODE, 0)))
    assert (reads.local_prompt_tokens, reads.transferred_prompt_tokens, reads.generated_tokens) == (PROMPT, 0, 1)
    assert (answers.local_prompt_tokens, answers.transferred_prompt_tokens, answers.generated_tokens) == (0, PROMPT, 2)
    assert answers.transfer_s > 0.0
    assert reads.tpot_s is not None
    assert answers.tpot_s is not None
    assert (histogram.total_count(reads.tpot_s), histogram.total_count(answers.tpot_s)) == (0, 1)
    assert watch.gateway([pod_name(Role.PREFILL, 1), pod_name(Role.DECODE, 0)], 0.3).succeeded == 1


def test_controller_orders_each_tier_separately() -> None:
    reported = controllers.OrderTracker({Role.PREFILL: 1, Role.DECODE: 2}).next_orders(
        3.0, {Role.PREFILL: 1, Role.DECODE: 4}
    )
    assert reported == {"target_prefill": None, "target_decode": 4, "next_tick_ms": 3000.0}


def test_watch_gateway_counts_arrivals_and_successes(scene: PolicyContext) -> None:
    watch = ReplayCounters([Role.SERVE], IDENTICAL_REQUESTS, scene.plant)
    watch.observe(a_look(0.12, a_step(num_decode_requests=3, num_queued_prefill=4), ended=1))
    reading = watch.gateway([pod_name(Role.SERVE, 0)], 0.12)
    assert (reading.arrived, reading.arrived_tokens, reading.succeeded) == (3, 3 * PROMPT, 1)
    assert reading.inflight == {pod_name(Role.SERVE, 0): 7}
    assert reading.ttft_s is not None
    assert reading.ttft_s.value_sum == pytest.approx(0.08)


def test_plimsoll_controller_scales_up_for_overload(scene: PolicyContext, law: StepLaw) -> None:
    """Twenty requests a second, on an engine that answers them all in time whatever they take."""
    service = parse(BOARD_ROWS["step-60"].manifest())
    pilot = controllers.PlimsollController(
        service, scene.plant, scene.plant.startup.sample(Random(0)), IDENTICAL_REQUESTS, {Role.SERVE: 1}
    )
    step, targets = a_step(num_prefill_requests=1, sum_prefill_tokens=PROMPT, num_decode_requests=64), []
    for n in range(1000):
        reported = pilot.on_tick(a_look(0.05 * n, step, ended=1))
        if reported["target_decode"] is not None:
            targets.append(reported["target_decode"])
    assert targets
    assert targets[-1] > 1


@pytest.mark.parametrize("shown_starting", [True, False])  # a start that takes no time is never shown
def test_plimsoll_controller_learns_each_startup_once(
    scene: PolicyContext, shown_starting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases = scene.plant.startup.sample(Random(0))
    pilot = controllers.PlimsollController(
        parse(BOARD_ROWS["step-60"].manifest()), scene.plant, phases, IDENTICAL_REQUESTS, {Role.SERVE: 1}
    )
    learned: list[Any] = []
    monkeypatch.setattr(pilot._operator, "record_startup", lambda tier, took: learned.append((tier, took)))
    pilot.on_tick(a_look(0.0))
    pilot.on_tick(a_look(1.0, starting_decode_ids=[1] if shown_starting else []))
    assert not learned
    for now_s in (61.0, 62.0):
        pilot.on_tick(a_look(now_s, active_decode_ids=[0, 1]))
    assert learned == [("serve", phases)]


def test_own_simulator_without_admission_rejects_nothing(place: ReplayCase) -> None:
    gated, ungated = (command.play_plimsoll("plimsoll", place, gate) for gate in (True, False))
    assert [sum(one.outcome is AttemptOutcome.SHED for one in run.attempts) > 0 for run in (gated, ungated)] == [
        True,
        False,
    ]
    latest = [max(one.ttft_s for one in run.attempts if one.ttft_s is not None) for run in (gated, ungated)]
    assert latest[1] > latest[0]


def test_reactive_controller_orders_what_arrivals_need(place: ReplayCase) -> None:
    policy = registry.parse("follower:margin=0.2,hold=0,window=10", place.scene)
    need = math.ceil(20.0 * RequestCostModel(place.scene.plant, [Role.SERVE]).total_s(IDENTICAL_REQUESTS[0]) / 0.2)
    pilot, targets = controllers.ReactiveController(policy, IDENTICAL_REQUESTS, {Role.SERVE: 1}), []
    for now_s in range(1, 100):
        targets.append(pilot.on_tick(a_look(float(now_s)))["target_decode"])
    orders = [one for one in targets if one is not None]
    assert (max(orders), orders[-1]) == (need, 1)


def test_unknown_policy_is_named(place: ReplayCase) -> None:
    with pytest.raises(BadInput, match="nonsense"):
        command.play_dynamo("nonsense", place, "round_robin", SimpleNamespace())


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("ragpulse-week", "tiers that are never empty"),
        ("unseen-naps-pd", "tiers that are never empty"),
        ("retry-mixed", "do not come back"),
        ("mooncake", "share beginnings"),
    ],
)
def test_unsupported_row_is_rejected_with_reason(row: str, said: str) -> None:
    with pytest.raises(BadInput, match=f"{row}: .*{said}"):
        ReplayCase.of(BOARD_ROWS[row], 1)


def test_place_load_starts_at_zero_and_startup_is_mean() -> None:
    place = ReplayCase.of(BOARD_ROWS["guide"], 1)
    assert ReplayCase.of(BOARD_ROWS["step-60-pd"], 1).scene.plant.profile.hot is None
    assert (place.requests[0].at_s, place.start_s, place.scene.plant.startup.max_s) == (0.0, 117.5, 117.5)


def test_board_without_package_names_install_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "dynamo", None)
    assert command.main([]) == 2
    assert "ai-dynamo 1.4.2" in capsys.readouterr().err


@needs_package
def test_dynamo_engine_follows_given_step_times(law: StepLaw) -> None:
    requests = [TraceRequest(0.0, PROMPT, 101)]
    run = replay.play(requests, law, controllers.ConstantReplicas(), {Role.SERVE: 1}, 60.0, 10.0, "round_robin")
    (observed,) = run.attempts
    assert observed.ttft_s == pytest.approx(law.step_s(StepWork(prefills=1, tokens=PROMPT)), rel=0.01)
    assert observed.tpot_s == pytest.approx(law.decode_s(1, PROMPT + 50), rel=0.01)


@needs_package
def test_dynamo_pair_transfers_prefilled_prompts() -> None:
    place = ReplayCase.of(BOARD_ROWS["step-60-pd"], 1)
    law = StepLaw.of(place.scene.plant.profile, IDENTICAL_REQUESTS)
    run = replay.play(
        IDENTICAL_REQUESTS[:20], law, controllers.ConstantReplicas(), place.initial, 60.0, 10.0, "round_robin"
    )
    assert [one.outcome for one in run.attempts] == [AttemptOutcome.OK] * 20
    assert run.paid_s == {Role.PREFILL: pytest.approx(10.0, abs=0.1), Role.DECODE: pytest.approx(10.0, abs=0.1)}
