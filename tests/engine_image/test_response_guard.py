"""What the middleware makes of the engine's answers: errors in one shape, and no bad end that looks good."""

import json
from pathlib import Path

import pytest

from tests.engine_image.middleware_harness import (
    DONE_EVENT,
    MiddlewareHarness,
    completion_engine,
    event,
    make_harness,
    respond_with,
    streaming_engine,
    token_event,
)

STREAM = {"model": "tiny", "prompt": "a", "stream": True}
ABORT = token_event("", "abort")


async def test_good_stream_passes_byte_for_byte(tmp_path: Path) -> None:
    chunks = [token_event(' "finish_reason":"abort" data: [DONE]'), token_event("\ndata: [DONE]", "length"), DONE_EVENT]
    async with make_harness(streaming_engine(chunks), "serve", tmp_path) as serve:
        got = await serve.send(STREAM)
    assert got.body == b"".join(chunks)
    assert got.complete
    assert serve.count("stream_errors", reason="abort") == 0


async def test_aborted_stream_gets_error_event_and_breaks(tmp_path: Path) -> None:
    async with make_harness(streaming_engine([token_event(), ABORT, DONE_EVENT]), "serve", tmp_path) as serve:
        got = await serve.send(STREAM)
    assert json.loads(got.events[-1])["error"]["type"] == "server_error"
    assert "[DONE]" not in got.events
    assert not got.complete
    assert serve.count("stream_errors", reason="abort") == 1


@pytest.mark.parametrize("split", range(1, len(ABORT) - 1))
async def test_abort_split_across_chunks_is_detected(tmp_path: Path, split: int) -> None:
    chunks = [token_event(), ABORT[:split], ABORT[split:] + DONE_EVENT]
    async with make_harness(streaming_engine(chunks), "serve", tmp_path) as serve:
        got = await serve.send(STREAM)
    assert "error" in json.loads(got.events[-1])
    assert "[DONE]" not in got.events
    assert not got.complete


async def test_abort_in_single_bytes_is_detected(tmp_path: Path) -> None:
    raw = token_event() + ABORT + DONE_EVENT
    async with make_harness(streaming_engine(raw[at : at + 1] for at in range(len(raw))), "serve", tmp_path) as serve:
        got = await serve.send(STREAM)
    assert not got.complete
    assert serve.count("stream_errors", reason="abort") == 1


@pytest.mark.parametrize("split", range(len(DONE_EVENT)))
async def test_done_marker_split_across_chunks_is_detected(tmp_path: Path, split: int) -> None:
    chunks = [token_event(finish="length"), DONE_EVENT[:split], DONE_EVENT[split:]]
    async with make_harness(streaming_engine(chunks), "serve", tmp_path) as serve:
        got = await serve.send(STREAM)
    assert got.complete


async def test_stream_without_done_marker_is_broken(tmp_path: Path) -> None:
    async with make_harness(
        streaming_engine([token_event(), token_event(finish="length")]), "serve", tmp_path
    ) as serve:
        got = await serve.send(STREAM)
    assert "error" in json.loads(got.events[-1])
    assert not got.complete
    assert serve.count("stream_errors", reason="unfinished") == 1


async def test_engine_exception_in_stream_gets_error_event(tmp_path: Path) -> None:
    async with make_harness(streaming_engine([token_event()], RuntimeError("x")), "serve", tmp_path) as serve:
        exchange = serve.send(STREAM)
        with pytest.raises(RuntimeError):
            await exchange
    assert serve.count("stream_errors", reason="exception") == 1


async def test_engine_error_event_is_normalised_and_counted(tmp_path: Path) -> None:
    error = event(error={"message": "bad schema", "type": "InternalServerError", "param": None, "code": 500})
    async with make_harness(streaming_engine([error, DONE_EVENT]), "serve", tmp_path) as serve:
        got = await serve.send(STREAM)
    assert json.loads(got.events[0])["error"] == {
        "message": "bad schema",
        "type": "server_error",
        "param": None,
        "code": None,
    }
    assert got.events[-1] == "[DONE]"
    assert got.complete
    assert serve.count("stream_errors", reason="engine_error") == 1


async def test_dead_engine_error_event_breaks_stream(tmp_path: Path) -> None:
    error = event(error={"message": "EngineCore encountered an issue.", "code": 500})

    async with make_harness(streaming_engine([token_event(), error, DONE_EVENT]), "serve", tmp_path) as serve:
        script = serve.engine.script

        async def dying(scope, receive, send):  # type: ignore[no-untyped-def]
            scope["app"].state.engine_client.errored = True
            await script(scope, receive, send)

        serve.engine.script = dying
        got = await serve.send(STREAM)
    assert json.loads(got.events[-1])["error"]["message"] == "EngineCore encountered an issue."
    assert not got.complete
    assert serve.count("stream_errors", reason="engine_dead") == 1


def dying_in(serve: MiddlewareHarness) -> None:
    """The engine dies after it took the request."""
    script = serve.engine.script

    async def dying(scope, receive, send):  # type: ignore[no-untyped-def]
        scope["app"].state.engine_client.errored = True
        await script(scope, receive, send)

    serve.engine.script = dying


async def test_unstarted_stream_of_dead_engine_is_retryable(tmp_path: Path) -> None:
    error = event(error={"message": "EngineCore encountered an issue.", "code": 500})
    async with make_harness(streaming_engine([error, DONE_EVENT]), "serve", tmp_path) as serve:
        dying_in(serve)
        got = await serve.send(STREAM)
    assert (got.status, got.headers["x-plimsoll-retry"], got.headers["retry-after"]) == (503, "1", "1")
    assert got.json["error"]["code"] == got.headers["x-plimsoll-reason"] == "engine_failed"
    assert got.complete


async def test_unstarted_response_of_dead_engine_is_retryable(tmp_path: Path) -> None:
    body = b'{"error":{"message":"EngineCore encountered an issue.","code":500}}'
    async with make_harness(respond_with(500, body), "serve", tmp_path) as serve:
        dying_in(serve)
        got = await serve.send({"model": "tiny", "prompt": "a"})
    assert (got.status, got.headers["x-plimsoll-retry"]) == (503, "1")
    assert got.json["error"]["code"] == got.headers["x-plimsoll-reason"] == "engine_failed"


async def test_exception_of_dead_engine_is_retryable(tmp_path: Path) -> None:
    async with make_harness(streaming_engine([], RuntimeError("x")), "serve", tmp_path) as serve:
        dying_in(serve)
        with pytest.raises(RuntimeError):
            await serve.send(STREAM)
    assert serve.count("stream_errors", reason="engine_dead") == 1


async def test_full_queue_error_in_stream_is_retryable(tmp_path: Path) -> None:
    words = "The engine is currently busy and cannot accept new requests. Please try again later."
    async with make_harness(
        streaming_engine([event(error={"message": words, "code": 503}), DONE_EVENT]), "serve", tmp_path
    ) as serve:
        got = await serve.send(STREAM)
    assert (got.status, got.headers["x-plimsoll-retry"]) == (503, "1")
    assert got.json["error"]["code"] == got.headers["x-plimsoll-reason"] == "queue_full"


async def test_aborted_response_becomes_503(tmp_path: Path) -> None:
    async with make_harness(completion_engine("abort"), "serve", tmp_path) as serve:
        got = await serve.send({"model": "tiny", "prompt": "a"})
    assert (got.status, got.headers["retry-after"]) == (503, "1")
    assert got.json["error"]["code"] == got.headers["x-plimsoll-reason"] == "aborted"
    assert "x-plimsoll-retry" not in got.headers
    assert serve.count("stream_errors", reason="abort") == 1


async def test_good_response_passes_unchanged(tmp_path: Path) -> None:
    async with make_harness(completion_engine(), "serve", tmp_path) as serve:
        got = await serve.send({"model": "tiny", "prompt": "a"})
    assert (got.status, got.json["choices"][0]["finish_reason"], got.complete) == (200, "length", True)


@pytest.mark.parametrize(
    ("status", "raw", "message", "kind", "code"),
    [
        (404, b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError","param":"x","code":404}}',
         "The model `x` does not exist.", "invalid_request_error", "model_not_found"),
        (400, b'{"error":{"message":"maximum context length is 4096","type":"BadRequestError","code":400}}',
         "maximum context length is 4096", "invalid_request_error", "context_length_exceeded"),
        (400, b'{"detail":"There was an error parsing the body"}',
         "There was an error parsing the body", "invalid_request_error", None),
        (404, b'{"detail":"Not Found"}', "Not Found", "invalid_request_error", None),
        (422, b'{"detail":[{"loc":["body"],"msg":"Field required"}]}', "Field required", "invalid_request_error", None),
        (500, b"Internal Server Error", "Internal Server Error", "server_error", None),
        (500, b'{"error":"broken"}', "broken", "server_error", None),
        (500, b"[]", "HTTP 500", "server_error", None),
        (429, b'{"error":{"message":"slow down","code":"busy"}}', "slow down", "rate_limit_error", "busy"),
    ],
)  # fmt: skip
async def test_error_responses_have_openai_shape(
    tmp_path: Path, status: int, raw: bytes, message: str, kind: str, code: str | None
) -> None:
    async with make_harness(respond_with(status, raw), "serve", tmp_path) as serve:
        got = await serve.send({"model": "x"})
    error = got.json["error"]
    assert (got.status, error["message"], error["type"], error["code"]) == (status, message, kind, code)
    assert got.headers["content-length"] == str(len(got.body))
    assert not {"x-plimsoll-retry", "x-plimsoll-reason"} & got.headers.keys()


@pytest.mark.parametrize("words", ["The engine is currently busy and cannot accept new requests.",
                                   "The engine has reached its prefill token backlog limit."])  # fmt: skip
async def test_full_queue_response_is_retryable(tmp_path: Path, words: str) -> None:
    raw = json.dumps({"error": {"message": words, "type": "Service Unavailable", "code": 503}}).encode()
    async with make_harness(respond_with(503, raw), "serve", tmp_path) as serve:
        got = await serve.send({"model": "x"})
    assert (got.headers["x-plimsoll-retry"], got.headers["retry-after"]) == ("1", "1")
    assert (got.json["error"]["message"], got.json["error"]["code"]) == (words, "queue_full")
    assert got.headers["x-plimsoll-reason"] == "queue_full"


async def test_scaling_engine_response_is_retryable(tmp_path: Path) -> None:
    words = "The model is currently scaling. Please try again later."
    async with make_harness(respond_with(503, json.dumps({"error": words}).encode()), "serve", tmp_path) as serve:
        got = await serve.send({"model": "x"})
    assert (got.headers["x-plimsoll-retry"], got.headers["x-plimsoll-reason"]) == ("1", "engine_unavailable")
    assert got.json["error"]["message"] == words


@pytest.mark.parametrize("code", ["503", '"paused"', "null"])
async def test_other_engine_503_has_reason_and_is_not_retryable(tmp_path: Path, code: str) -> None:
    raw = b'{"error":{"message":"The engine is paused.","code":%s}}' % code.encode()
    async with make_harness(respond_with(503, raw), "serve", tmp_path) as serve:
        got = await serve.send({"model": "x"})
    assert (got.json["error"]["message"], got.headers["retry-after"]) == ("The engine is paused.", "1")
    assert got.json["error"]["code"] == got.headers["x-plimsoll-reason"] == "engine_unavailable"
    assert "x-plimsoll-retry" not in got.headers


async def test_exception_before_response_gives_shaped_error(tmp_path: Path) -> None:
    async def script(*_: object) -> None:
        raise RuntimeError("x")

    engine = respond_with(200, b"")
    engine.script = script
    async with make_harness(engine, "serve", tmp_path) as serve:
        with pytest.raises(RuntimeError):
            await serve.send({"model": "x"})
    assert serve.count("stream_errors", reason="exception") == 1


async def test_other_paths_pass_unchanged(tmp_path: Path) -> None:
    async with make_harness(respond_with(200, b'"finish_reason":"abort"'), "serve", tmp_path) as serve:
        got = await serve.send(b"", path="/metrics", method="GET")
    assert got.body == b'"finish_reason":"abort"'


async def test_empty_error_response_stays_empty(tmp_path: Path) -> None:
    async with make_harness(respond_with(503, b""), "serve", tmp_path) as serve:
        got = await serve.send(b"", path="/health", method="GET")
    assert (got.status, got.body) == (503, b"")


BUSY = "The engine is currently busy and cannot accept new requests."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 129, "messages": []}, "n"),
        ({"n": 129.0, "prompt": "a"}, "n"),
        ({"n": 10, "prompt": ["a"] * 13}, "n"),
        ({"prompt": [[1, 2]] * 129}, "prompt"),
        ({"input": ["a"] * 129}, "input"),
        ({"input": [[1, 2]] * 129}, "input"),
        ({"query": "a", "documents": ["a"] * 129}, "documents"),
        ({"text_1": "a", "text_2": ["a"] * 129}, "text_2"),
        ({"queries": ["a"], "items": ["a"] * 129}, "items"),
    ],
)
async def test_full_queue_of_a_request_too_large_is_a_400(
    tmp_path: Path, fields: dict[str, object], param: str, stream: bool
) -> None:
    error = {"message": BUSY, "type": "Service Unavailable", "code": 503}
    full = (
        streaming_engine([event(error=error), DONE_EVENT])
        if stream
        else respond_with(503, json.dumps({"error": error}).encode())
    )
    async with make_harness(full, "serve", tmp_path, queue_limit=128) as serve:
        got = await serve.send({"model": "x", "stream": stream, **fields})
        assert not serve.config.state.in_flight
    said = got.json["error"]
    assert (got.status, said["code"], said["param"]) == (400, "request_too_large", param)
    assert (got.headers["x-plimsoll-reason"], got.headers["x-should-retry"]) == ("request_too_large", "false")
    assert f"The field '{param}' " in said["message"]
    assert "at most 128" in said["message"]
    assert not {"x-plimsoll-retry", "retry-after"} & got.headers.keys()


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 128},
        {"prompt": [1] * 500},
        {"input": [1] * 500},
        {"input": [{"role": "user", "content": "a"}] * 500},
        {"messages": [], "documents": [{"text": "a"}] * 500},
        {"text_1": "a", "text_2": ["a"] * 128},
        {"n": "x"},
        {"n": True},
        {"n": -1},
    ],
)
async def test_full_queue_of_a_possible_request_stays_a_503(tmp_path: Path, fields: dict[str, object]) -> None:
    raw = json.dumps({"error": {"message": BUSY, "code": 503}}).encode()
    async with make_harness(respond_with(503, raw), "serve", tmp_path, queue_limit=128) as serve:
        got = await serve.send({"model": "x", **fields})
    assert (got.status, got.headers["x-plimsoll-retry"]) == (503, "1")
