"""Nothing that a user writes into an object hides its events from the operator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from plimsoll.api import labels
from plimsoll.controllers import kopf_handlers
from plimsoll.controllers.operator_config import LIST_CHUNK
from tests import builders
from tests.ports import free_port

Object = dict[str, Any]
HOSTILE = {
    "kopf.zalando.org/last-handled-configuration": "garbage{",
    "kopf.zalando.org/on_service_event": "garbage{",
    "kopf.zalando.org/touch-dummy": "{",
    "kopf.dev/kopf-managed": "{",
}


class Server:
    """An API server that lists services and sends one watch event. calls: method and query of each request for them."""

    def __init__(self, *services: Object) -> None:
        self.services = services
        self.events: list[Object] = []
        self.calls: list[tuple[str, dict[str, str]]] = []

    async def answer(self, request: web.Request) -> web.StreamResponse:
        root = f"/apis/{labels.GROUP}"
        if request.path == "/apis":
            versions = [{"version": labels.VERSION, "groupVersion": labels.API_VERSION}]
            group = {"name": labels.GROUP, "versions": versions, "preferredVersion": versions[0]}
            return web.json_response({"groups": [group]})
        if request.path == f"{root}/{labels.VERSION}":
            kind = {"name": labels.PLURAL, "kind": labels.KIND, "singularName": "", "namespaced": True}
            return web.json_response({"resources": [{**kind, "verbs": ["list", "watch", "patch"]}]})
        if request.path == "/api":
            return web.json_response({"versions": ["v1"]})
        if request.path == "/api/v1":
            verbs = ["get", "list", "watch", "patch", "create"]
            names = {"namespaces": "Namespace", "events": "Event"}
            kinds = [{"name": one, "kind": kind, "singularName": "", "verbs": verbs} for one, kind in names.items()]
            return web.json_response({"resources": [{**one, "namespaced": one["name"] == "events"} for one in kinds]})
        if labels.PLURAL not in request.path:
            return web.json_response({"resources": [], "versions": [], "items": [], "metadata": {}})
        self.calls.append((request.method, dict(request.query)))
        if "watch" not in request.query:
            limit, start = int(request.query["limit"]), int(request.query.get("continue", "0"))
            page, end = self.services[start : start + limit], start + limit
            more = {"continue": str(end)} if end < len(self.services) else {}
            return web.json_response({"items": page, "metadata": {"resourceVersion": "1", **more}})
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self.events:
            await response.write(json.dumps(event).encode() + b"\n")
        await asyncio.sleep(60)
        return response


@asynccontextmanager
async def served(server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Serve, and let clients of this process find the server."""
    app, port = web.Application(), free_port()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    config = {
        "current-context": "a",
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}],
        "clusters": [{"name": "a", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "a", "user": {}}],
    }
    (folder / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(folder / "kubeconfig"))
    try:
        yield
    finally:
        await runner.cleanup()


@asynccontextmanager
async def watched(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[asyncio.Queue[tuple[str, bool]]]:
    """Watch the services of a server with kopf, as the operator does; yields the names and whether they are gone."""
    taken: asyncio.Queue[tuple[str, bool]] = asyncio.Queue()
    async with served(server, folder, monkeypatch):
        task = asyncio.create_task(
            kopf_handlers.watch_services(lambda obj, gone: taken.put_nowait((obj["metadata"]["name"], gone)), ("team",))
        )
        try:
            yield taken
        finally:
            task.cancel()
            await asyncio.wait((task,))


async def next_of(taken: asyncio.Queue[tuple[str, bool]]) -> tuple[str, bool]:
    return await asyncio.wait_for(taken.get(), 30)


async def test_kopf_hostile_annotations_hide_no_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = builders.service("hostile")
    hostile["metadata"]["annotations"] = HOSTILE
    server = Server(hostile)
    server.events = [{"type": "MODIFIED", "object": hostile}, {"type": "DELETED", "object": hostile}]
    async with watched(server, tmp_path, monkeypatch) as taken:
        assert [await next_of(taken) for _ in range(3)] == [("hostile", False), ("hostile", False), ("hostile", True)]
    assert {method for method, _ in server.calls} == {"GET"}


async def test_kopf_finalizer_of_a_user_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = builders.service("hostile")
    hostile["metadata"]["finalizers"] = ["kopf.zalando.org/KopfFinalizerMarker"]
    server = Server(hostile)
    server.events = [{"type": "MODIFIED", "object": hostile}]
    async with watched(server, tmp_path, monkeypatch) as taken:
        assert [await next_of(taken) for _ in range(2)] == [("hostile", False)] * 2
    assert {method for method, _ in server.calls} == {"GET"}


async def test_kopf_lists_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(*(builders.service(f"chat-{number}") for number in range(LIST_CHUNK + 1)))
    async with watched(server, tmp_path, monkeypatch) as taken:
        assert len({await next_of(taken) for _ in range(LIST_CHUNK + 1)}) == LIST_CHUNK + 1
    assert [query.get("limit") for _, query in server.calls[:2]] == [str(LIST_CHUNK)] * 2


@pytest.mark.parametrize(("query", "waits"), [("", True), ("?limit=10&continue=a", False)])
async def test_pacer_does_not_delay_further_chunks(query: str, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(kopf_handlers.asyncio, "sleep", sleep)
    params: Any = aiohttp.TraceRequestStartParams("GET", URL(f"http://x/apis{query}"), None)  # type: ignore[arg-type]
    await kopf_handlers.RequestPacer()(None, None, params)
    assert bool(slept) == waits
