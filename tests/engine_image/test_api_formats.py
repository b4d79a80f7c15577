"""The other APIs behind the middleware: bad ends look bad to their SDKs, errors have their shape, forms their name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.remote_prefill import prefill_request_body
from tests.engine_image.middleware_harness import (
    ADDRESS,
    completion_engine,
    make_harness,
    respond_with,
    streaming_engine,
)

MESSAGES, RESPONSES, TRANSCRIPTIONS = "/v1/messages", "/v1/responses", "/v1/audio/transcriptions"
ASK = {"model": "tiny", "stream": True}
FORM_KIND = {"content-type": "multipart/form-data; boundary=b0"}


def named_event(kind: str, **fields: Any) -> bytes:
    """An event as vLLM writes it for these APIs."""
    return (
        f"event: {kind}\ndata: ".encode()
        + json.dumps({"type": kind, **fields}, separators=(",", ":")).encode()
        + b"\n\n"
    )


def message_end(reason: str | None) -> list[bytes]:
    return [
        named_event("message_delta", delta={"stop_reason": reason, "stop_sequence": None}),
        named_event("message_stop"),
    ]


START = named_event("message_start", message={"model": "own", "stop_reason": None})
DELTA = named_event(
    "content_block_delta", index=0, delta={"type": "text_delta", "text": 'event: error "stop_reason":null'}
)
CREATED = named_event("response.created", response={"model": "own", "status": "in_progress"})


@pytest.mark.parametrize(
    ("path", "chunks"),
    [
        (MESSAGES, [START, DELTA, *message_end("max_tokens")]),
        (RESPONSES, [CREATED, DELTA, named_event("response.completed", response={"status": "incomplete"})]),
    ],
)
async def test_good_stream_of_each_api_passes(tmp_path: Path, path: str, chunks: list[bytes]) -> None:
    async with make_harness(streaming_engine(chunks), "serve", tmp_path) as serve:
        got = await serve.send(ASK, path)
    assert (got.body, got.complete) == (b"".join(chunks), True)


@pytest.mark.parametrize(
    ("path", "chunks", "reason"),
    [
        (MESSAGES, [START, DELTA, *message_end(None)], "abort"),
        (MESSAGES, [START, DELTA], "unfinished"),
        (RESPONSES, [CREATED, DELTA, named_event("response.completed", response={"status": "cancelled"})], "abort"),
        (RESPONSES, [CREATED, DELTA], "unfinished"),
    ],
)
async def test_bad_end_of_each_api_is_an_error_event_and_a_cut(
    tmp_path: Path, path: str, chunks: list[bytes], reason: str
) -> None:
    raw = b"".join(chunks)
    async with make_harness(
        streaming_engine(raw[at : at + 7] for at in range(0, len(raw), 7)), "serve", tmp_path
    ) as one:
        got = await one.send(ASK, path)
    kind, _, data = got.body.decode().rstrip("\n").rpartition("\n\n")[2].partition("\ndata: ")
    assert kind == "event: error"
    assert json.loads(data)["type"] == "error"
    assert "message_stop" not in got.body.decode()
    assert not got.complete
    assert one.count("stream_errors", reason=reason) == 1


ECHO = {"metadata": {"status": "cancelled"}, "tools": [{"parameters": {"status": "cancelled"}}]}
COMPLETED = named_event("response.completed", response={**ECHO, "status": "completed"})
CANCELLED = named_event("response.completed", response={**ECHO, "status": "cancelled"})


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_response_stream_may_echo_words_of_an_abort(tmp_path: Path, size: int) -> None:
    raw = named_event("response.created", response={**ECHO, "status": "in_progress"}) + DELTA + COMPLETED
    chunks = [raw[at : at + size] for at in range(0, len(raw), size)]
    async with make_harness(streaming_engine(chunks), "serve", tmp_path) as serve:
        got = await serve.send(ASK, RESPONSES)
    assert (got.body, got.complete) == (raw, True)
    assert serve.count("stream_errors", reason="abort") == 0


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_response_stream_is_cut_after_its_cancelled_event(tmp_path: Path, size: int) -> None:
    raw = DELTA + CANCELLED + named_event("response.more")
    chunks = [raw[at : at + size] for at in range(0, len(raw), size)]
    async with make_harness(streaming_engine(chunks), "serve", tmp_path) as serve:
        got = await serve.send(ASK, RESPONSES)
    assert got.body.startswith(DELTA + CANCELLED + b"event: error\n")
    assert b"response.more" not in got.body
    assert not got.complete
    assert serve.count("stream_errors", reason="abort") == 1


@pytest.mark.parametrize("data", [b"[" * 100_000, b"[]", b'{"response":[]}', b"{"])
async def test_final_event_that_is_no_response_passes(tmp_path: Path, data: bytes) -> None:
    raw = b"event: response.completed\ndata: " + data + b"\n\n"
    async with make_harness(streaming_engine([raw]), "serve", tmp_path) as serve:
        got = await serve.send(ASK, RESPONSES)
    assert (got.body, got.complete) == (raw, True)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (RESPONSES, {**ECHO, "status": "completed"}, 200),
        (RESPONSES, {**ECHO, "status": "cancelled"}, 503),
        (RESPONSES, ["cancelled"], 200),
        (MESSAGES, {"type": "message", "content": [{"type": "tool_use", "input": {"stop_reason": "a"}}]}, 503),
        (MESSAGES, {"type": "message", "content": [], "stop_reason": "tool_use"}, 200),
    ],
)
async def test_whole_body_is_judged_by_its_own_status(tmp_path: Path, path: str, body: Any, status: int) -> None:
    engine = respond_with(200, json.dumps(body, separators=(",", ":")).encode())
    async with make_harness(engine, "serve", tmp_path) as serve:
        got = await serve.send({"model": "tiny"}, path)
    assert got.status == status


async def test_whole_body_too_deep_to_read_passes(tmp_path: Path) -> None:
    raw = b'{"status":"cancelled","tools":' + b"[" * 100_000
    async with make_harness(respond_with(200, raw), "serve", tmp_path) as serve:
        got = await serve.send({"model": "tiny"}, RESPONSES)
    assert (got.status, got.body) == (200, raw)


async def test_message_stream_that_begins_with_an_error_goes_elsewhere(tmp_path: Path) -> None:
    chunk = named_event("error", error={"type": "internal_error", "message": "Input should be a valid"})
    async with make_harness(streaming_engine([chunk]), "serve", tmp_path) as serve:
        got = await serve.send(ASK, MESSAGES)
    assert (got.status, got.headers["x-plimsoll-retry"]) == (503, "1")
    assert got.json == {"type": "error", "error": {"type": "overloaded_error", "message": "Input should be a valid"}}


async def test_aborted_whole_message_is_a_503(tmp_path: Path) -> None:
    body = {"id": "m", "type": "message", "content": [{"type": "text", "text": "a"}], "model": "tiny"}
    engine = respond_with(200, json.dumps(body, separators=(",", ":")).encode())
    async with make_harness(engine, "serve", tmp_path) as serve:
        got = await serve.send({"model": "tiny"}, MESSAGES)
    assert (got.status, got.json["error"]["type"]) == (503, "overloaded_error")
    complete = body | {"stop_reason": "end_turn"}
    engine = respond_with(200, json.dumps(complete, separators=(",", ":")).encode())
    async with make_harness(engine, "serve", tmp_path) as serve:
        assert (await serve.send({"model": "tiny"}, MESSAGES)).json == complete


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (404, "not_found_error"), (500, "api_error")]
)
async def test_engine_error_has_anthropic_shape(tmp_path: Path, status: int, kind: str) -> None:
    engine = respond_with(status, b'{"error": {"message": "words", "type": "BadRequestError", "code": 400}}')
    async with make_harness(engine, "serve", tmp_path) as serve:
        got = await serve.send({"model": "tiny"}, f"{MESSAGES}/count_tokens")
    assert got.json == {"type": "error", "error": {"type": kind, "message": "words"}}


async def test_draining_engine_refuses_messages_in_their_shape(tmp_path: Path) -> None:
    async with make_harness(completion_engine(), "serve", tmp_path) as serve:
        serve.config.state.mark_draining()
        got = await serve.send({"model": "tiny"}, MESSAGES)
    assert (got.status, got.json["error"]["type"]) == (503, "overloaded_error")


def form(model: bytes) -> bytes:
    return (
        b'--b0\r\nContent-Disposition: form-data; name="model"\r\n\r\n%s\r\n'
        b'--b0\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n{"model":"\r\n--b0--\r\n' % model
    )


async def test_form_gets_the_engines_name_and_its_length(tmp_path: Path) -> None:
    engine = respond_with(200, b'{"text":"hi"}')
    async with make_harness(engine, "serve", tmp_path, names=("team/whisper",)) as serve:
        headers = FORM_KIND | {"x-plimsoll-model": "team/whisper", "x-plimsoll-endpoint": ADDRESS}
        got = await serve.send(form(b"speech"), TRANSCRIPTIONS, headers)
    assert got.json == {"text": "hi"}
    assert engine.raw == [form(b"team/whisper")]
    assert dict(engine.scopes[0]["headers"])[b"content-length"] == str(len(form(b"team/whisper"))).encode()


async def test_form_for_another_service_is_sent_elsewhere(tmp_path: Path) -> None:
    async with make_harness(completion_engine(), "serve", tmp_path, names=("team/whisper",)) as serve:
        got = await serve.send(form(b"a"), TRANSCRIPTIONS, FORM_KIND | {"x-plimsoll-model": "team/other"})
    assert (got.status, got.headers["x-plimsoll-reason"]) == (503, "wrong_engine")


@pytest.mark.parametrize(("path", "limit"), [(MESSAGES, "max_tokens"), (RESPONSES, "max_output_tokens")])
async def test_prefill_of_each_api_makes_one_token(tmp_path: Path, path: str, limit: str) -> None:
    body = json.dumps({"model": "m", limit: 50, "stream": True}).encode()
    sent = json.loads(prefill_request_body(body, json.loads(body), path))
    assert (sent[limit], sent["stream"], sent["kv_transfer_params"]["do_remote_decode"]) == (1, False, True)
