"""A pod's page: whole, or a reason in words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from plimsoll.adapters.pod_http import MAX_ENGINE_PAGE_BYTES
from plimsoll.adapters.pod_http import get_page as get_bounded_page
from plimsoll.controllers.operator import OperatorProcess
from plimsoll.controllers.operator_config import OperatorConfig
from plimsoll.core.errors import BackendUnavailable
from tests import builders

get_page = partial(get_bounded_page, max_bytes=1_000_000)
Get = Callable[[str], Awaitable[bytes]]


async def fine(request: web.Request) -> web.Response:
    return web.Response(body=b"{}" if request.headers["Accept-Encoding"] == "identity" else b"")


async def pieces(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    for _ in range(100):
        await answer.write(b"x" * 1000)
    return answer


async def endless(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    for _ in range(64):
        await answer.write(b"x" * (1 << 20))
    return answer


async def cut(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse(headers={"Content-Length": "100"})
    await answer.prepare(request)
    await answer.write(b"half")
    assert request.transport is not None
    request.transport.close()
    return answer


async def elsewhere(_: web.Request) -> web.Response:
    raise web.HTTPFound("/fine")


async def never(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


async def stuck(request: web.Request) -> web.StreamResponse:
    answer = web.StreamResponse()
    await answer.prepare(request)
    await answer.write(b"half")
    await asyncio.Event().wait()
    return answer


@pytest.fixture
async def port() -> AsyncIterator[int]:
    app = web.Application()
    for handler in (fine, pieces, endless, cut, elsewhere, never, stuck):
        app.router.add_get(f"/{handler.__name__}", handler)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    assert server.port is not None
    yield server.port
    await server.close()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


async def test_get_page_returns_complete_body(session: aiohttp.ClientSession, port: int) -> None:
    assert await get_page(session, "127.0.0.1", port, "/fine") == b"{}"
    assert await get_page(session, "127.0.0.1", port, "/pieces") == b"x" * 100_000


@pytest.mark.parametrize(("path", "status"), [("/none", 404), ("/elsewhere", 302)])
async def test_get_page_error_status_raises_with_status(
    session: aiohttp.ClientSession, port: int, path: str, status: int
) -> None:
    with pytest.raises(BackendUnavailable, match=f"127.0.0.1:{port}{path} answered with {status}") as error:
        await get_page(session, "127.0.0.1", port, path)
    assert error.value.status == status


async def test_get_page_truncated_body_raises(session: aiohttp.ClientSession, port: int) -> None:
    with pytest.raises(BackendUnavailable, match=f"127.0.0.1:{port}/cut: "):
        await get_page(session, "127.0.0.1", port, "/cut")


async def test_get_page_oversized_body_raises(session: aiohttp.ClientSession, port: int) -> None:
    with pytest.raises(BackendUnavailable, match="more than 50000 bytes"):
        await get_page(session, "127.0.0.1", port, "/pieces", max_bytes=50_000)


@pytest.mark.parametrize("path", ["/never", "/stuck"])
async def test_get_page_timeout_raises(session: aiohttp.ClientSession, port: int, path: str) -> None:
    with pytest.raises(BackendUnavailable, match=r"did not answer within 50 ms"):
        await get_page(session, "127.0.0.1", port, path, timeout_s=0.05)


@pytest.mark.parametrize(
    ("address", "words"), [("127.0.0.1", "onnect"), ("::1", r"http://\[::1\]:"), ("no ip", "no ip")]
)
async def test_get_page_unreachable_address_raises(session: aiohttp.ClientSession, address: str, words: str) -> None:
    with pytest.raises(BackendUnavailable, match=words):
        await get_page(session, address, unused_port(), "/fine")


async def test_operator_reads_at_most_one_mebibyte_of_an_engine(session: aiohttp.ClientSession, port: int) -> None:
    process = OperatorProcess(None, OperatorConfig(builders.PLATFORM, "plimsoll-system", "me"), session)  # type: ignore[arg-type]
    get_engine_page = process.engine_poller._http_get
    assert await get_engine_page("127.0.0.1", port, "/pieces") == b"x" * 100_000
    with pytest.raises(BackendUnavailable, match=f"more than {MAX_ENGINE_PAGE_BYTES} bytes"):
        await get_engine_page("127.0.0.1", port, "/endless")
