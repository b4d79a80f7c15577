"""A watch of API keys whose connection is dead, without a word of it: it is listed again soon."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from kubernetes.aio import client

from plimsoll.adapters import kube_client
from plimsoll.adapters.kube_client import PODS, SECRETS, KubeClient
from tests.ports import free_port


@pytest.fixture
async def kube() -> AsyncIterator[KubeClient]:
    """A client of a server whose lists are empty and whose watches say nothing."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.json_response({"items": [], "metadata": {"resourceVersion": "1"}})
        stream = web.StreamResponse()
        await stream.prepare(request)
        await asyncio.sleep(60.0)
        return stream

    app, port = web.Application(), free_port()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    made = KubeClient(client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{port}")))
    yield made
    await made.close()
    await runner.cleanup()


async def test_silent_watch_of_secrets_is_listed_again(kube: KubeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_client, "SECRET_SILENCE_SECONDS", 0.05)
    async with contextlib.aclosing(kube.watch(SECRETS, "plimsoll-system")) as events:  # type: ignore[type-var]
        found = [(await anext(events)).type for _ in range(2)]
    assert found == ["SYNC", "SYNC"]


def test_only_watches_of_secrets_need_bookmarks() -> None:
    secrets, pods = kube_client.watch_timeout(SECRETS), kube_client.watch_timeout(PODS)
    assert (secrets.sock_read, pods.sock_read) == (kube_client.SECRET_SILENCE_SECONDS, None)
    assert secrets.total == pods.total == kube_client.WATCH_STALL_SECONDS
