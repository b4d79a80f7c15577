"""What the endpoint picker adds behind another gateway: `python -m bench.gateway.endpoint_picker [SECONDS]`.

Problem: each request costs an exchange of several messages between that gateway and the picker.

Idea: as `bench.gateway.latency`, with the Envoy of another gateway and its ext_proc filter in place of the own Envoy,
in both modes for bodies. The open loop at 50 requests a second gives the latency, closed loops give the requests per
second that one picker and one Envoy with one worker carry. Prints one JSON object.
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
from typing import Any, Final

import uvloop

from bench.gateway.latency import MAX_CONNECTIONS, RATE, WARM_UP, Route, cpu_seconds, drive
from tests.gateway.foreign_envoy import BUFFERED, DUPLEX
from tests.gateway.foreign_gateway import ForeignGateway, wait_listening
from tests.gateway.kube_objects import pod
from tests.gateway.picker_harness import service_with_slo
from tests.gateway.stack import ROOT, GatewayStack, stop
from tests.ports import free_port

WORKERS: Final = 32  # of a closed loop


def run(seconds: float) -> dict[str, Any]:
    """Both modes, each for some seconds at RATE and in a closed loop."""
    port = free_port()
    upstream = subprocess.Popen([sys.executable, "-m", "bench.gateway.upstream", str(port)], cwd=ROOT)
    try:
        with tempfile.TemporaryDirectory(dir="/tmp") as directory:
            return uvloop.run(_measure(Path(directory), port, seconds))
    finally:
        stop(upstream)


async def _measure(directory: Path, upstream_port: int, seconds: float) -> dict[str, Any]:
    picker_port = free_port()
    stack = GatewayStack(directory, poll_seconds=2.0, endpoint_picker_port=picker_port)
    try:
        await stack.start([service_with_slo(batch=MAX_CONNECTIONS)], [pod(f"127.0.0.1:{upstream_port}")])
        found: dict[str, Any] = {"load_average": os.getloadavg()[0]}
        for name, mode in (("full_duplex_streamed", DUPLEX), ("buffered", BUFFERED)):
            gateway = ForeignGateway(directory, picker_port, mode)
            try:
                await wait_listening(gateway, stack.http)
                found[name] = await _compare(stack, gateway, upstream_port, seconds)
            finally:
                gateway.stop()
        return found
    finally:
        await stack.shut_down()


async def _compare(stack: GatewayStack, gateway: ForeignGateway, upstream_port: int, seconds: float) -> dict[str, Any]:
    assert stack.picker is not None
    direct, through = Route(upstream_port), Route(gateway.port)
    await drive([direct, through], WARM_UP, RATE)
    for route in (direct, through):
        route.latencies.clear()
    await drive([direct, through], int(seconds * RATE), RATE)
    quantiles = direct.quantiles(), through.quantiles()
    pids = {"picker": stack.picker.pid, "envoy": gateway.process.pid}
    before, started = {name: cpu_seconds(pid) for name, pid in pids.items()}, time.perf_counter()
    count = await _closed_loop(through, seconds)
    duration_s = time.perf_counter() - started
    for route in (direct, through):
        route.close()
    return {
        "direct_ms": quantiles[0],
        "through_gateway_ms": quantiles[1],
        "added_ms": {name: round(value - quantiles[0][name], 3) for name, value in quantiles[1].items()},
        "picks_per_second": round(count / duration_s),
        "cpu_us_per_request": {
            name: round(1e6 * (cpu_seconds(pid) - before[name]) / count) for name, pid in pids.items()
        },
    }


async def _closed_loop(route: Route, seconds: float) -> int:
    """Requests that WORKERS clients get through, each with its next one after an answer."""
    until_s, count = time.perf_counter() + seconds, 0

    async def ask() -> None:
        nonlocal count
        while time.perf_counter() < until_s:
            await route.send()
            count += 1

    await asyncio.gather(*(ask() for _ in range(WORKERS)))
    return count


if __name__ == "__main__":
    print(json.dumps(run(*map(float, sys.argv[1:2] or ["20"])), indent=2))
