"""Page and README quote what was kept of one load under Plimsoll, an HPA and KEDA's law, and what was predicted."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from e2e.gpu import policy_table, scenarios

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "e2e" / "gpu" / "data"
PAGE = " ".join((ROOT / "docs" / "evaluation" / "gpu-cluster.md").read_text().replace("**", "").split())
PART = PAGE[PAGE.index("## Other autoscalers") : PAGE.index("## Two services")]
README = " ".join((ROOT / "README.md").read_text().split())
RESULTS: dict[str, Any] = json.loads((DATA / "h200-8b-policies" / "results.json").read_text())
PREDICTED: dict[str, Any] = json.loads((DATA / "predictions-h100-8b-policies.json").read_text())


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _share(name: str) -> str:
    return _percent(RESULTS[name]["figures"]["all"]["share"])


def _predicted(name: str) -> str:
    return _percent(PREDICTED[name]["policies"][scenarios.SCENARIOS[name].policy]["attainment_offered"])


def _ordered_and_ready(name: str) -> tuple[float, float]:
    """Seconds of the load at which a second pod was ordered, and at which two were ready."""
    result = RESULTS[name]
    ready = next(
        one["at"] for one in result["changes"] if sum(pod["ready"] for pod in one["pods"]) == 2 and one["at"] > 0
    )
    scaled = [mark["at"] for mark in result["marks"] if mark["what"] == "scaled"]
    return (scaled or [_scaled(result, "ScaledUp")])[0], ready


def _scaled(result: dict[str, Any], reason: str) -> float:
    event = next(one for one in result["events"] if one["reason"] == reason)
    return datetime.fromisoformat(event["at"]).timestamp() - float(result["load_began"])


def test_policies_met_the_predicted_load(tmp_path: Path) -> None:
    step = scenarios.SCENARIOS["step"]
    digest = scenarios.write_trace(step, PREDICTED["capacity_per_s"], tmp_path / "trace.csv")
    assert {one["trace_sha256"] for one in RESULTS.values()} == {digest}


def test_page_has_the_row_of_each_policy() -> None:
    rows = list(policy_table.rows(RESULTS, PREDICTED))
    assert len(rows) == 5
    assert [row for row in rows if row not in PART] == []


def test_page_has_the_times_of_each_policy() -> None:
    order = ("step-hpa", "step-keda", "step", "step-hpa-gated", "step-keda-gated")
    times = [_ordered_and_ready(name) for name in order]
    assert f"| {' | '.join(f'{ordered:.1f}' for ordered, _ in times)} |" in PART
    assert f"| {' | '.join(f'{ready:.1f}' for _, ready in times)} |" in PART
    starts = [ready - ordered for ordered, ready in times]
    assert f"the start, {min(starts):.0f} to {max(starts):.0f} s from the order" in PART
    fallen = sum(seconds for _, seconds in scenarios.SCENARIOS["step"].phases[:2])
    assert f"{_scaled(RESULTS['step'], 'ScaledDown') - fallen:.0f} s after the load had fallen" in PART


def test_page_says_who_used_the_fewest_gpu_seconds() -> None:
    used = {name: result["gpu_s"] for name, result in RESULTS.items()}
    assert min(used, key=used.__getitem__) == "step"
    assert f"for {100 * (used['step-hpa-gated'] / used['step'] - 1):.0f} % more GPU-seconds" in PART
    within = {name: result["figures"]["all"]["within"] for name, result in RESULTS.items()}
    assert f"{within['step-hpa-gated'] - within['step']} requests more than Plimsoll" in PART
    assert all("cut" not in result["figures"]["all"]["statuses"] for result in RESULTS.values())


def test_simulator_explains_hpa_with_the_gpu_that_ran() -> None:
    after: dict[str, Any] = json.loads((DATA / "after-h200-8b-policies.json").read_text())
    found = {name: after[name]["policies"][scenarios.SCENARIOS[name].policy]["attainment_offered"] for name in RESULTS}
    assert {after[name]["trace_sha256"] for name in RESULTS} == {RESULTS["step"]["trace_sha256"]}
    measured = RESULTS["step-hpa"]["figures"]["all"]["share"]
    points = 100 * (PREDICTED["step-hpa"]["policies"]["hpa-concurrency"]["attainment_offered"] - measured)
    assert f"Why HPA stayed {points:.1f} points below its prediction" in PART
    assert f"as here, and says {_percent(found['step-hpa'])}" in PART
    assert f"{_percent(found['step'])} for Plimsoll and {_percent(found['step-keda'])} for KEDA's law" in PART


def test_readme_has_the_policies() -> None:
    assert f"one engine's SLO capacity and back | {_share('step')} | {_predicted('step')} |" in README
    for begin, names in (
        ("by KEDA's SLO law", ("step-hpa", "step-keda")),
        ("these two", ("step-hpa-gated", "step-keda-gated")),
    ):
        shares, before = ", ".join(map(_share, names)), ", ".join(map(_predicted, names))
        assert f"{begin} | {shares} | {before} |" in README


def test_page_has_the_phases_of_the_starts() -> None:
    later = [dict(RESULTS[name]["engine"][-1]["phases"]) for name in RESULTS]
    for phase, cell in (("import", "12.7 to 16.6"), ("init", "15 to 18 s")):
        found = sorted(one[phase] for one in later)
        digits = 1 if phase == "import" else 0
        assert cell.startswith(f"{found[0]:.{digits}f} to {found[-1]:.{digits}f}")
        assert cell in PAGE
    totals = sorted(sum(one.values()) for one in later)
    assert f"| {totals[0]:.1f} to {totals[-1]:.1f} |" in PAGE
    assert totals[0] == pytest.approx(36.9, abs=0.05)
