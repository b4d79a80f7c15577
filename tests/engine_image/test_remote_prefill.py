"""The prefill leg on a decode engine: what is sent, and that no fault of a prefill engine reaches the client."""

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web

from launcher.remote_prefill import deadline_of
from tests.engine_image.middleware_harness import (
    ADDRESS,
    CHAT_PATH,
    COMPLETIONS,
    DONE_EVENT,
    PARAMS,
    Exchange,
    MiddlewareHarness,
    completion_engine,
    healthy_prefill,
    make_harness,
    prefill_peer,
    respond_json,
    respond_with,
    streaming_engine,
    token_event,
)

BODY = {"model": "tiny", "prompt": "Once upon", "max_tokens": 24, "stream": True, "stream_options": {"x": 1}}


async def through(decode: MiddlewareHarness, address: str, body: object = BODY, path: str = COMPLETIONS) -> Exchange:
    return await decode.send(body, path, {"x-plimsoll-prefill": address, "x-request-id": "r-1"})


async def test_remote_prefill_passes_transfer_params_to_engine(tmp_path: Path) -> None:
    async with make_harness(completion_engine(), "decode", tmp_path) as decode, prefill_peer(healthy_prefill()) as peer:
        got = await through(decode, peer.address)
    path, headers, sent = peer.requests[0]
    assert (path, headers["x-plimsoll-remote-prefill"], headers["x-request-id"]) == (COMPLETIONS, "prefill", "r-1")
    assert sent["kv_transfer_params"]["do_remote_decode"] is True
    assert (sent["max_tokens"], sent["stream"], sent["stream_options"], sent["prompt"]) == (1, False, None, "Once upon")
    assert decode.engine.requests == [{**BODY, "kv_transfer_params": PARAMS}]
    assert got.status == 200
    assert decode.count("remote_prefills", outcome="remote") == 1


async def test_remote_prefill_chat_requests_one_token(tmp_path: Path) -> None:
    body = {"model": "tiny", "messages": [], "max_completion_tokens": 9, "min_tokens": 5}
    async with make_harness(completion_engine(), "decode", tmp_path) as decode, prefill_peer(healthy_prefill()) as peer:
        await through(decode, peer.address, body, CHAT_PATH)
    path, _, sent = peer.requests[0]
    assert path == CHAT_PATH
    assert (sent["max_tokens"], sent["max_completion_tokens"], sent["min_tokens"]) == (1, 1, 0)
    assert decode.engine.requests == [{**body, "kv_transfer_params": PARAMS}]


async def test_remote_prefill_uses_model_named_by_gateway(tmp_path: Path) -> None:
    async with make_harness(completion_engine(), "decode", tmp_path) as decode, prefill_peer(healthy_prefill()) as peer:
        await decode.send(BODY, headers={"x-plimsoll-prefill": peer.address, "x-plimsoll-model": "fallback"})
    assert peer.requests[0][2]["model"] == "fallback"
    assert decode.engine.requests == [{**BODY, "model": "fallback", "kv_transfer_params": PARAMS}]


@pytest.mark.parametrize(
    ("status", "body", "outcome"),
    [
        (400, {"error": {"message": "too long"}}, "rejected"),
        (404, {"error": {"message": "no such model"}}, "rejected"),
        (500, b"Internal Server Error", "rejected"),
        (503, {"error": {"message": "draining"}}, "rejected"),
        (302, b"", "rejected"),
        (200, b"<html>", "invalid_response"),
        (200, b"\xff\xfe", "invalid_response"),
        (200, {"choices": [], "kv_transfer_params": None}, "invalid_response"),
        (200, {"choices": [], "kv_transfer_params": {"do_remote_prefill": False}}, "invalid_response"),
        (200, [1, 2], "invalid_response"),
    ],
)
async def test_remote_prefill_failed_response_is_computed_locally(
    tmp_path: Path, status: int, body: object, outcome: str
) -> None:
    async with (
        make_harness(completion_engine(), "decode", tmp_path) as decode,
        prefill_peer(respond_json(status, body)) as peer,
    ):
        got = await through(decode, peer.address)
    assert got.status == 200
    assert decode.engine.requests == [BODY]
    assert decode.count("remote_prefills", outcome=outcome) == 1


@pytest.mark.parametrize(
    ("meant", "outcome"),
    [
        (ADDRESS, "remote"),
        (f"10.0.0.1:8000,{ADDRESS}", "remote"),
        ("10.0.0.1:8000", "misrouted"),
        ("10.0.0.7:80001,110.0.0.7:8000", "misrouted"),
    ],
)
async def test_remote_prefill_misrouted_request_takes_no_blocks(tmp_path: Path, meant: str, outcome: str) -> None:
    async with make_harness(completion_engine(), "decode", tmp_path) as decode, prefill_peer(healthy_prefill()) as peer:
        got = await decode.send(BODY, headers={"x-plimsoll-prefill": peer.address, "x-plimsoll-endpoint": meant})
    assert got.status == 200
    assert len(peer.requests) == (outcome == "remote")
    assert decode.count("remote_prefills", outcome=outcome) == 1


async def test_remote_prefill_connection_refused_is_unreachable(tmp_path: Path) -> None:
    async with prefill_peer(healthy_prefill()) as peer:
        address = peer.address  # its port is free when it is gone
    async with make_harness(completion_engine(), "decode", tmp_path) as decode:
        got = await through(decode, address)
    assert got.status == 200
    assert decode.count("remote_prefills", outcome="unreachable") == 1


async def test_remote_prefill_engine_dying_is_unreachable(tmp_path: Path) -> None:
    async def dies(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with make_harness(completion_engine(), "decode", tmp_path) as decode, prefill_peer(dies) as peer:
        got = await through(decode, peer.address)
    assert got.status == 200
    assert decode.engine.requests == [BODY]
    assert decode.count("remote_prefills", outcome="unreachable") == 1


async def test_remote_prefill_timeout_closes_connection(tmp_path: Path) -> None:
    closed = asyncio.Event()

    async def slow(_: web.Request) -> web.StreamResponse:
        try:
            await asyncio.Event().wait()
        finally:
            closed.set()
        return web.Response()

    async with (
        make_harness(completion_engine(), "decode", tmp_path, deadline=0.05) as decode,
        cancelling(slow) as address,
    ):
        got = await through(decode, address)
        await closed.wait()
    assert got.status == 200
    assert decode.engine.requests == [BODY]
    assert decode.count("remote_prefills", outcome="timeout") == 1


async def test_remote_prefill_stops_when_client_disconnects(tmp_path: Path) -> None:
    begun, closed, gone = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(_: web.Request) -> web.StreamResponse:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            closed.set()
        return web.Response()

    async with make_harness(completion_engine(), "decode", tmp_path) as decode, cancelling(slow) as address:
        request = asyncio.create_task(decode.send(BODY, headers={"x-plimsoll-prefill": address}, gone=gone))
        await begun.wait()
        gone.set()
        got = await request
        await closed.wait()
    assert got.messages == []
    assert decode.engine.requests == []
    assert decode.count("remote_prefills", outcome="cancelled") == 1


@pytest.mark.parametrize("address", ["", "nonsense", "host:port", "http://a:1", "a:1/../x", "a@b:80", "[::1:80"])
async def test_remote_prefill_invalid_address_is_not_called(tmp_path: Path, address: str) -> None:
    async with make_harness(completion_engine(), "decode", tmp_path) as decode:
        got = await through(decode, address)
    assert got.status == 200
    assert decode.count("remote_prefills", outcome="invalid_response") == (1 if address else 0)


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"best_of": 3},
        {"use_beam_search": True},
        {"prompt_logprobs": 0},
        {"echo": True, "logprobs": 1},
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt_embeds": "x"},
    ],
)
async def test_remote_prefill_ineligible_request_runs_locally(tmp_path: Path, more: dict[str, object]) -> None:
    async with make_harness(completion_engine(), "decode", tmp_path) as decode, prefill_peer(healthy_prefill()) as peer:
        await through(decode, peer.address, {**BODY, **more})
    assert peer.requests == []
    assert decode.engine.requests == [{**BODY, **more}]
    assert decode.count("remote_prefills", outcome="ineligible") == 1


@pytest.mark.parametrize("more", [{"n": 1}, {"n": None}, {"prompt": [1, 2, 3]}, {"prompt": ["a"]}, {"logprobs": 2}])
async def test_remote_prefill_single_prompt_is_eligible(tmp_path: Path, more: dict[str, object]) -> None:
    async with make_harness(completion_engine(), "decode", tmp_path) as decode, prefill_peer(healthy_prefill()) as peer:
        await through(decode, peer.address, {**BODY, **more})
    assert len(peer.requests) == 1
    assert decode.count("remote_prefills", outcome="remote") == 1


async def test_remote_prefill_is_only_for_decode_engines(tmp_path: Path) -> None:
    async with prefill_peer(healthy_prefill()) as peer:
        for role in ("serve", "prefill"):
            async with make_harness(completion_engine(), role, tmp_path) as other:
                await through(other, peer.address)
                assert other.engine.requests == [BODY]
    assert peer.requests == []


async def test_remote_prefill_outlasting_drain_is_rejected_retryably(tmp_path: Path) -> None:
    async with make_harness(completion_engine(), "decode", tmp_path) as decode:

        async def stops(_: web.Request) -> web.StreamResponse:
            decode.config.state.mark_draining()
            decode.config.state.mark_stopping()
            return web.Response(body=json.dumps({"kv_transfer_params": PARAMS}).encode())

        async with prefill_peer(stops) as peer:
            got = await through(decode, peer.address)
    assert (got.status, got.headers["x-plimsoll-retry"], got.headers["retry-after"]) == (503, "1", "1")
    assert decode.engine.requests == []


async def test_remote_prefill_ending_during_drain_is_served(tmp_path: Path) -> None:
    async with make_harness(completion_engine(), "decode", tmp_path) as decode:

        async def drain_then_respond(_: web.Request) -> web.StreamResponse:
            decode.config.state.mark_draining()
            return web.Response(body=json.dumps({"kv_transfer_params": PARAMS}).encode())

        async with prefill_peer(drain_then_respond) as peer:
            got = await through(decode, peer.address)
    assert got.status == 200


async def test_remote_prefill_stream_passes_unchanged(tmp_path: Path) -> None:
    chunks = [token_event(), token_event(finish="length"), DONE_EVENT]
    async with (
        make_harness(streaming_engine(chunks), "decode", tmp_path) as decode,
        prefill_peer(healthy_prefill()) as peer,
    ):
        got = await through(decode, peer.address)
    assert got.body == b"".join(chunks)
    assert got.complete


async def test_remote_prefill_malformed_body_is_left_to_engine(tmp_path: Path) -> None:
    async with (
        make_harness(respond_with(400, b"{}"), "decode", tmp_path) as decode,
        prefill_peer(healthy_prefill()) as peer,
    ):
        got = await through(decode, peer.address, b"{nonsense")
    assert (got.status, peer.requests, decode.engine.raw) == (400, [], [b"{nonsense"])


class cancelling:
    """A prefill engine on loopback whose handler is cancelled as soon as its client closes the connection."""

    def __init__(self, handler: object) -> None:
        self._handler = handler
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> str:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._handler)  # type: ignore[arg-type]
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()


async def test_deadline_of_the_gateway_ends_a_slow_prefill(tmp_path: Path) -> None:
    async def never(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    headers = {"x-plimsoll-prefill-seconds": "0.05"}
    async with (
        make_harness(completion_engine(), "decode", tmp_path, deadline=600.0) as decode,
        prefill_peer(never) as peer,
    ):
        got = await decode.send(BODY, headers={"x-plimsoll-prefill": peer.address, **headers})
    assert got.status == 200
    assert decode.count("remote_prefills", outcome="timeout") == 1


@pytest.mark.parametrize("text", ["", "soon", "nan", "inf", "-1", "0", "1e9"])
def test_unusable_deadline_leaves_the_engines_own(text: str) -> None:
    assert deadline_of(text) is None


async def test_required_prefill_that_fails_is_rejected(tmp_path: Path) -> None:
    headers = {"x-plimsoll-prefill-required": "1"}
    async with (
        make_harness(completion_engine(), "decode", tmp_path) as decode,
        prefill_peer(respond_json(503, {"error": {"message": "draining"}})) as peer,
    ):
        got = await decode.send(BODY, headers={"x-plimsoll-prefill": peer.address, **headers})
        several = await decode.send({**BODY, "n": 2}, headers={"x-plimsoll-prefill": peer.address, **headers})
    assert (got.status, json.loads(got.body)["error"]["code"]) == (503, "prefill_unavailable")
    assert (got.headers["retry-after"], got.headers["x-plimsoll-retry"]) == ("1", "1")
    assert several.status == 200
    assert [request["n"] for request in decode.engine.requests] == [2]


async def test_required_prefill_that_succeeds_is_served(tmp_path: Path) -> None:
    headers = {"x-plimsoll-prefill-required": "1"}
    async with make_harness(completion_engine(), "decode", tmp_path) as decode, prefill_peer(healthy_prefill()) as peer:
        got = await decode.send(BODY, headers={"x-plimsoll-prefill": peer.address, **headers})
    assert got.status == 200
    assert decode.engine.requests == [{**BODY, "kv_transfer_params": PARAMS}]
