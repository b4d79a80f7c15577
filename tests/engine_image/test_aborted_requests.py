"""Which requests an engine that is being stopped still owes an answer: those that it cut off, and no others."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from tests.engine_image.middleware_harness import (
    DONE_EVENT,
    FakeEngine,
    completion_engine,
    make_harness,
    respond_with,
    streaming_engine,
    token_event,
)

STREAM = {"model": "tiny", "prompt": "a", "stream": True}


@pytest.mark.parametrize(
    ("engine", "pending"),
    [
        (streaming_engine([token_event(finish="length"), DONE_EVENT]), 0),
        (completion_engine(), 0),
        (respond_with(400, b'{"error": {"message": "no"}}'), 0),
        (streaming_engine([token_event(), token_event("", "abort"), DONE_EVENT]), 1),
        (completion_engine("abort"), 1),
        (streaming_engine([token_event()]), 1),
        (streaming_engine([token_event()], RuntimeError("x")), 1),
        (respond_with(500, b'{"error": {"message": "no"}}'), 1),
    ],
    ids=["stream", "whole", "bad request", "aborted stream", "aborted answer", "no end", "exception", "error"],
)
async def test_stopping_engine_counts_aborted_requests(tmp_path: Path, engine: FakeEngine, pending: int) -> None:
    async with make_harness(engine, "serve", tmp_path) as serve:
        for stopping in (False, True):
            if stopping:
                serve.config.state.mark_stopping()
            with contextlib.suppress(RuntimeError):  # the engine's own, which the server logs
                await serve.send(STREAM)
            assert serve.config.state.in_flight == pending * stopping


async def test_client_disconnect_is_not_counted_as_aborted(tmp_path: Path) -> None:
    async with make_harness(streaming_engine([token_event(), token_event("", "abort")]), "serve", tmp_path) as serve:
        serve.config.state.mark_stopping()
        inner, gone = serve.engine.script, asyncio.Event()
        gone.set()

        async def script(scope, receive, send):  # type: ignore[no-untyped-def]
            assert (await receive())["type"] == "http.disconnect"
            await inner(scope, receive, send)

        serve.engine.script = script
        await serve.send(STREAM, gone=gone)
        assert serve.config.state.in_flight == 0


def hanging_engine() -> tuple[FakeEngine, asyncio.Event]:
    """An engine that never answers, and what is set once it has a request."""
    begun = asyncio.Event()

    async def script(_scope, _receive, _send):  # type: ignore[no-untyped-def]
        begun.set()
        await asyncio.Event().wait()

    return FakeEngine(script), begun


async def test_cancelled_request_stays_counted_when_stopping(tmp_path: Path) -> None:
    engine, begun = hanging_engine()
    async with make_harness(engine, "serve", tmp_path) as serve:
        sent = asyncio.create_task(serve.send(STREAM))
        await begun.wait()
        assert serve.config.state.in_flight == 1
        serve.config.state.mark_stopping()
        sent.cancel()
        await asyncio.gather(sent, return_exceptions=True)
        assert serve.config.state.in_flight == 1


async def test_question_to_server_is_no_running_request(tmp_path: Path) -> None:
    """The launcher asks for health every second; one that hangs with the engine is not a client's request."""
    engine, begun = hanging_engine()
    async with make_harness(engine, "serve", tmp_path) as serve:
        sent = asyncio.create_task(serve.send(b"", "/health", method="GET"))
        await begun.wait()
        assert serve.config.state.in_flight == 0
        sent.cancel()
        await asyncio.gather(sent, return_exceptions=True)
        assert serve.config.state.in_flight == 0
