"""The table of the gateway's CPU beside others: how it is made, and that the page has that of the recorded rounds."""

from __future__ import annotations

import json
from pathlib import Path

from bench.gateway import peers

ROOT = Path(__file__).parents[2]


def test_peer_table_ratios_are_taken_within_a_round() -> None:
    rows = [
        {"round": number, "workload": "w", "way": way, "cpu_us": cpu_us}
        for number, found in enumerate(
            [
                {peers.REFERENCE: [100.0], "other": [30.0, 20.0]},
                {peers.REFERENCE: [400.0], "other": [150.0, 50.0]},
                {peers.REFERENCE: [100.0], "other": [200.0, 100.0]},
            ]
        )
        for way, cpu_us in found.items()
    ]
    assert peers.table(rows).splitlines()[2:] == [
        f"| {peers.REFERENCE} | 100 (1.00) |",
        "| other | 200 = 150 + 50 (0.50) |",
    ]


def test_page_has_the_peer_table_of_the_recorded_rounds() -> None:
    rows = json.loads((ROOT / "bench/gateway/data/peers.json").read_text())
    assert peers.table(rows) in (ROOT / "docs/evaluation/design-studies.md").read_text()
