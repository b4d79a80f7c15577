"""The figures of the endpoint picker: how the table is made, that the page has it, and that the ways can be driven."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gateway import endpoint_picker
from bench.gateway.endpoint_picker import DIRECT, MODES, OWN, Row

ROOT = Path(__file__).parents[2]


def row(number: int, way: str, ms: float, per_s: int, envoy: int, picker: int) -> Row:
    quantiles = {"p50": ms, "p95": 2 * ms, "p99": 3 * ms}
    return {"round": number, "way": way, "ms": quantiles, "per_s": per_s, "cpu_us": {"envoy": envoy, "picker": picker}}


def test_table_has_medians_and_ratios_within_a_round() -> None:
    rows = []
    for number, factor in enumerate((1, 4, 2)):
        rows.append(row(number, DIRECT, 0.5 * factor, 4000, 0, 0) | {"cpu_us": {}})
        rows.append(row(number, OWN, 1.0 * factor, 1000 // factor, 100 * factor, 300 * factor))
        rows += [row(number, way, 2.0 * factor, 500 // factor, 200 * factor, 1000 * factor) for way in MODES]
    assert endpoint_picker.table(rows).splitlines()[2:] == [
        f"| {OWN} | 1.00 | 2.00 | 3.00 | 500 (1.00) | 200 + 600 (1.00) |",
        *(f"| {way} | 3.00 | 6.00 | 9.00 | 250 (0.50) | 400 + 2000 (3.00) |" for way in MODES),
    ]


def test_page_has_the_table_of_the_recorded_rounds() -> None:
    rows = json.loads((ROOT / "bench/gateway/data/endpoint_picker.json").read_text())
    assert endpoint_picker.table(rows) in (ROOT / "docs/evaluation/design-studies.md").read_text()


@pytest.mark.envoy
def test_round_drives_all_ways() -> None:
    rows = endpoint_picker.run(rounds=1, seconds=0.1)
    assert [one["way"] for one in rows] == [DIRECT, OWN, *MODES]
    assert all(one["per_s"] > 0 for one in rows)
    assert all(cpu_us > 0 for one in rows for cpu_us in one["cpu_us"].values())
