"""CPU time of aiohttp and httpx for the operator's most frequent request: the metrics page of an engine.

Problem: the operator reads the page of every busy engine each five seconds, in one thread.
Idea: a second process serves one page on many ports of 127.0.0.1, one port per engine. Both clients read all pages with
kept-alive connections and the operator's concurrency, in turns, so that they share the machine's noise.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Final

import aiohttp
import httpx

from plimsoll.adapters.pod_http import MAX_ENGINE_PAGE_BYTES, get_page
from plimsoll.controllers.engine_poller import MAX_CONCURRENT_REQUESTS
from plimsoll.core.errors import BackendUnavailable

ENGINES: Final = (20, 500)
ROUNDS: Final = 3
TIMEOUT_S: Final = 30.0  # a busy machine must not end a measurement
_PAGE: Final = b'vllm:request_success_total{engine="0",model_name="m",finished_reason="stop"} 1.0\n' * 1200  # 98 KB
_RESPONSE: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n%b" % (len(_PAGE), _PAGE)

Fetch = Callable[[int], Awaitable[bytes]]


class _Engine(asyncio.Protocol):
    """Answers each request of a connection with the page. A client sends its next request after the answer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"\r\n\r\n"):
            self._transport.write(_RESPONSE)


async def _serve(ports: Connection) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(_Engine, "127.0.0.1", 0) for _ in range(max(ENGINES))]
    ports.send([server.sockets[0].getsockname()[1] for server in servers])
    await asyncio.Event().wait()


def _serve_process(ports: Connection) -> None:
    asyncio.run(_serve(ports))


async def _cpu_seconds(fetch: Fetch, ports: list[int]) -> float:
    """CPU seconds of this process for one page of each port."""
    slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

    async def fetch_one(port: int) -> None:
        async with slots:
            assert len(await fetch(port)) == len(_PAGE)

    before = time.process_time()
    await asyncio.gather(*map(fetch_one, ports))
    return time.process_time() - before


async def _httpx_page(client: httpx.AsyncClient, port: int) -> bytes:
    """The page with the same limits as `get_page` has."""
    body = bytearray()
    async with (
        asyncio.timeout(TIMEOUT_S),
        client.stream("GET", f"http://127.0.0.1:{port}/metrics", headers={"Accept-Encoding": "identity"}) as response,
    ):
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > MAX_ENGINE_PAGE_BYTES:
                raise BackendUnavailable("the page is too long")
    return bytes(body)


async def compare(ports: list[int]) -> dict[str, object]:
    """CPU milliseconds per page of each client, from the median round, and their ratio."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    spent: dict[str, list[float]] = {"aiohttp": [], "httpx": []}
    async with (
        aiohttp.ClientSession() as session,
        httpx.AsyncClient(limits=limits, timeout=None, trust_env=False) as client,
    ):
        fetches: dict[str, Fetch] = {
            "aiohttp": lambda port: get_page(
                session, "127.0.0.1", port, "/metrics", max_bytes=MAX_ENGINE_PAGE_BYTES, timeout_s=TIMEOUT_S
            ),
            "httpx": lambda port: _httpx_page(client, port),
        }
        for number in range(1 + ROUNDS):
            for name, fetch in fetches.items():
                seconds = await _cpu_seconds(fetch, ports)
                if number:  # the first round opens the connections
                    spent[name].append(seconds)
    medians = {name: statistics.median(seconds) for name, seconds in spent.items()}
    return {
        "engines": len(ports),
        "page_bytes": len(_PAGE),
        "cpu_ms_per_page": {name: round(1e3 * seconds / len(ports), 3) for name, seconds in medians.items()},
        "cpu_s_per_round": {name: [round(one, 3) for one in seconds] for name, seconds in spent.items()},
        "httpx_over_aiohttp": round(medians["httpx"] / medians["aiohttp"], 2),
    }


def main() -> None:
    """Print the comparison for each number of engines as a line of JSON."""
    ports, child = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=_serve_process, args=(child,), daemon=True)
    server.start()
    try:
        listening = ports.recv()
        for engines in ENGINES:
            print(json.dumps(asyncio.run(compare(listening[:engines]))), flush=True)
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
