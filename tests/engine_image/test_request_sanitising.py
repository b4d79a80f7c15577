"""What the middleware lets through to the engine: no client's transfer parameters, nothing while it leaves."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.engine_image.middleware_harness import (
    CHAT_PATH,
    COMPLETIONS,
    DONE_EVENT,
    PARAMS,
    completion_engine,
    make_harness,
    respond_with,
    streaming_engine,
    token_event,
)

BODY_WITH_TRANSFER_PARAMS = {"model": "tiny", "prompt": "a", "kv_transfer_params": PARAMS}
CLEAN_BODY = {"model": "tiny", "prompt": "a"}


@pytest.mark.parametrize("role", ["serve", "decode", "prefill"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT_PATH])
async def test_client_transfer_params_are_dropped(tmp_path: Path, role: str, path: str) -> None:
    async with make_harness(completion_engine(), role, tmp_path) as engine:
        await engine.send(BODY_WITH_TRANSFER_PARAMS, path)
    assert engine.engine.requests == [CLEAN_BODY]


@pytest.mark.parametrize("role", ["serve", "decode"])
async def test_remote_prefill_header_is_ignored_unless_prefill_role(tmp_path: Path, role: str) -> None:
    async with make_harness(completion_engine(), role, tmp_path) as engine:
        await engine.send(BODY_WITH_TRANSFER_PARAMS, headers={"x-plimsoll-remote-prefill": "prefill"})
    assert engine.engine.requests == [CLEAN_BODY]


async def test_prefill_engine_accepts_remote_prefill(tmp_path: Path) -> None:
    async with make_harness(completion_engine(), "prefill", tmp_path) as engine:
        await engine.send(BODY_WITH_TRANSFER_PARAMS, headers={"x-plimsoll-remote-prefill": "prefill"})
    assert engine.engine.requests == [BODY_WITH_TRANSFER_PARAMS]


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"tiny","prompt":"a","kv\\u005ftransfer_params":{"x":1}}',
        b'{"kv_transfer_params":1,"model":"tiny","prompt":"a","kv_transfer_params":2}',
        json.dumps(BODY_WITH_TRANSFER_PARAMS).encode("utf-16"),
        json.dumps(BODY_WITH_TRANSFER_PARAMS).encode("utf-32-le"),
        json.dumps(BODY_WITH_TRANSFER_PARAMS).encode("utf-8-sig"),
    ],
)
async def test_obfuscated_transfer_params_are_dropped(tmp_path: Path, raw: bytes) -> None:
    async with make_harness(completion_engine(), "serve", tmp_path) as engine:
        await engine.send(raw)
    assert engine.engine.requests == [CLEAN_BODY]


@pytest.mark.parametrize("value", ["x", ["x"], 1])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT_PATH, "/v1/messages", "/v1/responses"])
async def test_transfer_params_in_extra_arguments_are_dropped(tmp_path: Path, path: str, value: object) -> None:
    """vLLM takes them for its own from `vllm_xargs`, too: one that is no object would end the engine."""
    body = CLEAN_BODY | {"vllm_xargs": {"seen": 1, "kv_transfer_params": value}}
    async with make_harness(completion_engine(), "decode", tmp_path) as engine:
        await engine.send(body, path)
    assert engine.engine.requests == [CLEAN_BODY | {"vllm_xargs": {"seen": 1}}]


async def test_transfer_params_word_in_user_content_is_kept(tmp_path: Path) -> None:
    body = {"tools": [{"properties": {"kv_transfer_params": 1}}], "messages": [{"content": "kv_transfer_params"}]}
    async with make_harness(completion_engine(), "serve", tmp_path) as engine:
        await engine.send(body, CHAT_PATH)
    assert engine.engine.requests == [body]


MODEL_HEADER = {"x-plimsoll-model": "fallback"}


@pytest.mark.parametrize("role", ["serve", "decode", "prefill"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT_PATH])
async def test_gateway_model_header_replaces_model(tmp_path: Path, role: str, path: str) -> None:
    async with make_harness(completion_engine(), role, tmp_path) as engine:
        await engine.send(CLEAN_BODY, path)
        await engine.send(CLEAN_BODY, path, MODEL_HEADER, pieces=3)
        await engine.send(BODY_WITH_TRANSFER_PARAMS, path, MODEL_HEADER)
    assert [request["model"] for request in engine.engine.requests] == ["tiny", "fallback", "fallback"]
    assert [request["prompt"] for request in engine.engine.requests] == ["a"] * 3
    assert not any("kv_transfer_params" in request for request in engine.engine.requests)
    lengths = [dict(scope["headers"])[b"content-length"] for scope in engine.engine.scopes]
    assert lengths == [str(len(raw)).encode() for raw in engine.engine.raw]


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"tiny","prompt":"a","model":"other"}',
        b'{"mod\\u0065l":"tiny","prompt":"a"}',
        b'  {"model": "tiny", "prompt": "a" }\r\n ',
        json.dumps(CLEAN_BODY).encode("utf-16"),
        json.dumps(CLEAN_BODY).encode("utf-32-be"),
        json.dumps(CLEAN_BODY).encode("utf-8-sig"),
        b'{"model":"","prompt":"a"}',
    ],
)
async def test_gateway_model_header_wins_over_any_spelling(tmp_path: Path, raw: bytes) -> None:
    async with make_harness(completion_engine(), "serve", tmp_path) as engine:
        await engine.send(raw, headers=MODEL_HEADER)
    assert engine.engine.requests == [{"model": "fallback", "prompt": "a"}]


async def test_gateway_model_name_is_escaped(tmp_path: Path) -> None:
    name = 'a","prompt":"b\\'
    async with make_harness(completion_engine(), "serve", tmp_path) as engine:
        await engine.send(CLEAN_BODY, headers={"x-plimsoll-model": name})
    assert engine.engine.requests == [{"model": name, "prompt": "a"}]


async def test_long_body_is_unchanged_except_model(tmp_path: Path) -> None:
    body = b'{"model":"tiny","seed":1e2,"prompt":"' + "\u00e9 ".encode() * 300_000 + b'"}'
    async with make_harness(completion_engine(), "serve", tmp_path) as engine:
        await engine.send(body, headers=MODEL_HEADER, pieces=7)
    assert engine.engine.raw[0].startswith(body[:-1])
    assert engine.engine.requests[0]["model"] == "fallback"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'"model"',
        b"\xff\xfe\xfd",
        b"{}",
        b'{"prompt":"a"}',
        b'{"model":null}',
        b'{"model":7}',
        b'{"model":["tiny"]}',
        b'{"model":"tiny","model":7}',
        b'{"nested":{"model":"tiny"}}',
        b"[" * 20000,
    ],
)
async def test_body_without_model_name_is_unchanged(tmp_path: Path, raw: bytes) -> None:
    async with make_harness(respond_with(400, b'{"detail":"no"}'), "serve", tmp_path) as engine:
        got = await engine.send(raw, headers=MODEL_HEADER)
    assert engine.engine.raw == [raw]
    assert got.status == 400


async def test_other_routes_are_sanitised_at_any_depth(tmp_path: Path) -> None:
    body = {"requests": [{"sampling_params": {"extra_args": {"kv_transfer_params": 1}}}]}
    async with make_harness(completion_engine(), "serve", tmp_path) as engine:
        await engine.send(body, "/inference/v1/generate")
    assert engine.engine.requests == [{"requests": [{"sampling_params": {"extra_args": {}}}]}]


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"\xff\xfe\xfd", b'"\\ud800"', b"[" * 20000 + b"\\u"])
async def test_malformed_body_reaches_engine_unchanged(tmp_path: Path, raw: bytes) -> None:
    async with make_harness(respond_with(400, b'{"detail":"no"}'), "serve", tmp_path) as engine:
        got = await engine.send(raw)
    assert engine.engine.raw == [raw]
    assert got.status == 400


async def test_body_in_chunks_is_joined(tmp_path: Path) -> None:
    async with make_harness(completion_engine(), "serve", tmp_path) as engine:
        await engine.send(BODY_WITH_TRANSFER_PARAMS, pieces=7)
    assert engine.engine.requests == [CLEAN_BODY]
    assert dict(engine.engine.scopes[0]["headers"])[b"content-length"] == str(len(engine.engine.raw[0])).encode()


async def test_body_beyond_limit_is_rejected(tmp_path: Path) -> None:
    async with make_harness(completion_engine(), "serve", tmp_path) as engine:
        got = await engine.send(b" " * ((1 << 20) + 1), pieces=9)
    assert (got.status, got.json["error"]["type"]) == (413, "invalid_request_error")
    assert got.json["error"]["code"] == got.headers["x-plimsoll-reason"] == "body_too_large"
    assert engine.engine.raw == []


async def test_draining_engine_rejects_before_engine(tmp_path: Path) -> None:
    async with make_harness(completion_engine(), "serve", tmp_path) as engine:
        engine.config.state.mark_draining()
        got = await engine.send(CLEAN_BODY)
    assert (got.status, got.json["error"]["code"]) == (503, "draining")
    assert (got.headers["x-plimsoll-retry"], got.headers["retry-after"]) == ("1", "1")
    assert got.headers["x-plimsoll-reason"] == "draining"
    assert engine.engine.requests == []


@pytest.mark.parametrize(("sent", "expected"), [("45", "45"), ("", "1"), ("-1", "1"), ("soon", "1"), ("600", "1")])
@pytest.mark.parametrize("cause", ["draining", "engine_failed", "aborted"])
async def test_only_engine_names_time_of_next(tmp_path: Path, cause: str, sent: str, expected: str) -> None:
    """The gateway sends the time with a request that no other engine can serve."""
    script = completion_engine("abort" if cause == "aborted" else "length")
    async with make_harness(script, "serve", tmp_path) as engine:
        if cause == "draining":
            engine.config.state.mark_draining()
        engine.errored = cause == "engine_failed"
        got = await engine.send(CLEAN_BODY, headers={"x-plimsoll-next-engine-seconds": sent})
    assert (got.status, got.json["error"]["code"], got.headers["retry-after"]) == (503, cause, expected)


async def test_dead_engine_rejects_new_requests(tmp_path: Path) -> None:
    async with make_harness(completion_engine(), "serve", tmp_path) as engine:
        engine.errored = True
        got = await engine.send(CLEAN_BODY)
    assert (got.status, got.headers["x-plimsoll-retry"]) == (503, "1")
    assert got.headers["x-plimsoll-reason"] == "engine_failed"
    assert engine.engine.requests == []


async def test_draining_engine_finishes_running_stream(tmp_path: Path) -> None:
    async with make_harness(
        streaming_engine([token_event(), token_event(finish="length"), DONE_EVENT]), "serve", tmp_path
    ) as engine:
        script = engine.engine.script

        async def leaving(scope, receive, send):  # type: ignore[no-untyped-def]
            engine.config.state.mark_draining()
            await script(scope, receive, send)

        engine.engine.script = leaving
        got = await engine.send(CLEAN_BODY)
    assert got.complete


async def test_request_updates_last_request_time(tmp_path: Path) -> None:
    async with make_harness(completion_engine(), "serve", tmp_path) as engine:
        assert engine.config.state.last_request() is None
        await engine.send(CLEAN_BODY)
        assert engine.config.state.last_request() is not None


async def test_disconnect_while_sending_body_is_ignored(tmp_path: Path) -> None:
    gone = asyncio.Event()
    gone.set()
    async with make_harness(completion_engine(), "serve", tmp_path) as engine:

        async def receive() -> dict[str, object]:
            return {"type": "http.disconnect"}

        async def send(_: object) -> None:
            raise AssertionError("nobody is there")

        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": []}
        await engine.app(scope, receive, send)
    assert engine.engine.raw == []


async def test_disconnect_in_stream_is_no_error(tmp_path: Path) -> None:
    gone = asyncio.Event()

    async def script(_, receive, send):  # type: ignore[no-untyped-def]
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone.set()
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.body", "body": token_event("", "abort"), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    engine = streaming_engine([])
    engine.script = script
    async with make_harness(engine, "serve", tmp_path) as serve:
        await serve.send(CLEAN_BODY, gone=gone)
    assert serve.count("stream_errors", reason="abort") == 0


async def test_uploads_pass_unchanged(tmp_path: Path) -> None:
    async with make_harness(respond_with(200, b"{}"), "serve", tmp_path) as engine:
        got = await engine.send(b"--x", "/v1/audio/transcriptions", {"content-type": "multipart/form-data; boundary=x"})
    assert got.status == 200
    assert engine.engine.raw == [b"--x"]
