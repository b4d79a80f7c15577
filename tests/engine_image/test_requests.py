"""What the middleware lets through to the engine: no client's transfer parameters, nothing while it leaves."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.engine_image.lab import CHAT, COMPLETIONS, DONE, PARAMS, answer, bench, completion, streaming, token

EVIL = {"model": "tiny", "prompt": "a", "kv_transfer_params": PARAMS}
CLEAN = {"model": "tiny", "prompt": "a"}


@pytest.mark.parametrize("role", ["serve", "decode", "prefill"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_transfer_parameters_of_clients_are_dropped(tmp_path: Path, role: str, path: str) -> None:
    async with bench(completion(), role, tmp_path) as engine:
        await engine.send(EVIL, path)
    assert engine.engine.requests == [CLEAN]


@pytest.mark.parametrize("role", ["serve", "decode"])
async def test_only_prefill_engines_believe_the_leg_header(tmp_path: Path, role: str) -> None:
    async with bench(completion(), role, tmp_path) as engine:
        await engine.send(EVIL, headers={"x-plimsoll-leg": "prefill"})
    assert engine.engine.requests == [CLEAN]


async def test_a_prefill_engine_takes_a_leg(tmp_path: Path) -> None:
    async with bench(completion(), "prefill", tmp_path) as engine:
        await engine.send(EVIL, headers={"x-plimsoll-leg": "prefill"})
    assert engine.engine.requests == [EVIL]


@pytest.mark.parametrize(
    "raw",
    [
        b'{"model":"tiny","prompt":"a","kv\\u005ftransfer_params":{"x":1}}',
        b'{"kv_transfer_params":1,"model":"tiny","prompt":"a","kv_transfer_params":2}',
        json.dumps(EVIL).encode("utf-16"),
        json.dumps(EVIL).encode("utf-32-le"),
        json.dumps(EVIL).encode("utf-8-sig"),
    ],
)
async def test_disguised_parameters_are_dropped(tmp_path: Path, raw: bytes) -> None:
    async with bench(completion(), "serve", tmp_path) as engine:
        await engine.send(raw)
    assert engine.engine.requests == [CLEAN]


async def test_a_users_own_word_in_a_tool_stays(tmp_path: Path) -> None:
    body = {"tools": [{"properties": {"kv_transfer_params": 1}}], "messages": [{"content": "kv_transfer_params"}]}
    async with bench(completion(), "serve", tmp_path) as engine:
        await engine.send(body, CHAT)
    assert engine.engine.requests == [body]


NAMED = {"x-plimsoll-model": "fallback"}


@pytest.mark.parametrize("role", ["serve", "decode", "prefill"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_the_gateway_may_name_the_model(tmp_path: Path, role: str, path: str) -> None:
    async with bench(completion(), role, tmp_path) as engine:
        await engine.send(CLEAN, path)
        await engine.send(CLEAN, path, NAMED, pieces=3)
        await engine.send(EVIL, path, NAMED)
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
        json.dumps(CLEAN).encode("utf-16"),
        json.dumps(CLEAN).encode("utf-32-be"),
        json.dumps(CLEAN).encode("utf-8-sig"),
        b'{"model":"","prompt":"a"}',
    ],
)
async def test_a_named_model_wins_in_every_guise(tmp_path: Path, raw: bytes) -> None:
    async with bench(completion(), "serve", tmp_path) as engine:
        await engine.send(raw, headers=NAMED)
    assert engine.engine.requests == [{"model": "fallback", "prompt": "a"}]


async def test_a_name_is_a_string_whatever_is_in_it(tmp_path: Path) -> None:
    name = 'a","prompt":"b\\'
    async with bench(completion(), "serve", tmp_path) as engine:
        await engine.send(CLEAN, headers={"x-plimsoll-model": name})
    assert engine.engine.requests == [{"model": name, "prompt": "a"}]


async def test_the_rest_of_a_long_body_stays_as_it_was_written(tmp_path: Path) -> None:
    body = b'{"model":"tiny","seed":1e2,"prompt":"' + "\u00e9 ".encode() * 300_000 + b'"}'
    async with bench(completion(), "serve", tmp_path) as engine:
        await engine.send(body, headers=NAMED, pieces=7)
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
async def test_what_asks_for_no_model_by_name_stays_as_it_is(tmp_path: Path, raw: bytes) -> None:
    async with bench(answer(400, b'{"detail":"no"}'), "serve", tmp_path) as engine:
        got = await engine.send(raw, headers=NAMED)
    assert engine.engine.raw == [raw]
    assert got.status == 400


async def test_other_routes_are_cleaned_at_any_depth(tmp_path: Path) -> None:
    body = {"requests": [{"sampling_params": {"extra_args": {"kv_transfer_params": 1}}}]}
    async with bench(completion(), "serve", tmp_path) as engine:
        await engine.send(body, "/inference/v1/generate")
    assert engine.engine.requests == [{"requests": [{"sampling_params": {"extra_args": {}}}]}]


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"\xff\xfe\xfd", b'"\\ud800"', b"[" * 20000 + b"\\u"])
async def test_what_is_no_request_reaches_the_engine_as_it_is(tmp_path: Path, raw: bytes) -> None:
    async with bench(answer(400, b'{"detail":"no"}'), "serve", tmp_path) as engine:
        got = await engine.send(raw)
    assert engine.engine.raw == [raw]
    assert got.status == 400


async def test_a_body_in_pieces_is_put_together(tmp_path: Path) -> None:
    async with bench(completion(), "serve", tmp_path) as engine:
        await engine.send(EVIL, pieces=7)
    assert engine.engine.requests == [CLEAN]
    assert dict(engine.engine.scopes[0]["headers"])[b"content-length"] == str(len(engine.engine.raw[0])).encode()


async def test_a_body_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    async with bench(completion(), "serve", tmp_path) as engine:
        got = await engine.send(b" " * ((1 << 20) + 1), pieces=9)
    assert (got.status, got.json["error"]["type"]) == (413, "invalid_request_error")
    assert got.json["error"]["code"] == got.headers["x-plimsoll-reason"] == "body_too_large"
    assert engine.engine.raw == []


async def test_a_leaving_engine_refuses_before_the_engine_sees_it(tmp_path: Path) -> None:
    async with bench(completion(), "serve", tmp_path) as engine:
        engine.config.state.mark_draining()
        got = await engine.send(CLEAN)
    assert (got.status, got.json["error"]["code"]) == (503, "draining")
    assert (got.headers["x-plimsoll-retry"], got.headers["retry-after"]) == ("1", "1")
    assert got.headers["x-plimsoll-reason"] == "draining"
    assert engine.engine.requests == []


async def test_a_dead_engine_refuses_new_requests(tmp_path: Path) -> None:
    async with bench(completion(), "serve", tmp_path) as engine:
        engine.errored = True
        got = await engine.send(CLEAN)
    assert (got.status, got.headers["x-plimsoll-retry"]) == (503, "1")
    assert got.headers["x-plimsoll-reason"] == "engine_failed"
    assert engine.engine.requests == []


async def test_a_stream_goes_on_while_the_engine_leaves(tmp_path: Path) -> None:
    async with bench(streaming([token(), token(finish="length"), DONE]), "serve", tmp_path) as engine:
        script = engine.engine.script

        async def leaving(scope, receive, send):  # type: ignore[no-untyped-def]
            engine.config.state.mark_draining()
            await script(scope, receive, send)

        engine.engine.script = leaving
        got = await engine.send(CLEAN)
    assert got.complete


async def test_a_request_leaves_its_time(tmp_path: Path) -> None:
    async with bench(completion(), "serve", tmp_path) as engine:
        assert engine.config.state.last_request() is None
        await engine.send(CLEAN)
        assert engine.config.state.last_request() is not None


async def test_a_client_that_leaves_while_it_sends_is_forgotten(tmp_path: Path) -> None:
    gone = asyncio.Event()
    gone.set()
    async with bench(completion(), "serve", tmp_path) as engine:

        async def receive() -> dict[str, object]:
            return {"type": "http.disconnect"}

        async def send(_: object) -> None:
            raise AssertionError("nobody is there")

        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": []}
        await engine.app(scope, receive, send)
    assert engine.engine.raw == []


async def test_a_client_that_leaves_in_its_stream_is_no_error(tmp_path: Path) -> None:
    gone = asyncio.Event()

    async def script(_, receive, send):  # type: ignore[no-untyped-def]
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone.set()
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.body", "body": token("", "abort"), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    engine = streaming([])
    engine.script = script
    async with bench(engine, "serve", tmp_path) as serve:
        await serve.send(CLEAN, gone=gone)
    assert serve.count("stream_errors", reason="abort") == 0


async def test_uploads_and_other_connections_pass(tmp_path: Path) -> None:
    async with bench(answer(200, b"{}"), "serve", tmp_path) as engine:
        got = await engine.send(b"--x", "/v1/audio/transcriptions", {"content-type": "multipart/form-data; boundary=x"})
    assert got.status == 200
    assert engine.engine.raw == [b"--x"]
