"""The table of what the gateway adds to a request, and that the page has that of the recorded rounds."""

from __future__ import annotations

import json
from pathlib import Path

from bench.gateway import request_cost

ROOT = Path(__file__).parents[2]


def test_request_cost_ratios_are_taken_within_a_round() -> None:
    found = (
        [(request_cost.OWNED, 100.0), (request_cost.HOP, 150.0)],
        [
            (request_cost.OWNED, 400.0),
            (request_cost.HOP, 480.0),
        ],
    )
    rows = [
        {"round": number, "rate": 50.0, "way": way, "cpu_us": cpu_us, "added_ms": {"p50": number + 1.0, "p99": 4.0}}
        for number, ways in enumerate(found)
        for way, cpu_us in ways
    ]
    assert request_cost.table(rows).splitlines()[2:] == [
        f"| {request_cost.OWNED} | 1.50 (1.00 to 2.00) | 4.00 (4.00 to 4.00) | 250 (100 to 400) |  |",
        f"| {request_cost.HOP} | 1.50 (1.00 to 2.00) | 4.00 (4.00 to 4.00) | 315 (150 to 480) | 1.35 (1.20 to 1.50) |",
    ]


def test_page_has_the_request_cost_of_the_recorded_rounds() -> None:
    rows = json.loads((ROOT / "bench/gateway/data/request_cost.json").read_text())
    assert request_cost.table(rows) in (ROOT / "docs/evaluation/design-studies.md").read_text()
