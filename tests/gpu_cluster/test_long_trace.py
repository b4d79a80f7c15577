"""The long trace, as it was predicted before it ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from e2e.gpu import scenarios

DATA = Path(__file__).resolve().parents[2] / "e2e" / "gpu" / "data"
PREDICTED: dict[str, Any] = json.loads((DATA / "predictions-h100-8b-long-trace.json").read_text())
SCENARIO = scenarios.SCENARIOS["long-trace"]


def test_long_trace_is_the_predicted_one(tmp_path: Path) -> None:
    digest = scenarios.write_trace(SCENARIO, PREDICTED["capacity_per_s"], tmp_path / "trace.csv")
    assert digest == PREDICTED["long-trace"]["trace_sha256"]


def test_long_trace_has_the_load_of_its_phases() -> None:
    requests, begin, tokens = scenarios.trace(SCENARIO, 1.0), 0.0, []
    for share, seconds in SCENARIO.phases:
        part = [row.prompt for row in requests if begin <= row.at_s < begin + seconds]
        tokens.append(sum(part) / seconds / share)
        begin += seconds
    assert tokens == pytest.approx([tokens[0]] * len(tokens), rel=0.15)
