"""The page quotes what was kept of the failures on two GPUs, and predictions that were written before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from e2e.gpu import scenarios

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "e2e" / "gpu" / "data"
PAGE = " ".join((ROOT / "docs" / "evaluation" / "gpu-cluster.md").read_text().split())
RESULTS: dict[str, Any] = json.loads((DATA / "h100-8b-two" / "results.json").read_text())
PREDICTED: dict[str, Any] = json.loads((DATA / "predictions-h100-8b-failures.json").read_text())
BY_HAND: dict[str, Any] = json.loads((DATA / "predictions-two-gpus-by-hand.json").read_text())


@pytest.mark.parametrize("name", sorted(RESULTS))
def test_each_trace_of_failures_is_the_predicted_one(name: str, tmp_path: Path) -> None:
    digest = scenarios.write_trace(scenarios.SCENARIOS[name], PREDICTED["capacity_per_s"], tmp_path / "trace.csv")
    assert digest == RESULTS[name]["trace_sha256"] == PREDICTED[name]["trace_sha256"]


@pytest.mark.parametrize("name", sorted(RESULTS))
def test_row_of_failures_quotes_result_and_prediction(name: str) -> None:
    part = PAGE[PAGE.index("## Failures") :]
    row = part[part.index(f"| `{name}`") :]
    row = row[: row.index(" | |")].replace("**", "") if " | |" in row else row
    figures = RESULTS[name]["figures"]["all"]
    assert f"| {figures['offered']:,} |" in row
    assert f"{100 * figures['share']:.1f} %, predicted {100 * BY_HAND[name]['within_share']:.0f} %" in row
    assert f"| {figures['ttft_p95'] * 1000:,.0f} ms | {figures['tpot_p95'] * 1000:.1f} ms |" in row
    for status, count in figures["statuses"].items():
        assert (f"{count} cut" if status == "cut" else f"{count:,} × {status}") in row
