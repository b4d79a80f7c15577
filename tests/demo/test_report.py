"""Every figure of a report follows from its two files of lines."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from e2e.demo import figures, records, report
from e2e.demo.criteria import Facts, assess
from e2e.demo.observer import OperatorMessage
from plimsoll.cli.html_report import render_page
from tests.demo.demo_records import make_request, make_sample, make_shed

FACTS = Facts(figures.Targets(1.0, 0.05), {"decode": 4}, 120.0, figures.TimeSpan(90, 120), (figures.TimeSpan(50, 60),))


def run() -> tuple[list[records.RequestLine], list[records.ReplicaSample]]:
    requests = [
        make_request(t, ttft_s=0.01 * t, tpot_s=0.001 * (t % 60), request_class="ab"[t % 2]) for t in range(110)
    ]
    requests += [make_shed(t + 0.5) for t in range(30, 40)] + [make_request(55.5, outcome="cut", ended_s=56.0)]
    looks = [make_sample(t, 2 if 30 <= t < 80 else 1, 1, 1 if 30 <= t < 60 else 0) for t in range(120)]
    return sorted(requests, key=lambda row: row.sent_s), looks


def test_summary_is_reproducible_from_written_rows(tmp_path: Path) -> None:
    requests, looks = run()
    records.write(tmp_path / "requests.jsonl", requests)
    records.write(tmp_path / "replicas.jsonl", looks)
    said = json.loads(
        json.dumps(
            {
                "facts": report.facts_json(FACTS),
                "figures": report.summary(requests, looks, FACTS),
                "criteria": [one.found for one in assess(requests, looks, FACTS, None)],
            }
        )
    )
    rows, path = records.read_requests(tmp_path / "requests.jsonl"), records.read_replicas(tmp_path / "replicas.jsonl")
    facts = report.facts_from(said["facts"])
    assert facts == FACTS
    assert json.loads(json.dumps(report.summary(rows, path, facts))) == said["figures"]
    assert [one.found for one in assess(rows, path, facts, None)] == said["criteria"]


def test_summary_matches_hand_computed_figures() -> None:
    requests, looks = run()
    found = report.summary(requests, looks, FACTS)
    assert (found["offered"], found["shed"], found["broken"], found["admitted"]) == (121, 10, 1, 111)
    assert found["replica_seconds_total"] == 120 + 30
    assert found["attainment_by_class"].keys() == {"a", "b", "code"}
    assert [change["after"] for change in found["changes"]] == [2, 1]


def test_page_is_self_contained_and_escapes_text() -> None:
    requests, looks = run()
    parts = [
        ("The run <1>", report.charts(requests, looks, FACTS, [(90, 120, "constant")])),
        ("Must hold", report.criteria_table(assess(requests, looks, FACTS, None))),
        ("Figures", report.figures_table(report.summary(requests, looks, FACTS))),
        ("Events", report.messages_table([OperatorMessage(3.0, "ScaledUp", "1 -> 2 & <script>")])),
    ]
    whole = render_page("Demo", parts)
    assert "<script" not in whole
    assert "src=" not in whole
    assert "href=" not in whole
    svg = whole[whole.index("<svg") : whole.index("</svg>") + 6]
    titles = [text.text for text in ElementTree.fromstring(svg).iter() if text.attrib.get("font-weight") == "bold"]
    assert len(titles) == 4
