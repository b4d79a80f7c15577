"""A record becomes a line, and lines survive the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e.demo import lines
from e2e.lib.ledger import Outcome, Record
from tests.demo.made import look, request, shed


def record(outcome: Outcome, status: int | None, **more: object) -> Record:
    fields: dict[str, object] = {
        "id": "a",
        "source": "fleet",
        "model": "m",
        "sent_at": 105.0,
        "ended_at": 107.5,
        "ttft_s": 0.25,
        "status": status,
        "outcome": outcome,
        "asked_tokens": 9,
        "prompt_tokens": 0,
        "output_tokens": 9,
        "finish_reason": "length",
        "events": 3,
        "text": "x",
        "detail": "",
        "labels": (("class", "chat"), ("tenant", "t3"), ("prompt_tokens", "77")),
        **more,
    }
    return Record(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outcome", "status", "line", "refused", "broken"),
    [
        (Outcome.OK, 200, "ok", False, False),
        (Outcome.REFUSED, 429, "shed", True, False),
        (Outcome.REFUSED, 503, "shed", True, False),
        (Outcome.REFUSED, 504, "shed", True, False),
        (Outcome.REFUSED, 404, "refused", True, False),
        (Outcome.CUT, 200, "cut", False, True),
        (Outcome.UNREACHABLE, None, "unreachable", False, True),
        (Outcome.TIMEOUT, 200, "timeout", False, False),
    ],
)
def test_request_row_outcome_follows_record(
    outcome: Outcome, status: int | None, line: str, refused: bool, broken: bool
) -> None:
    made = lines.request(record(outcome, status), "fleet", 100.0)
    assert (made.outcome, made.refused, made.broken, made.shed) == (line, refused, broken, line == "shed")
    assert (made.sent_s, made.ended_s, made.prompt_tokens, made.klass, made.tenant) == (5.0, 7.5, 77, "chat", "t3")


def test_rows_round_trip_through_file(tmp_path: Path) -> None:
    rows, looks = [request(1.25), shed(2.5)], [look(0.0), look(1.0, 2, 1, 1)]
    lines.write(tmp_path / "requests.jsonl", rows)
    lines.write(tmp_path / "replicas.jsonl", looks)
    assert lines.read_requests(tmp_path / "requests.jsonl") == rows
    assert lines.read_replicas(tmp_path / "replicas.jsonl") == looks


def test_rows_have_documented_keys(tmp_path: Path) -> None:
    lines.write(tmp_path / "r", [request()])
    lines.write(tmp_path / "l", [look(0.0)])
    keys = "id run class tenant sent_s prompt_tokens output_tokens_asked status outcome retry_after_s ttft_s tpot_s"
    promised = {*keys.split(), "output_tokens", "finish_reason"}
    assert promised <= json.loads((tmp_path / "r").read_text()).keys()
    looked = {"run", "t_s", "tier", "desired", "ready", "starting", "draining"}
    assert set(json.loads((tmp_path / "l").read_text())) == looked
