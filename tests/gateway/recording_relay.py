"""What clients send and get, attempt by attempt: a relay in front of the gateway, and clients as processes.

Problem: an SDK's retries are its own affair, seen neither by its caller nor, told apart from other callers', by the
gateway.

Idea: every request passes a relay that notes when it came, when its answer went back, and what the answer said of
coming back. A user is known by the body, which no SDK changes between attempts.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

HOP_BY_HOP_HEADERS = {"host", "connection", "transfer-encoding", "content-length", "content-encoding", "keep-alive"}
CLIENTS = Path(__file__).with_name("clients")


@dataclass
class RecordedAttempt:
    """One request on the wire; times are monotonic seconds. retry_count: as the SDK says, None if it does not."""

    received_s: float
    retry_count: str | None
    status: int = 0
    retry_after: str | None = None
    should_retry: str | None = None
    responded_s: float = 0.0


@dataclass
class RecordingRelay:
    """The relay. attempts: of each user, by body, in their order."""

    upstream: str
    attempts: dict[bytes, list[RecordedAttempt]] = field(default_factory=lambda: defaultdict(list))
    _runner: web.AppRunner | None = None
    _http: aiohttp.ClientSession | None = None
    url: str = ""

    async def start(self) -> RecordingRelay:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._relay)
        self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._http is not None:
            await self._http.close()

    def users(self, model: str) -> list[list[RecordedAttempt]]:
        """All users of a model, each with its attempts."""
        return [tries for body, tries in self.attempts.items() if json.loads(body)["model"] == model]

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        assert self._http is not None
        body = await request.read()
        attempt = RecordedAttempt(time.monotonic(), request.headers.get("x-stainless-retry-count"))
        self.attempts[body].append(attempt)
        sent = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP_HEADERS}
        async with self._http.request(request.method, self.upstream + request.path, data=body, headers=sent) as answer:
            attempt.status = answer.status
            attempt.retry_after = answer.headers.get("retry-after")
            attempt.should_retry = answer.headers.get("x-should-retry")
            passed = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP_HEADERS}
            back = web.StreamResponse(status=answer.status, headers=passed)
            await back.prepare(request)
            attempt.responded_s = time.monotonic()
            try:
                async for chunk in answer.content.iter_any():
                    await back.write(chunk)
            except aiohttp.ClientPayloadError:  # cut there, so cut here
                if request.transport is not None:
                    request.transport.abort()
                return back
        await back.write_eof()
        return back


class ClientProcess:
    """A client's process, which asks when it is told."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, *argv: str) -> ClientProcess:
        """Start it; `ready` is to be awaited next, which takes seconds."""
        env = {**os.environ, "NO_PROXY": "*", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        pipe = asyncio.subprocess.PIPE
        return cls(await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe, env=env))

    async def ready(self) -> None:
        """Wait until it reads what it is told."""
        assert self._process.stdout is not None
        assert await self._process.stdout.readline() == b"ready\n"

    async def ask(self, model: str, words: Sequence[str], *, stream: bool = False) -> list[str]:
        """One user for each of the words, all at once; what each got in the end."""
        found: list[str] = await self.tell({"model": model, "words": list(words), "stream": stream})
        return found

    async def tell(self, task: Mapping[str, Any]) -> Any:
        """What the client answers to one task."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(task).encode() + b"\n")
        return json.loads(await self._process.stdout.readline())

    async def stop(self) -> None:
        self._process.kill()
        await self._process.wait()
