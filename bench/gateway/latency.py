"""Requests at a constant rate over kept-alive connections, by several routes in turns; CPU time of a process."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path

RATE = 50.0  # requests a second on each route
MAX_CONNECTIONS = 500  # at the upstream: none is ever refused
WARM_UP = 100
BODY = json.dumps(
    {"model": "chat", "messages": [{"role": "user", "content": "word " * 400}], "max_tokens": 16}
).encode()


def request(body: bytes, headers: bytes = b"") -> bytes:
    """Returns a request for a chat completion. `headers` are whole lines."""
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        b"%bcontent-length: %d\r\n\r\n%b" % (headers, len(body), body)
    )


class Route:
    """One route to the upstream: a pool of kept-alive connections and the latencies seen, in seconds."""

    def __init__(self, port: int, requests: Sequence[bytes] = (request(BODY),)) -> None:
        self._port = port
        self._requests = itertools.cycle(requests)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.latencies: list[float] = []

    async def send(self) -> None:
        pair = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = pair
        began = time.perf_counter()
        writer.write(next(self._requests))
        head = await reader.readuntil(b"\r\n\r\n")
        if b"transfer-encoding: chunked" in head.lower():
            await reader.readuntil(b"0\r\n\r\n")
        else:
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
        self.latencies.append(time.perf_counter() - began)
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"not answered: {head[:200]!r}")
        self._idle.append(pair)

    def quantiles(self) -> dict[str, float]:
        ordered = sorted(self.latencies)
        return {f"p{q}": round(1e3 * ordered[int(q / 100 * (len(ordered) - 1))], 3) for q in (50, 95, 99)}

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


def cpu_seconds(pid: int) -> float:
    """Time on a CPU of a process, its threads included."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def drive(routes: Sequence[Route], count: int, rate: float) -> None:
    """Ask on each route `count` times at this rate, in turns, without waiting for answers."""
    began = time.perf_counter()
    tasks = []
    for number in range(count * len(routes)):
        due_s = began + number / (rate * len(routes))
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        tasks.append(asyncio.ensure_future(routes[number % len(routes)].send()))
    await asyncio.gather(*tasks)
