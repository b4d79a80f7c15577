"""The rule that says whether a request went well."""

from __future__ import annotations

import json

import pytest

from e2e.lib.request_log import (
    RequestLog,
    RequestRecord,
    RequestResult,
    ResponseTrace,
    SseParser,
    classify,
    nearest_rank,
)


def trace_of(*events: object, status: int | None = 200, broke: str = "", done: bool = True) -> ResponseTrace:
    made = ResponseTrace(status=status, transport_error=broke)
    for event in events:
        made.add_event(json.dumps(event))
    if done:
        made.add_event("[DONE]")
    return made


def chunk(finish: str | None = None, content: str = "a") -> dict[str, object]:
    return {"choices": [{"delta": {"content": content}, "finish_reason": finish}]}


def usage(tokens: int) -> dict[str, object]:
    return {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens}}


WHOLE = (chunk(), chunk("length"), usage(2))


@pytest.mark.parametrize(
    ("what", "outcome"),
    [
        (trace_of(*WHOLE), RequestResult.OK),
        (trace_of(*WHOLE, done=False), RequestResult.NO_DONE),
        (trace_of(chunk(), broke="reset", done=False), RequestResult.CUT),
        (trace_of(*WHOLE, broke="reset"), RequestResult.CUT),
        (trace_of(chunk(), {"error": {"message": "dead"}}, broke="reset", done=False), RequestResult.ERROR_EVENT),
        (trace_of({"error": {"message": "dead"}}), RequestResult.ERROR_EVENT),
        (trace_of(chunk(), chunk("abort"), usage(2)), RequestResult.ABORTED),
        (trace_of(chunk(), chunk("stop"), usage(2)), RequestResult.ABORTED),
        (trace_of(chunk(), usage(2)), RequestResult.ABORTED),
        (trace_of(chunk("length"), usage(1)), RequestResult.SHORT),
        (trace_of(chunk(), chunk(), chunk("length")), RequestResult.SHORT),
        (trace_of(status=503, done=False), RequestResult.REJECTED),
        (trace_of(status=None, broke="refused", done=False), RequestResult.UNREACHABLE),
        (ResponseTrace(status=200, timed_out=True), RequestResult.TIMEOUT),
    ],
)
def test_judge_assigns_outcome(what: ResponseTrace, outcome: RequestResult) -> None:
    assert classify(what, asked_tokens=2) is outcome


def test_tokens_are_counted_by_usage_not_by_events() -> None:
    made = trace_of(chunk(content="several tokens in one event"), chunk("length", ""), usage(7))
    assert classify(made, 7) is RequestResult.OK
    assert "".join(made.text) == "several tokens in one event"


@pytest.mark.parametrize("data", ["[1]", "3", "not json"])
def test_event_other_than_object_is_an_error(data: str) -> None:
    with pytest.raises(ValueError, match=r"no object|Expecting"):
        ResponseTrace().add_event(data)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_sse_parser_handles_any_chunk_boundaries(size: int) -> None:
    wire = b'data: {"a": "\xc3\xa9"}\r\n\r\n: ping\n\nevent: x\ndata: two\n\ndata:[DONE]\n\n'
    parser = SseParser()
    pieces = [wire[i : i + size] for i in range(0, len(wire), size)]
    assert [data for piece in pieces for data in parser.feed(piece)] == ['{"a": "é"}', "two", "[DONE]"]


def record(n: int, outcome: RequestResult = RequestResult.OK, sent_at: float = 0.0) -> RequestRecord:
    return RequestRecord(
        id=f"r{n}",
        source="t",
        model="m",
        sent_at=sent_at,
        ended_at=sent_at + n,
        ttft_s=n / 10,
        status=200,
        outcome=outcome,
        asked_tokens=4,
        prompt_tokens=10,
        output_tokens=4,
        finish_reason="length",
        events=3,
        text="",
        detail="",
    )


def test_totals_separate_kinds_of_failure() -> None:
    ledger = RequestLog(
        [
            record(1),
            record(2),
            record(3, RequestResult.CUT),
            record(4, RequestResult.CUT),
            record(5, RequestResult.NO_DONE),
        ]
    )
    totals = ledger.totals()
    assert (totals["sent"], totals["ok"], totals["failed"]) == (5, 2, {"cut": 2, "no_done": 1})
    assert (totals["prompt_tokens"], totals["ttft_p50_s"], totals["duration_p95_s"]) == (50, 0.1, 2)
    assert [r.id for r in ledger.failures] == ["r3", "r4", "r5"]


def test_empty_request_log_has_totals() -> None:
    assert RequestLog().totals()["ttft_p50_s"] is None
    assert RequestLog().summary().startswith("0 of 0 requests ok (none failed)")


def test_since_includes_requests_sent_at_or_after() -> None:
    ledger = RequestLog(record(1, sent_at=at) for at in (1.0, 2.0, 3.0))
    assert len(ledger.since(2.0).records) == 2


def test_overlaps_includes_any_common_moment() -> None:
    assert record(2, sent_at=10).overlaps(11, 15)
    assert record(2, sent_at=10).overlaps(5, 10)
    assert not record(2, sent_at=10).overlaps(13, 15)
    assert not record(2, sent_at=10).overlaps(5, 9)


@pytest.mark.parametrize(("q", "value"), [(50, 2.0), (95, 4.0), (25, 1.0), (100, 4.0)])
def test_percentile_is_a_value_of_the_list(q: int, value: float) -> None:
    assert nearest_rank([1.0, 2.0, 3.0, 4.0], q) == value


def test_dump_is_one_flat_row_per_request() -> None:
    [row] = [json.loads(line) for line in RequestLog([record(1)]).dump().splitlines()]
    assert row["outcome"] == "ok"
    assert all(not isinstance(value, dict | list) for value in row.values())


def test_responding_model_is_the_responses_own_word() -> None:
    """Also where another model than the requested one responded."""
    streamed = trace_of({"model": "spare", "choices": []}, usage(1))
    whole = ResponseTrace()
    answer = {"model": "spare", "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
    whole.add_response({**answer, "choices": [{"finish_reason": "length", "text": "a"}]}, at=1.0)
    assert streamed.responding_model == whole.responding_model == "spare"


def test_most_at_engines_counts_from_first_token_to_end() -> None:
    def one(sent_at: float, ttft_s: float | None, ended_at: float, outcome: RequestResult) -> RequestRecord:
        text = {"finish_reason": None, "events": 0, "text": "", "detail": ""}
        counts = {"asked_tokens": 1, "prompt_tokens": 1, "output_tokens": 1}
        named = {"id": "", "source": "", "model": "", "status": 200, "outcome": outcome}
        times = {"sent_at": sent_at, "ended_at": ended_at, "ttft_s": ttft_s}
        return RequestRecord(**named, **times, **counts, **text)  # type: ignore[arg-type]

    served = [one(0.0, 1.0, 3.0, RequestResult.OK), one(0.0, 2.0, 4.0, RequestResult.OK)]
    other = [one(0.0, 3.0, 5.0, RequestResult.OK), one(0.0, None, 9.0, RequestResult.REJECTED)]
    assert RequestLog([*served, *other]).most_at_engines() == 2
    assert RequestLog().most_at_engines() == 0
