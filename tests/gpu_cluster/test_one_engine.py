"""Page quotes what was kept of one engine under overload, killed, scaled to zero, and started again and again."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from e2e.gpu import scenarios

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "e2e" / "gpu" / "data"
PAGE = " ".join((ROOT / "docs" / "evaluation" / "gpu-cluster.md").read_text().replace("**", "").split())
PART = PAGE[PAGE.index("## One engine") : PAGE.index("## Two services")]
RESULTS: dict[str, Any] = json.loads((DATA / "h200-8b-second" / "results.json").read_text())
PREDICTED: dict[str, Any] = json.loads((DATA / "predictions-h200-8b-second.json").read_text())
COUNTED: dict[str, Any] = json.loads((DATA / "predictions-second-by-hand.json").read_text())
GOAL_S = 35.0
PHASES = ("import", "load", "init", "api", "warmup")


def _row(phases: list[tuple[str, float]]) -> str:
    seconds = dict(phases)
    assert list(seconds) == ["launch", *PHASES]
    return f"| {' | '.join(f'{seconds[name]:.1f}' for name in PHASES)} | {sum(seconds.values()):.1f} |"


def _figures(name: str) -> dict[str, Any]:
    return dict(RESULTS[name]["figures"]["all"])


def test_load_was_the_predicted_one(tmp_path: Path) -> None:
    overload = scenarios.SCENARIOS["overload"]
    digest = scenarios.write_trace(overload, PREDICTED["capacity_per_s"], tmp_path / "trace.csv")
    assert RESULTS["overload"]["trace_sha256"] == PREDICTED["overload"]["trace_sha256"] == digest


@pytest.mark.parametrize(
    ("name", "predicted"),
    [
        ("overload", f"{100 * PREDICTED['overload']['policies']['plimsoll']['attainment_offered']:.1f} %"),
        ("kill", f"{100 * COUNTED['kill']['within_share']:.0f} %"),
    ],
)
def test_page_has_the_row_of_each_load(name: str, predicted: str) -> None:
    found = _figures(name)
    assert f"| {found['offered']:,} | {100 * found['share']:.1f} %, predicted {predicted} |" in PART
    assert f"| {1000 * found['ttft_p95']:,.0f} ms | {1000 * found['tpot_p95']:.1f} ms |" in PART
    statuses = [
        f"{count:,} {'cut' if status == 'cut' else f'× {status}'}" for status, count in found["statuses"].items()
    ]
    assert ", ".join(statuses) in PART


def test_page_has_what_was_admitted_under_overload() -> None:
    phase = RESULTS["overload"]["figures"]["1: 1.6 for 60 s"]
    late = RESULTS["overload"]["late"][1]
    admitted, seconds = phase["statuses"]["200"], 60.0
    assert f"{100 * phase['within'] / admitted:.1f} % of the admitted were within the SLO" in PART
    assert (
        f"{phase['within'] / seconds:.1f} requests/s of all. {late['ttft']} missed TTFT, {late['tpot']} missed" in PART
    )
    first_s = RESULTS["overload"]["codes"]["overloaded"]["first_s"]
    assert f"first rejection was {first_s - 30.0:.1f} s after the rise" in PART


def test_page_has_what_the_kill_cost() -> None:
    kill = RESULTS["kill"]
    killed_s = next(mark["at"] for mark in kill["marks"] if mark["what"] == "killed")

    def after_kill_s(when: str) -> float:
        return datetime.fromisoformat(when).timestamp() - float(kill["load_began"]) - killed_s

    ready_s = after_kill_s(next(event["at"] for event in kill["events"] if event["reason"] == "Recovered"))
    expected = next(one["tier"]["startingPods"] for one in kill["changes"] if "startingPods" in one["tier"])
    assert f"ready again {ready_s:.0f} s later" in PART
    assert f"expected to end {after_kill_s(expected.split()[-1]):.0f} s after the kill" in PART
    rejected, last_s = kill["figures"]["all"]["statuses"]["503"], kill["codes"]["model_starting"]["last_s"]
    assert f"{rejected} requests got 503 in the first {last_s - killed_s:.0f} s" in PART
    assert f"{kill['late'][0]['ttft']} were answered late" in PART


def test_no_client_was_rejected_at_zero() -> None:
    zero = RESULTS["zero"]
    assert zero["gateway"]["rejected"] == {}
    assert f"answered after {max(zero['held_s']):.1f} s, predicted {COUNTED['zero']['held_s']} s" in PART
    assert f"at zero {zero['to_zero_s']:.0f} s after" in PART


def test_page_has_each_start_and_the_goal_is_met() -> None:
    again = RESULTS["starts"]["starts"]
    assert len(again) == scenarios.SCENARIOS["starts"].starts
    for start in again:
        assert f"{_row(start['phases'])} {start['until_ready_s']:.1f} |" in PART
    others = [RESULTS[name]["engine"][0]["phases"] for name in ("overload", "zero", "kill")]
    assert [row for row in map(_row, others) if row not in PART] == []
    seconds = [sum(dict(one["phases"]).values()) for one in again] + [sum(dict(one).values()) for one in others[1:]]
    assert f"The goal of {GOAL_S:.0f} s is met: {min(seconds):.1f} to {max(seconds):.1f} s" in PART
    assert max(seconds) < GOAL_S
