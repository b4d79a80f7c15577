"""Prediction of a scenario with adapters has the requests of its run, and the limit of adapters at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from e2e.gpu import predict_adapters, run, scenarios

DATA = Path(__file__).resolve().parents[2] / "e2e" / "gpu" / "data"
LORA = scenarios.SCENARIOS["lora"]
WRITTEN: dict[str, Any] = json.loads((DATA / "predictions-h200-8b-adapters.json").read_text())


def test_names_are_those_that_the_client_gives_in_turn() -> None:
    first, second = predict_adapters.loads(LORA, 10.0)
    assert [one.adapter for one in first[:5]] == ["", "a1", "a2", "a3", ""]
    assert [one.adapter for one in second[:4]] == ["a4", "a5", "a6", "a4"]


def test_prediction_was_written_for_the_loads_of_the_scenario() -> None:
    first, second = predict_adapters.loads(LORA, WRITTEN["capacity_per_s"])
    offered = [WRITTEN["lora"][load]["offered"] for load in ("first", "beside")]
    assert offered == [len(first), len(second)]
    assert len(WRITTEN["lora"]["first"]["names"] | WRITTEN["lora"]["beside"]["names"]) == len(scenarios.ADAPTERS) + 1


def test_adapters_beyond_the_places_wait_for_their_turn() -> None:
    found = predict_adapters.predict(run.shortened(LORA, 0.5), 10.0, "h200-8b")
    assert found["beside"]["rejected"]["adapters_busy"] > 0
    assert found["first"]["names"][scenarios.SERVICE] > 0.95  # the model itself needs no place
    assert found["beside"]["within_share"] < 0.95
