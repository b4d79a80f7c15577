"""What the gateway adds to a request, and what a pick costs: `python -m bench.gateway.latency [SECONDS [RATE]]`.

Problem: an engine's own latency is a hundred times what the gateway adds, and on a busy machine two runs cannot be
compared.

Idea: a constant upstream in a process of its own, asked directly and through Envoy and picker in turns within one
run, each at so many requests a second (50 if not told) with kept-alive connections, through a service with a gate. CPU
is the processes' own, from /proc, over the same requests. Prints one JSON object; latencies in milliseconds, CPU in
microseconds per request through the gateway. What is added is percentile less percentile. On a busy machine the direct
way's own percentiles tell how much of it is the machine's.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from tests.gateway.kube_objects import pod
from tests.gateway.picker_harness import service_with_slo
from tests.gateway.stack import ROOT, GatewayStack, stop
from tests.ports import free_port

RATE = 50.0  # requests a second on each way
MAX_CONNECTIONS = 500  # at the upstream: none is ever refused
BODY = json.dumps(
    {"model": "chat", "messages": [{"role": "user", "content": "word " * 400}], "max_tokens": 16}
).encode()
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(BODY), BODY)
)
WARM_UP = 100


class Route:
    """One way to the upstream: a pool of kept-alive connections and the latencies seen, in seconds."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.latencies: list[float] = []

    async def send(self) -> None:
        pair = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = pair
        began = time.perf_counter()
        writer.write(REQUEST)
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


async def drive(routes: list[Route], count: int, rate: float) -> None:
    """Ask each way `count` times at this rate, in turns, without waiting for answers."""
    began = time.perf_counter()
    tasks = []
    for number in range(count * len(routes)):
        due_s = began + number / (rate * len(routes))
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        tasks.append(asyncio.ensure_future(routes[number % len(routes)].send()))
    await asyncio.gather(*tasks)


def run(seconds: float, rate: float = RATE) -> dict[str, Any]:
    """Both ways for so many seconds, beside an upstream, a picker and an Envoy of our own."""
    port = free_port()
    upstream = subprocess.Popen([sys.executable, "-m", "bench.gateway.upstream", str(port)], cwd=ROOT)
    try:
        with tempfile.TemporaryDirectory(dir="/tmp") as directory:
            return uvloop.run(measure(Path(directory), port, int(seconds * rate), rate))
    finally:
        stop(upstream)


async def measure(directory: Path, upstream_port: int, count: int, rate: float) -> dict[str, Any]:
    stack = GatewayStack(directory, poll_seconds=2.0)
    try:
        await stack.start([service_with_slo(batch=MAX_CONNECTIONS)], [pod(f"127.0.0.1:{upstream_port}")])
        return await compare(stack, upstream_port, count, rate)
    finally:
        await stack.shut_down()


async def compare(stack: GatewayStack, upstream_port: int, count: int, rate: float) -> dict[str, Any]:
    assert stack.picker is not None
    assert stack.envoy is not None
    direct, via_gateway = Route(upstream_port), Route(stack.settings.port)
    await drive([direct, via_gateway], WARM_UP, rate)
    for route in (direct, via_gateway):
        route.latencies.clear()
    pids = {"picker": stack.picker.pid, "envoy": stack.envoy.pid}
    idle_before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    await asyncio.sleep(2.0)
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}
    idle = {name: (before[name] - idle_before[name]) / 2.0 for name in pids}
    started = time.perf_counter()
    await drive([direct, via_gateway], count, rate)
    duration_s = time.perf_counter() - started
    cpu_s_used = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
    failed_open = (await stack.admin.stats()).failed_open
    for route in (direct, via_gateway):
        route.close()
    added = {name: round(value - direct.quantiles()[name], 3) for name, value in via_gateway.quantiles().items()}
    return {
        "requests_each_way": count,
        "rate_each_way": rate,
        "direct_ms": direct.quantiles(),
        "through_gateway_ms": via_gateway.quantiles(),
        "added_ms": added,
        "failed_open": failed_open,
        "cpu_us_per_request": {n: round(1e6 * (cpu_s_used[n] - idle[n] * duration_s) / count, 1) for n in pids},
        "cpu_percent_at_rest": {n: round(100 * idle[n], 2) for n in pids},
        "load_average": os.getloadavg()[0],
    }


if __name__ == "__main__":
    print(json.dumps(run(*map(float, sys.argv[1:] or ["20"])), indent=2))
