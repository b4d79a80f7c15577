"""Page and README quote the stored results of the later runs on two GPUs, and predictions that were written before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from e2e.gpu import scenarios

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "e2e" / "gpu" / "data"
PAGE = " ".join((ROOT / "docs" / "evaluation" / "gpu-cluster.md").read_text().replace("**", "").split())
README = " ".join((ROOT / "README.md").read_text().split())
RESULTS: dict[str, Any] = json.loads((DATA / "h200-8b-again" / "results.json").read_text())
PREDICTED: dict[str, Any] = json.loads((DATA / "predictions-h100-8b-again.json").read_text())
BY_HAND: dict[str, Any] = json.loads((DATA / "predictions-again-by-hand.json").read_text())
SIMULATED = {name: PREDICTED[name]["policies"] for name in ("trace", "aggregated", "tuning")}


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _row(begin: str) -> str:
    row = PAGE[PAGE.index(begin, PAGE.index("## The trace and more")) :]
    return row[: row.index(" | |")]


@pytest.mark.parametrize("name", ["trace", "aggregated", "pair", "tuning"])
def test_each_later_trace_is_the_predicted_one(name: str, tmp_path: Path) -> None:
    digest = scenarios.write_trace(scenarios.SCENARIOS[name], PREDICTED["capacity_per_s"], tmp_path / "trace.csv")
    assert digest == RESULTS[name]["trace_sha256"] == PREDICTED[name]["trace_sha256"]


@pytest.mark.parametrize(
    ("begin", "figures", "predicted"),
    [
        ("`trace`: Azure", RESULTS["trace"]["figures"]["all"], SIMULATED["trace"]["plimsoll"]["attainment_offered"]),
        ("`tuning`, `Auto`", RESULTS["tuning"]["figures"]["all"], SIMULATED["tuning"]["Auto"]["attainment_offered"]),
        ("`tuning`, `Off`", RESULTS["tuning"]["beside"]["figures"], SIMULATED["tuning"]["Off"]["attainment_offered"]),
        ("`pair`: 0.3", RESULTS["pair"]["figures"]["all"], BY_HAND["pair"]["within_share"]),
        ("`aggregated`", RESULTS["aggregated"]["figures"]["all"], BY_HAND["aggregated"]["within_share"]),
    ],
)
def test_row_of_a_later_run(begin: str, figures: dict[str, Any], predicted: float) -> None:
    row = _row(f"| {begin}")
    assert f"| {figures['offered']:,} | {_percent(figures['share'])}, " in row
    assert f", predicted {_percent(predicted)} |" in row or f", predicted {100 * predicted:.0f} % |" in row
    assert f"| {figures['ttft_p95'] * 1000:,.0f} ms | {figures['tpot_p95'] * 1000:.1f} ms |" in row
    for status, count in figures["statuses"].items():
        assert (f"{count} cut" if status == "cut" else f"{count:,} × {status}") in row


def test_trace_has_98_percent_and_fewer_gpu_seconds() -> None:
    trace, policies = RESULTS["trace"], SIMULATED["trace"]
    assert trace["figures"]["all"]["share"] >= 0.98
    seconds = 2 * scenarios.SCENARIOS["trace"].seconds
    expected = 3600 * policies["plimsoll"]["gpu_hours"]
    assert f"GPU-seconds: {trace['gpu_s']:.0f}, predicted {expected:.0f}; two static engines have {seconds:.0f}" in PAGE
    said = (
        ("two static engines", "static:2"),
        ("KEDA's SLO law", "keda-ttft"),
        ("HPA on concurrency", "hpa-concurrency"),
    )
    for words, policy in said:
        assert f"{words} {_percent(policies[policy]['attainment_offered'])}" in PAGE
    assert f"{100 - 100 * trace['gpu_s'] / seconds:.0f} % fewer GPU-seconds" in README


def test_tuning_and_itl() -> None:
    auto, off = RESULTS["tuning"], RESULTS["tuning"]["beside"]
    for name, one, figures in (("Auto", auto, auto["figures"]["all"]), ("Off", off, off["figures"])):
        itl = ", ".join(f"{1000 * one['itl_s'][p]:.1f}" for p in ("p50", "p95", "p99"))
        within = f"{figures['within']} of {figures['offered']}"
        assert f"| `{name}` | {within} | {itl} ms | {1000 * figures['tpot_p95']:.1f} ms |" in PAGE
    gain = auto["figures"]["all"]["within"] / off["figures"]["within"] - 1
    assert f"Goodput is {100 * gain:.0f} % higher" in PAGE


def test_transfer_slow_says_why() -> None:
    (event,) = (event for event in RESULTS["pair"]["events"] if event["reason"] == "TransferSlow")
    assert event["message"].split("ready, but ")[1].split(";")[0] in PAGE
    assert [late["ttft"] for late in RESULTS["pair"]["late"]] == [72, 0]


def test_readme_quotes_the_later_runs() -> None:
    shares = [RESULTS[name]["figures"]["all"]["share"] for name in ("trace", "tuning")]
    assert all(f"| {_percent(share)}" in README for share in shares)
    assert f", {_percent(RESULTS['tuning']['beside']['figures']['share'])} |" in README
