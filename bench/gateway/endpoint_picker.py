"""What the endpoint picker adds behind another gateway: `python -m bench endpoint-picker`.

Problem: each request costs an exchange of several messages between that gateway and the picker, and on a busy machine
two runs cannot be compared.

Idea: one constant upstream, one picker process, and four ways to the upstream, all started at once: none in between,
the own Envoy, and the Envoy of another gateway with its ext_proc filter in both modes for bodies. Each round asks all
ways in turns at a fixed rate, which gives the latency that a way adds. Then it drives each way in a closed loop, which
gives requests per second, and CPU of the way's Envoy and of the picker from /proc. Figures of ways are compared within
a round. CPU depends less on what else the machine does than the rest. Envoys have one worker. All on 127.0.0.1. Prints
a table of medians, and writes all rounds as JSON to the file of `--out`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop

from bench.gateway.latency import MAX_CONNECTIONS, RATE, Route, cpu_seconds, drive
from tests.gateway.foreign_envoy import BUFFERED, DUPLEX
from tests.gateway.foreign_gateway import ForeignGateway, wait_listening
from tests.gateway.kube_objects import pod
from tests.gateway.picker_harness import service_with_slo
from tests.gateway.stack import ROOT, GatewayStack, stop
from tests.ports import free_port

DIRECT: Final = "no gateway"
OWN: Final = "own gateway"
MODES: Final = {"ext_proc, streamed bodies": DUPLEX, "ext_proc, buffered bodies": BUFFERED}
WORKERS: Final = 32  # of a closed loop
WARM_UP: Final = 100  # requests of each way
OUT: Final = Path("build/bench/endpoint_picker.json")

Row = dict[str, Any]  # one way in one round


@dataclass(frozen=True)
class Way:
    """One way to the upstream. pids: of its processes, by name."""

    route: Route
    pids: Mapping[str, int]

    def cpu_s(self) -> dict[str, float]:
        return {name: cpu_seconds(pid) for name, pid in self.pids.items()}


def run(rounds: int, seconds: float) -> list[Row]:
    """All rounds. seconds: of each way at RATE, and in its closed loop."""
    port = free_port()
    upstream = subprocess.Popen([sys.executable, "-m", "bench.gateway.upstream", str(port)], cwd=ROOT)
    try:
        with tempfile.TemporaryDirectory(dir="/tmp") as directory:
            return uvloop.run(_measure(Path(directory), port, rounds, seconds))
    finally:
        stop(upstream)


async def _measure(directory: Path, upstream_port: int, rounds: int, seconds: float) -> list[Row]:
    async with _ways(directory, upstream_port) as ways:
        await drive([way.route for way in ways.values()], WARM_UP, RATE)
        return [row for number in range(rounds) for row in await _round(number, ways, seconds)]


@asynccontextmanager
async def _ways(directory: Path, upstream_port: int) -> AsyncIterator[dict[str, Way]]:
    picker_port = free_port()
    stack = GatewayStack(directory, poll_seconds=2.0, endpoint_picker_port=picker_port)
    stack.envoy_workers = 1
    gateways: list[ForeignGateway] = []
    ways = {DIRECT: Way(Route(upstream_port), {})}
    try:
        await stack.start([service_with_slo(batch=MAX_CONNECTIONS)], [pod(f"127.0.0.1:{upstream_port}")])
        assert stack.envoy is not None
        assert stack.picker is not None
        ways[OWN] = Way(Route(stack.settings.port), {"envoy": stack.envoy.pid, "picker": stack.picker.pid})
        for name, mode in MODES.items():
            gateways.append(gateway := ForeignGateway(directory, picker_port, mode))
            await wait_listening(gateway, stack.http)
            ways[name] = Way(Route(gateway.port), {"envoy": gateway.process.pid, "picker": stack.picker.pid})
        yield ways
    finally:
        for way in ways.values():
            way.route.close()
        for gateway in gateways:
            gateway.stop()
        await stack.shut_down()


async def _round(number: int, ways: Mapping[str, Way], seconds: float) -> list[Row]:
    for way in ways.values():
        way.route.latencies.clear()
    await drive([way.route for way in ways.values()], max(1, int(seconds * RATE)), RATE)
    rows = [{"round": number, "way": name, "ms": way.route.quantiles()} for name, way in ways.items()]
    for row, way in zip(rows, ways.values(), strict=True):
        before, began_s = way.cpu_s(), time.perf_counter()
        count = await _closed_loop(way.route, seconds)
        row["per_s"] = round(count / (time.perf_counter() - began_s))
        row["cpu_us"] = {name: round(1e6 * (used - before[name]) / count) for name, used in way.cpu_s().items()}
        row["load_average"] = round(os.getloadavg()[0], 1)
    return rows


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


def table(rows: Sequence[Row]) -> str:
    """Medians of the rounds. Added is less the same percentile of no gateway; in brackets: ratio to the own gateway."""
    rounds = [
        {row["way"]: row for row in rows if row["round"] == number} for number in sorted({row["round"] for row in rows})
    ]

    def median(way: str, base: str, value: Callable[[Row, Row], float]) -> float:
        return statistics.median(value(each[way], each[base]) for each in rounds)

    lines = [
        "| way | added p50, ms | p95 | p99 | requests/s | CPU of a request, µs: Envoy + picker |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for way in (OWN, *MODES):
        cells = [way, *(f"{median(way, DIRECT, _added(quantile)):.2f}" for quantile in ("p50", "p95", "p99"))]
        rate = (
            median(way, OWN, lambda row, _: row["per_s"]),
            median(way, OWN, lambda row, own: row["per_s"] / own["per_s"]),
        )
        cells.append(f"{rate[0]:.0f} ({rate[1]:.2f})")
        envoy_us, picker_us = (median(way, OWN, _cpu_us(name)) for name in ("envoy", "picker"))
        ratio = median(way, OWN, lambda row, own: sum(row["cpu_us"].values()) / sum(own["cpu_us"].values()))
        cells.append(f"{envoy_us:.0f} + {picker_us:.0f} ({ratio:.2f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _added(quantile: str) -> Callable[[Row, Row], float]:
    return lambda row, base: float(row["ms"][quantile] - base["ms"][quantile])


def _cpu_us(name: str) -> Callable[[Row, Row], float]:
    return lambda row, _: float(row["cpu_us"][name])


def main(words: Sequence[str]) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m bench endpoint-picker")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each way in each half of a round")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args(words)
    rows = run(arguments.rounds, arguments.seconds)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    print(table(rows))
    return 0
