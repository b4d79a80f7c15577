"""A proxy of 127.0.0.1 between an operator and a real API server, which misbehaves as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

from tests.apiserver import ApiServer
from tests.ports import free_port

MAX_HANG_SECONDS = 120.0
HOP_HEADERS = ("host", "content-length", "transfer-encoding")


class Fault(StrEnum):
    """What the API server does wrong."""

    NONE = "answers"
    REFUSE = "refuses connections"
    HANG = "never answers"
    THROTTLE = "answers 429 with Retry-After"
    ERROR = "answers 500"
    GARBAGE = "answers 200 with garbage"
    SHORT_WATCH = "ends each watch at once"
    EXPIRED = "answers each watch with ERROR 410"
    FAILED_WATCH = "answers each watch with ERROR 500"


class FaultyApi:
    """Forwards each request to the API server, unless `fault` says otherwise."""

    def __init__(self, server: ApiServer, session: aiohttp.ClientSession) -> None:
        self.fault = Fault.NONE
        self.requests: Counter[str] = Counter()  # by method and path
        self._server, self._session = server, session
        self._port = free_port()
        self._site: web.TCPSite | None = None
        self._runner = web.AppRunner(self._app(), access_log=None, shutdown_timeout=0.1)

    async def start(self) -> None:
        await self._runner.setup()
        await self._listen()

    async def stop(self) -> None:
        await self._runner.cleanup()
        await asyncio.sleep(0.1)  # for the transports that are being closed

    async def set(self, fault: Fault) -> None:
        """Change the fault. Connections of before are closed, as those of a server that has restarted."""
        self.fault = fault
        await self._runner.cleanup()
        self._runner = web.AppRunner(self._app(), access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        if fault is not Fault.REFUSE:
            await self._listen()

    def kubeconfig(self, folder: Path) -> Path:
        """A kubeconfig that leads to this proxy."""
        config = yaml.safe_load(self._server.kubeconfig.read_text())
        config["clusters"][0]["cluster"] = {"server": f"http://127.0.0.1:{self._port}"}
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump(config))
        return path

    async def _listen(self) -> None:
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests[f"{request.method} {request.path}"] += 1
        is_watch = "watch" in request.query
        match self.fault:
            case Fault.HANG:
                await asyncio.sleep(MAX_HANG_SECONDS)
            case Fault.THROTTLE:
                return _status(429, "too many requests", {"Retry-After": "1"})
            case Fault.ERROR:
                return _status(500, "etcdserver: request timed out")
            case Fault.GARBAGE:
                return web.Response(text="<html>It works!</html>", content_type="application/json")
            case Fault.SHORT_WATCH if is_watch:
                return web.Response(body=b"", content_type="application/json")
            case Fault.EXPIRED if is_watch:
                return _watch_error(410, "Expired", "too old")
            case Fault.FAILED_WATCH if is_watch:
                return _watch_error(500, "InternalError", "etcd event received with PrevKv=nil")
        return await self._forward(request)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        headers = {
            k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length", "transfer-encoding")
        }
        url = f"{self._server.url}{request.path_qs}"
        body = await request.read()
        async with self._session.request(request.method, url, headers=headers, data=body or None) as upstream:
            response = web.StreamResponse(status=upstream.status, headers={"Content-Type": upstream.content_type})
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):  # the operator has gone
                await response.prepare(request)
                async for chunk in upstream.content.iter_any():
                    await response.write(chunk)
            return response


def _status(code: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    status: dict[str, Any] = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message}
    return web.json_response({**status, "code": code}, status=code, headers=headers)


def _watch_error(code: int, reason: str, message: str) -> web.Response:
    status = {"kind": "Status", "apiVersion": "v1", "code": code, "reason": reason, "message": message}
    return web.Response(text=json.dumps({"type": "ERROR", "object": status}) + "\n")


@asynccontextmanager
async def faulty_api(server: ApiServer) -> AsyncIterator[FaultyApi]:
    """A proxy in front of a real API server."""
    trust = ssl.create_default_context(cafile=str(server.folder / "apiserver.crt"))
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trust, limit=0), timeout=timeout) as session:
        proxy = FaultyApi(server, session)
        await proxy.start()
        try:
            yield proxy
        finally:
            await proxy.stop()
