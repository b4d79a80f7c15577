"""The figures of a run against requests whose ends are known."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from plimsoll.core.admission.cost_model import ClassPolicy
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.sim.attempt import Attempt, AttemptOutcome, TraceRequest
from plimsoll.sim.engine.quantile_sketch import QuantileSketch
from plimsoll.sim.policies.base import StaticPolicy
from plimsoll.sim.result import WINDOW_REQUESTS, RunResult, decision_rows, replica_rows
from tests.sim import sim_harness

SLO = Slo(share=0.95, ttft_s=1.0, tpot_s=0.05, ttft_per_1k_tokens_s=0.5)


def ended_attempt(
    number: int, end: AttemptOutcome = AttemptOutcome.OK, ttft_s: float = 0.5, tpot_s: float = 0.02, prompt: int = 1000
) -> Attempt:
    attempt = Attempt(number, TraceRequest(float(number), prompt, 11), None, outcome=end)
    if end is AttemptOutcome.OK:
        attempt.first_token_s = number + ttft_s
        attempt.end_s = attempt.first_token_s + 10 * tpot_s
    else:
        attempt.end_s = number + 0.1
    return attempt


def test_summary_e2e_target_counts_when_set() -> None:
    world = sim_harness.simulate(
        [TraceRequest(0.0, 10, 2)], StaticPolicy({Role.SERVE: 2}, runs_operator=False), initial={Role.SERVE: 2}
    ).world
    visits = [
        ended_attempt(1),
        ended_attempt(2, ttft_s=0.7),
        ended_attempt(3, tpot_s=0.04),
        ended_attempt(4, AttemptOutcome.SHED),
        ended_attempt(5, prompt=100_000),
    ]
    shares, shown = {}, {}
    for e2e_s in (None, 0.8):  # ten tokens after the first: 0.7, 0.9, 0.9 and 0.7 s
        result = RunResult(sim_harness.make_plant(), [Role.SERVE], Slo(0.95, 1.0, 0.0, 0.05, e2e_s))
        for attempt in visits:
            result.add(attempt)
        summary = result.summary(world, "static:2", 0, 100.0, 1.0)
        shares[e2e_s], shown[e2e_s] = summary["attainment_offered"], summary.get("p95_e2e_s")
        assert summary["infeasible_alone"] == 1  # reads that prompt for longer than either
    assert shares == {None: 0.8, 0.8: 0.4}
    assert shown == {None: None, 0.8: pytest.approx(0.9, rel=0.003)}


@pytest.mark.parametrize(("itl_s", "met"), [(None, None), (1.0, True), (0.001, False)])
def test_summary_itl_target_is_reported_beside_attainment(itl_s: float | None, met: bool | None) -> None:
    world = sim_harness.simulate(
        [TraceRequest(0.0, 10, 9)], StaticPolicy({Role.SERVE: 2}, runs_operator=False), initial={Role.SERVE: 2}
    ).world
    result = RunResult(sim_harness.make_plant(), [Role.SERVE], Slo(0.95, 1.0, 0.0, 0.05, itl_s=itl_s))
    result.add(ended_attempt(1))
    summary = result.summary(world, "static:2", 0, 100.0, 1.0)
    assert (summary.get("itl_met"), summary["attainment_offered"]) == (met, 1.0)
    assert ("itl_met" in summary) is (itl_s is not None)


def test_summary_offered_counts_all_and_admitted_omits_rejected() -> None:
    world = sim_harness.simulate(
        [TraceRequest(0.0, 10, 2)], StaticPolicy({Role.SERVE: 2}, runs_operator=False), initial={Role.SERVE: 2}
    ).world
    result = RunResult(sim_harness.make_plant(), [Role.SERVE], SLO)
    for attempt in (
        ended_attempt(1),
        ended_attempt(2, ttft_s=1.4),  # within 1 s and half a second for 1,000 tokens
        ended_attempt(3, ttft_s=1.6),
        ended_attempt(4, tpot_s=0.06),
        ended_attempt(5, AttemptOutcome.SHED),
        ended_attempt(6, AttemptOutcome.FAILED),
        ended_attempt(7, AttemptOutcome.REFUSED),
        ended_attempt(8, AttemptOutcome.UNFINISHED),
        ended_attempt(9, prompt=2_000_000),  # kept, but alone it would read that context for longer than the target
        ended_attempt(10, AttemptOutcome.SHED),
    ):
        result.add(attempt)
    summary = result.summary(world, "static:2", 0, 100.0, 1.0)
    assert (summary["offered"], summary["admitted"], summary["shed"], summary["refused"]) == (10, 7, 2, 1)
    assert (summary["completed"], summary["failed"], summary["unfinished"]) == (5, 1, 1)
    assert summary["attainment_offered"] == 0.3
    assert summary["attainment_admitted"] == pytest.approx(3 / 7, abs=1e-5)
    assert summary["infeasible_alone"] == 1
    assert summary["goodput_rps"] == 0.03
    assert summary["goodput_tokens_per_s"] == 0.33
    assert summary["mean_replicas"] == {"serve": 2.0}
    assert summary["gpu_hours"] == pytest.approx(200 / 3600, abs=1e-5)
    assert summary["shed_work_ratio"] < 1.0
    assert summary["p50_ttft_s"] == pytest.approx(0.5, rel=0.003)
    assert json.loads(json.dumps(summary)) == summary


def test_met_uses_slo_of_request_class() -> None:
    """Those of a class stand in place of the service's; names that are no class are the default's, the least."""
    classes = [
        ClassPolicy("chat", 10, Slo(0.95, ttft_s=0.6, tpot_s=0.05)),
        ClassPolicy("batch", 0, Slo(0.95, ttft_s=60.0)),
    ]
    result = RunResult(sim_harness.make_plant(), [Role.SERVE], SLO, classes=classes)
    met = {}
    for request_class in ("chat", "batch", "strange", ""):
        attempt = ended_attempt(1, ttft_s=2.0, tpot_s=0.06)
        attempt.trace_request = replace(attempt.trace_request, request_class=request_class)
        met[request_class] = result.is_within_slo(attempt)
    assert met == {"chat": False, "batch": True, "strange": True, "": True}
    soon = ended_attempt(2, ttft_s=0.7, prompt=10_000)
    soon.trace_request = replace(soon.trace_request, request_class="chat")
    assert not result.is_within_slo(soon)  # the service's would have been 6 s


def test_summary_load_of_one_moment_has_no_rates() -> None:
    world = sim_harness.simulate(
        [TraceRequest(0.0, 10, 2)], StaticPolicy({Role.SERVE: 2}, runs_operator=False), initial={Role.SERVE: 2}
    ).world
    result = RunResult(sim_harness.make_plant(), [Role.SERVE], SLO)
    result.add(ended_attempt(1, AttemptOutcome.SHED))
    summary = result.summary(world, "static:2", 0, 0.0, 1.0)
    assert (summary["goodput_rps"], summary["goodput_tokens_per_s"]) == (None, None)
    assert summary["mean_replicas"] == {"serve": None}
    assert summary["gpu_hours"] == 0.0


@pytest.mark.parametrize(
    ("last", "paid_until_s"),
    [
        (ended_attempt(99), 100.0),
        (ended_attempt(100), 100.7),
        (ended_attempt(100, AttemptOutcome.FAILED), 100.1),
        (ended_attempt(100, AttemptOutcome.UNFINISHED), 100.1),
        (ended_attempt(120, AttemptOutcome.SHED), 100.0),
    ],
)
def test_summary_replicas_cost_until_last_answer(last: Attempt, paid_until_s: float) -> None:
    policy = StaticPolicy({Role.SERVE: 2}, runs_operator=False)
    world = sim_harness.simulate([TraceRequest(0.0, 10, 2)], policy, initial={Role.SERVE: 2}).world
    result = RunResult(sim_harness.make_plant(), [Role.SERVE], SLO)
    for attempt in (last, ended_attempt(1)):
        result.add(attempt)
    summary = result.summary(world, "static:2", 0, 100.0, 1.0)
    assert summary["paid_until_s"] == pytest.approx(paid_until_s)
    assert summary["replica_seconds"] == {"serve": pytest.approx(2 * paid_until_s)}
    assert summary["mean_replicas"] == {"serve": 2.0}


def test_windows_cover_arrivals_and_pass_at_slo_share() -> None:
    lines = io.StringIO()
    result = RunResult(sim_harness.make_plant(), [Role.SERVE], SLO, windows=lines)
    first = [
        ended_attempt(n, AttemptOutcome.SHED if n <= 25 else AttemptOutcome.OK) for n in range(1, WINDOW_REQUESTS + 1)
    ]
    second = [
        ended_attempt(n, AttemptOutcome.SHED if n <= WINDOW_REQUESTS + 26 else AttemptOutcome.OK)
        for n in range(WINDOW_REQUESTS + 1, 2 * WINDOW_REQUESTS + 1)
    ]
    for one, other in zip(reversed(first), second, strict=True):
        result.add(one)
        result.add(other)
    result.add(ended_attempt(2 * WINDOW_REQUESTS + 1))  # of a window that never fills
    document = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert sorted((one["n"], one["met"], one["passed"]) for one in document) == [(0, 475, True), (1, 474, False)]


def test_windows_exclude_requests_infeasible_on_idle_fleet() -> None:
    long = sim_harness.make_plant().max_sequence_tokens  # with the tokens of its answer it is too long for the model
    for missed, passed in ((40, True), (41, False)):
        lines = io.StringIO()
        result = RunResult(sim_harness.make_plant(), [Role.SERVE], Slo(0.95, None, 0.0, 0.05), windows=lines)
        for n in range(1, WINDOW_REQUESTS + 1):
            refused = ended_attempt(n, AttemptOutcome.REFUSED, prompt=long)
            result.add(
                refused if n <= 40 else ended_attempt(n, AttemptOutcome.SHED if n <= missed else AttemptOutcome.OK)
            )
        assert result.outcomes[AttemptOutcome.REFUSED] == 40  # 92 % can be kept
        assert json.loads(lines.getvalue())["passed"] is passed


def test_request_rows_have_demo_columns() -> None:
    lines = io.StringIO()
    result = RunResult(sim_harness.make_plant(), [Role.SERVE], SLO, requests=lines)
    result.add(ended_attempt(1))
    shed = ended_attempt(2, AttemptOutcome.SHED)
    shed.reason, shed.retry_after_s = "overloaded", 7
    result.add(shed)
    ok, refused = (json.loads(line) for line in lines.getvalue().splitlines())
    assert (ok["outcome"], ok["status"], ok["ttft_s"], ok["tpot_s"], ok["output_tokens"]) == ("ok", 200, 0.5, 0.02, 11)
    assert (refused["outcome"], refused["status"], refused["retry_after_s"], refused["ttft_s"]) == (
        "shed",
        429,
        7,
        None,
    )
    assert list(ok) == [
        "id", "run", "class", "tenant", "sent_s", "ended_s", "prompt_tokens", "output_tokens_asked", "status",
        "outcome", "reason", "retry_after_s", "ttft_s", "tpot_s", "output_tokens", "finish_reason",
    ]  # fmt: skip


def test_replica_rows_add_up_to_paid_time() -> None:
    requests = sim_harness.PoissonLoad(600, 20.0).requests_drawn()
    done = sim_harness.simulate(requests)
    rows = list(replica_rows(done.world))
    assert list(rows[0]) == ["run", "t_s", "tier", "desired", "ready", "starting", "draining"]
    until = [one["t_s"] for one in rows[1:]] + [requests[-1].at_s]
    paid = sum(
        (one["ready"] + one["starting"] + one["draining"]) * (min(then, requests[-1].at_s) - one["t_s"])
        for one, then in zip(rows, until, strict=True)
        if one["t_s"] < requests[-1].at_s
    )
    assert paid == pytest.approx(done.world.tiers[Role.SERVE].replica_seconds(requests[-1].at_s), rel=1e-3)


def test_decision_rows_chain_counts_and_give_reasons() -> None:
    done = sim_harness.simulate(sim_harness.PoissonLoad(1200, 40.0).requests_drawn())
    rows = list(decision_rows(done.world))
    assert rows
    count = 1
    for row in rows:
        assert row["from"] == count
        count = row["to"]
        assert row["to"] == row["steps"][-1]["replicas"]
        assert [step["name"] for step in row["steps"]] == [
            "demand", "sizing", "feedback", "pending", "ratio", "stabilization", "limits", "mode",
        ]  # fmt: skip
        assert any(step["reason"] in row["reason"] for step in row["steps"])


def test_quantile_sketch_is_within_a_quarter_percent() -> None:
    times = QuantileSketch()
    assert times.quantile_s(0.5) is None
    for n in range(1, 1001):
        times.observe(0.001 * n)
    for share in (0.01, 0.5, 0.95, 0.99, 1.0):
        assert times.quantile_s(share) == pytest.approx(share, rel=0.0026)
    more = QuantileSketch()
    more.observe(9.0, 10_000)
    times.merge(more)
    assert times.quantile_s(0.5) == pytest.approx(9.0, rel=0.0026)
