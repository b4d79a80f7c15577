"""A record becomes a line, and lines survive the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from e2e.demo import records
from e2e.lib.request_log import RequestRecord, RequestResult
from tests.demo.demo_records import make_request, make_sample, make_shed


def record(outcome: RequestResult, status: int | None, **more: object) -> RequestRecord:
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
    return RequestRecord(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("outcome", "status", "line", "refused", "broken"),
    [
        (RequestResult.OK, 200, "ok", False, False),
        (RequestResult.REJECTED, 429, "shed", True, False),
        (RequestResult.REJECTED, 503, "shed", True, False),
        (RequestResult.REJECTED, 504, "shed", True, False),
        (RequestResult.REJECTED, 404, "refused", True, False),
        (RequestResult.CUT, 200, "cut", False, True),
        (RequestResult.UNREACHABLE, None, "unreachable", False, True),
        (RequestResult.TIMEOUT, 200, "timeout", False, False),
    ],
)
def test_request_row_outcome_follows_record(
    outcome: RequestResult, status: int | None, line: str, refused: bool, broken: bool
) -> None:
    made = records.request_line(record(outcome, status), "fleet", 100.0)
    assert (made.outcome, made.rejected, made.broken, made.shed) == (line, refused, broken, line == "shed")
    assert (made.sent_s, made.ended_s, made.prompt_tokens, made.request_class, made.tenant) == (
        5.0,
        7.5,
        77,
        "chat",
        "t3",
    )


def test_rows_round_trip_through_file(tmp_path: Path) -> None:
    rows, looks = [make_request(1.25), make_shed(2.5)], [make_sample(0.0), make_sample(1.0, 2, 1, 1)]
    records.write(tmp_path / "requests.jsonl", rows)
    records.write(tmp_path / "replicas.jsonl", looks)
    assert records.read_requests(tmp_path / "requests.jsonl") == rows
    assert records.read_replicas(tmp_path / "replicas.jsonl") == looks


def test_rows_have_documented_keys(tmp_path: Path) -> None:
    records.write(tmp_path / "r", [make_request()])
    records.write(tmp_path / "l", [make_sample(0.0)])
    keys = "id run class tenant sent_s prompt_tokens output_tokens_asked status outcome retry_after_s ttft_s tpot_s"
    promised = {*keys.split(), "output_tokens", "finish_reason"}
    assert promised <= json.loads((tmp_path / "r").read_text()).keys()
    looked = {"run", "t_s", "tier", "desired", "ready", "starting", "draining"}
    assert set(json.loads((tmp_path / "l").read_text())) == looked
