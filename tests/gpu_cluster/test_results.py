"""The page of the runs on a node with a GPU quotes what was kept of them, and predictions that were written before."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from e2e.gpu import gateway_replay, scenarios, summarise
from plimsoll.core.autoscaling import startup_time

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "e2e" / "gpu" / "data"
PAGE = " ".join((ROOT / "docs" / "evaluation" / "gpu-cluster.md").read_text().split())
EARLIER = PAGE[PAGE.index("## One GPU") :]
RESULTS: dict[str, Any] = json.loads((DATA / "h100-8b" / "results.json").read_text())
PREDICTED: dict[str, Any] = json.loads((DATA / "predictions-h100-8b.json").read_text())


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def _tenths(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


@pytest.mark.parametrize("name", ["steady", "overload", "kill"])
def test_each_trace_is_the_one_that_was_predicted(name: str, tmp_path: Path) -> None:
    digest = scenarios.write_trace(scenarios.SCENARIOS[name], PREDICTED["capacity_per_s"], tmp_path / "trace.csv")
    assert digest == RESULTS[name]["trace_sha256"] == PREDICTED[name]["trace_sha256"]


@pytest.mark.parametrize("name", ["steady", "overload", "kill"])
def test_summary_row_quotes_result_and_prediction(name: str) -> None:
    result, predicted = RESULTS[name]["figures"]["all"], PREDICTED[name]["policies"]["plimsoll"]
    row = EARLIER[EARLIER.index(f"| `{name}`") :]
    row = row[: row.index("| |")].replace("**", "")
    assert f"| {result['offered']:,} |" in row
    assert f"{100 * result['share']:.1f} %" in row
    assert f"{100 * predicted['attainment_offered']:.1f} %" in row
    assert f"| {_ms(result['ttft_p95'])}, predicted {_ms(predicted['p95_ttft_s'])} |" in row
    assert f"| {_tenths(result['tpot_p95'])}, predicted {_tenths(predicted['p95_tpot_s'])} |" in row
    for status, count in result["statuses"].items():
        assert (f"{count} cut" if status == "cut" else f"{count:,} × {status}") in row


def test_overload_figures() -> None:
    phase = RESULTS["overload"]["figures"]["1: 1.6 for 60 s"]
    late = RESULTS["overload"]["late"][1]
    assert f"kept {phase['within'] / 60:.1f} requests/s" in PAGE
    assert f"{100 * phase['within'] / late['complete']:.1f} % of the admitted" in PAGE
    assert f"Of {late['complete']:,} admitted" in PAGE
    assert f"{late['ttft']} missed TTFT and {late['tpot']} missed TPOT" in PAGE
    assert f"(p95 {_tenths(phase['tpot_p95'])})" in PAGE
    shares = [RESULTS[name]["limits"]["costModel"]["batch"] for name in ("steady", "overload")]
    assert f"from {shares[0]} to {shares[1]} sequences" in PAGE
    capacities = [change["tier"].get("capacityPerReplica") for change in RESULTS["overload"]["changes"]]
    assert capacities[2] == "18 req/s"
    assert capacities[-1] == "24 req/s"


def test_time_to_first_token_outside_the_steps() -> None:
    before, after = (RESULTS[name]["counters"] for name in ("steady", "overload"))
    count = "vllm:time_to_first_token_seconds_count"

    def mean_s(name: str) -> float:
        key = f"vllm:{name}_seconds_sum"
        return float((after[key] - before[key]) / (after[count] - before[count]))

    total_s, queue_s, steps_s = map(mean_s, ("time_to_first_token", "request_queue_time", "request_prefill_time"))
    quoted = (
        f"vLLM counts {_ms(total_s)} to the first token: {queue_s * 1000:.1f} in its queue, {steps_s * 1000:.0f} in "
    )
    assert f"{quoted}steps, {(total_s - queue_s - steps_s) * 1000:.0f} outside both" in PAGE
    with gzip.open(DATA / "h100-8b" / "gateway.csv.gz", "rt") as file:
        rows = [row for row in csv.DictReader(file) if row["scenario"] == "overload" and row["status"] == "200"]
    gateway_s = np.mean([float(row["ttft_s"]) - float(row["queue_s"]) for row in rows])
    assert f"Another {_ms(float(gateway_s) - total_s)} lie between" in PAGE


def test_replay_of_the_gateway() -> None:
    found = gateway_replay.replay(DATA / "h100-8b", as_recorded=True)
    for begin, end in gateway_replay.WINDOWS_S:
        part = gateway_replay.within(found, begin, end)
        late = sum(row.ttft_s > scenarios.TTFT_S for row in part)
        means = " | ".join(
            _ms(float(np.mean([getattr(row, name) for row in part])))
            for name in ("model_s", "residual_s", "margin_s", "ttft_s")
        )
        assert f"| {begin} to {end} | {len(part)} | {late} | {means} |" in PAGE
    sent_late = sum(row.ttft_s > scenarios.TTFT_S for row in gateway_replay.within(found, 30, 90))
    assert f"so {RESULTS['overload']['late'][1]['ttft'] - sent_late} that had been queued" in PAGE
    errors_s = [row.ttft_s - row.model_s - row.residual_s for row in gateway_replay.within(found, 63, 90)]
    assert f"comes {_ms(float(np.percentile(errors_s, 95)))} or more" in PAGE


def test_replay_of_the_gateway_as_it_is_now() -> None:
    lines = []
    for as_recorded in (True, False):
        found = gateway_replay.within(gateway_replay.replay(DATA / "h100-8b", as_recorded=as_recorded), 30, 90)
        late = [row.is_late_predicted for row in found if row.ttft_s > scenarios.TTFT_S]
        in_time = [row.is_late_predicted for row in found if row.ttft_s <= scenarios.TTFT_S]
        lines.append(f"{sum(late)} of the {len(late)} late ones and {sum(in_time)} of the {len(in_time):,} others")
    assert f"predicted {lines[0]} as late; now {lines[1]}" in PAGE


@pytest.mark.parametrize("switch_s", [31.0, 60.0, 200.0])
def test_replay_with_another_time_of_the_new_limits(switch_s: float) -> None:
    folder = DATA / "h100-8b"
    usual, other = (
        gateway_replay.replay(folder, when, as_recorded=True) for when in (gateway_replay.SWITCH_S, switch_s)
    )
    for begin, end in gateway_replay.WINDOWS_S[1:]:
        residuals_s = [
            np.mean([row.residual_s for row in gateway_replay.within(rows, begin, end)]) for rows in (usual, other)
        ]
        assert round(float(abs(residuals_s[0] - residuals_s[1])), 3) <= 0.044


def test_starts() -> None:
    for name, label in (
        ("steady", "first, empty caches"),
        ("kill", "restarted in its pod"),
        ("zero", "from zero"),
    ):
        (about,) = RESULTS[name]["engine"]
        seconds = [seconds for _, seconds in about["phases"]]
        assert f"| {label} | {' | '.join(f'{s:.1f}' for s in [*seconds, sum(seconds)])} |" in PAGE
        assert round(RESULTS[name]["counters"]["plimsoll_autoscaler_startup_seconds 0.5"]) == 173
    marks = {mark["what"]: mark["at"] for mark in RESULTS["steady"]["marks"]}
    assert f"was received {marks['first answer'] - marks['applied']:.1f} s after" in PAGE
    assert not [event for event in RESULTS["steady"]["events"] if "iveness" in (event["message"] or "")]


def test_start_up_time_with_the_restart_learned() -> None:
    model = startup_time.startup_prior(0.0, 0.0, 16e9, 1e9, 1e9)
    for name in ("steady", "kill"):
        phases = [(phase, seconds) for phase, seconds in RESULTS[name]["engine"][0]["phases"]]
        model = startup_time.record(model, [("schedule", 0.1), ("pull", 1.0), *phases, ("probe", 1.0)])
    expected = startup_time.eta(model, startup_time.StartingPod("pod", 0.0, "launch", 0.5), 1.0)
    assert isinstance(expected, startup_time.Eta)
    assert f"expects {expected.likely_s:.0f} s" in PAGE


def test_kill() -> None:
    codes, (late,) = RESULTS["kill"]["codes"], RESULTS["kill"]["late"]
    assert f"all {codes['cut']['count']} running responses" in PAGE
    assert f"{codes['engine_failed']['count']} × 503 `engine_failed`" in PAGE
    assert f"All {codes['model_starting']['count']} `model_starting`" in PAGE
    assert f"{codes['engine_failed']['first_s']:.1f} to {codes['engine_failed']['last_s']:.1f}" in PAGE
    assert f"24.9 to {codes['model_starting']['last_s']:.1f} | 503 `model_starting`" in PAGE
    assert f"{late['ttft']} are answered late" in PAGE
    killed_s = next(mark["at"] for mark in RESULTS["kill"]["marks"] if mark["what"] == "killed")
    first_s = next(row[0] for row in RESULTS["kill"]["seconds"] if row[0] > killed_s and row[2])
    assert first_s == 106
    assert f"no answer for {109.4 - killed_s:.0f} s" in PAGE
    assert "Try again in" in codes["model_starting"]["last"]


def test_zero() -> None:
    zero = RESULTS["zero"]
    assert f"{zero['to_zero_s']:.0f} s after `minReplicas: 0`" in PAGE
    rejected, last_s = zero["gateway"]["rejected"]["model_starting"], zero["gateway"]["last_rejection_s"]
    assert f"{rejected} rejections in {last_s:.0f} s" in PAGE
    assert {round(seconds) for seconds in zero["gateway"]["queue_s"]} == {39}
    assert {f"{seconds:.1f}" for seconds in zero["held_s"]} == {"88.9"}
    assert "answered 88.9 s after" in PAGE


def test_bench_of_vllm_is_quoted() -> None:
    bench = RESULTS["steady"]["bench"]
    assert bench["completed"] == 300
    assert bench["request_goodput"] == bench["request_throughput"]
    assert f"TTFT p95 {bench['p95_ttft_ms']:.0f} ms, TPOT p95 {bench['p95_tpot_ms']:.1f} ms" in PAGE


def test_summary_of_requests() -> None:
    def row(at_s: float, first_s: float, **more: Any) -> dict[str, Any]:
        return {
            "at_s": at_s, "late_s": 0.0, "first_s": first_s, "last_s": first_s + 0.4, "output": 11, "ok": True,
            "status": 200, "error": "", **more,
        }  # fmt: skip

    rejected = json.dumps({"error": {"code": "overloaded", "message": "Try again in 3 s."}})
    rows = [row(0.2, 0.1), row(0.6, 0.7), row(1.5, 0.0, ok=False, status=429, error=rejected)]
    scenario = scenarios.Scenario("two seconds", 1, 1, ((1.0, 1.0), (1.0, 1.0)))
    assert summarise._late(rows, scenario) == [
        {"complete": 2, "ttft": 1, "tpot": 0},
        {"complete": 0, "ttft": 0, "tpot": 0},
    ]
    assert summarise._codes(rows)["overloaded"]["count"] == 1
    assert summarise._seconds(rows, scenario) == [[0, 2, 2, 1, 0.4, 0.7], [1, 1, 0, 0, None, None]]


def test_answers_of_other_scenarios_are_none_of_zero() -> None:
    def record(ended: float, status: int = 200) -> dict[str, Any]:
        return {"ended": ended, "status": status, "reason": "model_starting", "queue_s": ended}

    records = [record(9.0, 503), record(11.0, 503), record(20.1), record(60.0, 503), record(60.0)]
    assert summarise._answers(records, 10.0, 20.0) == {
        "rejected": {"model_starting": 1},
        "last_rejection_s": 1.0,
        "queue_s": [20.1],
    }


def test_gpu_seconds_of_the_load() -> None:
    pod = {"name": "m"}
    samples = [
        {"at": 9.0, "pods": [pod]},
        {"at": 11.0, "pods": [pod, pod]},
        {"at": 12.0, "pods": [pod]},
        {"at": 14.0, "pods": []},
    ]
    assert summarise._gpu_seconds(samples, 10.0, 3.0) == 1.0 + 2.0 + 1.0
