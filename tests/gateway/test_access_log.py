"""Lines of Envoy's access log, and what they say about a request."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plimsoll.gateway.envoy.access_log import AccessLogReader, AccessRecord, RequestOutcome

LINE = (
    b'{"request_id":"ab-1","upstream":"10.0.0.1:8000","cluster":"pick/team/chat","status":200,"flags":"-","attempts":1,'
    b'"ttft_us":1500,"duration_us":90000,"sent_bytes":100,"client_request_id":"x","details":"via_upstream"}\n'
)


def records(*pieces: bytes) -> tuple[list[AccessRecord], int]:
    taken: list[AccessRecord] = []
    log = AccessLogReader(Path("unused"), taken.append)
    for piece in pieces:
        log.feed(piece)
    return taken, log.invalid_lines


def test_parse_line_is_one_record() -> None:
    (record,), bad = records(LINE)
    assert (record.request_id, record.upstream, record.status, record.ttft_us, bad) == (
        "ab-1",
        "10.0.0.1:8000",
        200,
        1500,
        0,
    )


async def test_many_lines_are_read_over_several_turns_of_the_loop(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    taken: list[AccessRecord] = []
    log = AccessLogReader(tmp_path / "fifo", taken.append)
    log.open()
    try:
        os.write(log._fd, 200 * LINE)
        seen = []
        while len(taken) < 200:
            seen.append(len(taken))
            await asyncio.sleep(0)
    finally:
        log.close()
    assert len({count for count in seen if count}) > 3


@given(st.lists(st.integers(1, 300), max_size=12))
def test_parse_chunk_boundaries_do_not_matter(cuts: list[int]) -> None:
    stream, pieces = LINE * 5, []
    for cut in cuts:
        pieces.append(stream[:cut])
        stream = stream[cut:]
    taken, bad = records(*pieces, stream)
    assert (len(taken), bad) == (5, 0)


@pytest.mark.parametrize(
    ("line", "ttft_s", "e2e_s"),
    [
        ({"status": 200, "flags": "-", "ttft_us": 1500, "duration_us": 90_000}, 0.0015, 0.09),
        ({"status": 200, "flags": "-", "ttft_us": 1500, "duration_us": None}, 0.0015, None),
        ({"status": 404, "flags": "-", "ttft_us": 1500, "duration_us": 1600}, None, None),
        ({"status": 200, "flags": "UC", "ttft_us": 1500, "duration_us": 90_000}, None, None),  # cut short
        ({"status": 200, "flags": "DC", "ttft_us": 1500, "duration_us": 90_000}, None, None),
        ({"status": 503, "flags": "-", "ttft_us": 1500, "duration_us": 90_000}, None, None),
    ],
)
def test_record_only_complete_success_has_latencies(
    line: dict[str, object], ttft_s: float | None, e2e_s: float | None
) -> None:
    (record,), _ = records(json.dumps(line).encode() + b"\n")
    assert (record.ttft_s, record.e2e_s) == (ttft_s, e2e_s)


def test_parse_broken_line_is_counted_and_skipped() -> None:
    taken, bad = records(LINE[50:], LINE, b"\x00\xff\n", b"[]\n", b"\n", LINE)
    assert (len(taken), bad) == (2, 3)


def test_parse_missing_fields_are_none() -> None:
    (record,), _ = records(b'{"request_id":null,"upstream":null,"status":0,"ttft_us":null,"flags":"DC"}\n')
    assert (record.request_id, record.upstream, record.ttft_us) == (None, None, None)


@pytest.mark.parametrize(
    ("code", "flags", "outcome"),
    [
        (200, "-", RequestOutcome.SUCCEEDED),
        (400, "-", RequestOutcome.REJECTED),
        (429, "-", RequestOutcome.REJECTED),
        (500, "-", RequestOutcome.FAILED),
        (503, "URX", RequestOutcome.FAILED),
        (200, "UPE", RequestOutcome.FAILED),
        (200, "UC", RequestOutcome.FAILED),
        (503, "UC", RequestOutcome.FAILED),
        (503, "UF,URX", RequestOutcome.FAILED),
        (200, "SI", RequestOutcome.IDLE_TIMEOUT),
        (504, "UMSDR", RequestOutcome.DEADLINE_EXCEEDED),
        (200, "DC", RequestOutcome.CANCELLED),
        (0, "DC", RequestOutcome.CANCELLED),
        (200, "DR", RequestOutcome.CANCELLED),
        (0, "-", RequestOutcome.FAILED),
    ],
)
def test_record_outcome_follows_code_and_flags(code: int, flags: str, outcome: RequestOutcome) -> None:
    assert AccessRecord(request_id="t", upstream="h", status=code, flags=flags).outcome is outcome


def test_record_reset_before_first_byte_is_not_cut_stream() -> None:
    assert AccessRecord(flags="UC", status=503).reset_before_first_byte
    assert not AccessRecord(flags="UC", status=200, ttft_us=10).reset_before_first_byte
    assert not AccessRecord(flags="UF", status=503).reset_before_first_byte
