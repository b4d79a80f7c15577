"""CPU of this gateway per request beside others, in one run: `python -m bench.gateway.peers [OPTIONS] [TREE...]`.

Four constant engines, and these ways to them, all started at once and measured in turns: Envoy alone, this gateway for
a service without and with an SLO, and two routers in their cache-aware mode. `sglang-router` and `vllm-router` are used
if they are on the PATH (`pip install sglang-router vllm-router` into a virtual environment), and skipped otherwise. A
TREE is a work tree of another commit, whose gateway is measured in the same turns.

Each round measures each workload on each way in a closed loop. CPU is that of all processes of a way, from /proc, less
what they use at rest. So all ways share the machine's noise, and the ratio within a round is what to compare. Prints a
table, and writes all rounds as JSON to the file of `--out`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import uvloop

from bench.gateway.latency import cpu_seconds
from bench.gateway.upstream import CHUNKS
from tests.gateway.envoy_binary import ENVOY
from tests.gateway.stack import ROOT, stop
from tests.ports import free_port, free_ports

ENGINES: Final = 4
WORKERS: Final = 2  # threads of Envoy, as the chart's default; the routers take one for each core
WARM_UP_S: Final = 0.3
SETTLE_S: Final = 5.0  # until processes that have started are at rest
REST_S: Final = 5.0
START_S: Final = 60.0
DISTINCT_BODIES: Final = 64
GATEWAY: Final = "gateway"
WITH_SLO: Final = "gateway with slo"
REFERENCE: Final = "sglang-router"

_SCRIPT: Final = Path(__file__).with_name("gateway_process.py")


class Workload(NamedTuple):
    """Requests of one kind by a number of connections. `units` are those by which the CPU of one request is divided."""

    name: str
    body_bytes: int
    connections: int
    units: int = 1
    stream: bool = False

    def bodies(self, model: str) -> list[bytes]:
        """Returns requests with a common start of a quarter, such as instructions, and a conversation of their own."""
        common = "You are a helpful assistant that answers\nin short sentences. "
        instructions = (common * (self.body_bytes // 4 // len(common) + 1))[: self.body_bytes // 4]
        size = self.body_bytes - len(instructions)
        return [
            json.dumps(
                {
                    "model": model,
                    "messages": [
                        {"role": "system", "content": instructions},
                        {"role": "user", "content": (f"Line {n} of the text says\nthat it is so. " * size)[:size]},
                    ],
                    "max_tokens": 64,
                    "stream": self.stream,
                }
            ).encode()
            for n in range(DISTINCT_BODIES)
        ]


WORKLOADS: Final = (
    Workload("8 KB request, 32 connections", 8_000, 32),
    Workload("100 KB request, 16 connections", 100_000, 16),
    Workload("streamed chunk, 64 streams", 2_000, 64, CHUNKS, stream=True),
)


class Way(NamedTuple):
    """One way to the engines: its port, its processes without their children, and the model that it serves."""

    name: str
    port: int
    pids: tuple[int, ...]
    model: str = "chat"

    def cpu_s(self) -> list[float]:
        """Returns the CPU time of each process with its children."""
        return [sum(map(cpu_seconds, _with_children(pid))) for pid in self.pids]


def _with_children(pid: int) -> Iterator[int]:
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        yield parent
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            waiting += map(int, children.read_text().split())


class Client(asyncio.Protocol):
    """One connection that sends requests one after the other. `completed` counts the responses."""

    def __init__(self, requests: Sequence[bytes], first: int) -> None:
        self._requests, self._next = requests, first
        self._buffer = bytearray()
        self._body_bytes: int | None = None  # of the current response, None until its head is there, -1 if chunked
        self.completed = 0
        self.failure: str | None = None
        self.is_stopping = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_stopping:
            self.failure = f"a connection was closed: {exc}"

    def close(self) -> None:
        self.is_stopping = True
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._body_bytes is None:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[:end]).lower()
            if not head.startswith(b"http/1.1 200"):
                self.failure = f"a request failed: {bytes(self._buffer)[:300]!r}"
            _, found, length = head.partition(b"content-length: ")
            self._body_bytes = int(length.split(b"\r\n")[0]) if found else -1
            del self._buffer[: end + 4]
        if self._body_bytes >= 0:
            is_complete = len(self._buffer) >= self._body_bytes
        else:
            is_complete = self._buffer.endswith(b"0\r\n\r\n")
        if is_complete:
            self._buffer.clear()
            self._body_bytes = None
            self.completed += 1
            self._send()

    def _send(self) -> None:
        self._transport.write(self._requests[self._next % len(self._requests)])
        self._next += 1


class Result(NamedTuple):
    """Microseconds of CPU of each process per unit of the workload, and requests per second."""

    cpu_us: tuple[float, ...]
    requests_per_s: float


async def measure(way: Way, workload: Workload, seconds: float, rest: Sequence[float]) -> Result:
    """Run a workload on a way. `rest` is its CPU per second at rest. Raises RuntimeError if a request fails."""
    requests = [
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        b"user-agent: OpenAI/Python 2.0\r\naccept: application/json\r\naccept-encoding: gzip\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
        for body in workload.bodies(way.model)
    ]
    loop = asyncio.get_running_loop()
    clients = [Client(requests, n) for n in range(workload.connections)]
    for client in clients:
        await loop.create_connection(lambda client=client: client, "127.0.0.1", way.port)  # type: ignore[misc]
    await asyncio.sleep(WARM_UP_S)
    before, began, started = sum(c.completed for c in clients), time.perf_counter(), way.cpu_s()
    if workload.stream:  # whole streams only
        while sum(c.completed for c in clients) < before + workload.connections:
            await asyncio.sleep(0.01)
            _check(clients, way, workload)
    else:
        await asyncio.sleep(seconds)
    ended, duration_s = way.cpu_s(), time.perf_counter() - began
    completed = sum(c.completed for c in clients) - before
    _check(clients, way, workload)
    for client in clients:
        client.close()
    await asyncio.sleep(0.1)
    used_s = [after - at_start - idle * duration_s for after, at_start, idle in zip(ended, started, rest, strict=True)]
    return Result(tuple(1e6 * cpu_s / completed / workload.units for cpu_s in used_s), completed / duration_s)


def _check(clients: Iterable[Client], way: Way, workload: Workload) -> None:
    if failures := [client.failure for client in clients if client.failure is not None]:
        raise RuntimeError(f"{way.name}, {workload.name}: {failures[0]}")


class Started(NamedTuple):
    """Gateways that run: ports of the first, all processes without their children, and the models served."""

    port: int
    picker_port: int
    pids: tuple[int, ...]
    models: list[str]


def start_gateways(stack: ExitStack, tree: Path, engines: list[int], workers: int, kind: str = "alone") -> Started:
    """Start gateways of a work tree, see `gateway_process`. `workers` are threads of Envoy.

    In trees before this benchmark the threads are always two.
    """
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'operator'}:{tree}", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", _SCRIPT.read_text(), kind, *map(str, (workers, *engines))]
    process = subprocess.Popen(command, cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    stack.callback(process.wait)
    stack.callback(process.stdin.close)
    found = json.loads(process.stdout.readline())
    return Started(found["port"], found["picker_port"], tuple(found["pids"]), found["models"])


def gateways(stack: ExitStack, tree: Path, engines: list[int], label: str, workers: int) -> list[Way]:
    """Start the gateway of a work tree. Returns the ways to a service without and with an SLO."""
    port, _, pids, models = start_gateways(stack, tree, engines, workers)
    return [Way(f"{name}{label}", port, pids, model) for name, model in zip((GATEWAY, WITH_SLO), models, strict=True)]


def envoy_alone(stack: ExitStack, directory: Path, engines: list[int], workers: int) -> Way:
    """Start an Envoy that only balances."""
    port = free_port()
    url = "type.googleapis.com/envoy.extensions.filters"
    addresses = [{"socket_address": {"address": "127.0.0.1", "port_value": engine}} for engine in engines]
    manager = {
        "@type": f"{url}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "alone",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [
            {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{url}.http.router.v3.Router"}}
        ],
    }
    cluster = {
        "name": "engines",
        "type": "STATIC",
        "lb_policy": "LEAST_REQUEST",
        "load_assignment": {
            "cluster_name": "engines",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}} for address in addresses]}],
        },
    }
    listener = {
        "name": "alone",
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    config = directory / "envoy.json"
    config.write_text(json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}}))
    command = [ENVOY, "-c", str(config), "--concurrency", str(workers), "--disable-hot-restart", "-l", "warning"]
    return Way("Envoy alone", port, (start_process(stack, directory, command),))


def routers(stack: ExitStack, directory: Path, engines: list[int]) -> list[Way]:
    """Start the routers that are installed."""
    urls = [f"http://127.0.0.1:{engine}" for engine in engines]
    programs: dict[str, list[str]] = {
        REFERENCE: ["sglang-router", "launch"],
        f"{REFERENCE} without its log": ["sglang-router", "launch", "--log-level", "error"],
        "vllm-router": ["vllm-router"],
    }
    ways = []
    for name, (program, *arguments) in programs.items():
        if (path := shutil.which(program)) is None:
            print(f"skipped {name}: {program} is not on the PATH (pip install {program})", file=sys.stderr)
            continue
        port, metrics_port = free_ports(2)
        common = ["--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
        command = [path, *arguments, *common, "--prometheus-port", str(metrics_port), "--worker-urls", *urls]
        ways.append(Way(name, port, (start_process(stack, directory, command),)))
    return ways


def start_process(stack: ExitStack, directory: Path, command: list[str]) -> int:
    log = stack.enter_context((directory / "processes.log").open("ab"))
    process = subprocess.Popen(command, stdout=log, stderr=log)
    stack.callback(stop, process)
    return process.pid


def wait_ready(way: Way, headers: Mapping[str, str] = {}) -> None:
    """Wait until a way serves. Raises TimeoutError."""
    body = Workload("ready", 100, 1).bodies(way.model)[0]
    url = f"http://127.0.0.1:{way.port}/v1/chat/completions"
    question = urllib.request.Request(url, body, {"content-type": "application/json", **headers})
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        try:
            with urllib.request.urlopen(question):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"{way.name} does not serve after {START_S:.0f} s")


async def run_rounds(ways: list[Way], workloads: list[Workload], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Returns one row for each round, workload and way."""
    await asyncio.sleep(SETTLE_S)
    before = [way.cpu_s() for way in ways]
    await asyncio.sleep(REST_S)
    rest = {
        way.name: [(now_s - cpu_s) / REST_S for now_s, cpu_s in zip(way.cpu_s(), at_start, strict=True)]
        for way, at_start in zip(ways, before, strict=True)
    }
    rows: list[dict[str, Any]] = []
    for number in range(rounds):
        for workload in workloads:
            order = ways if number % 2 == 0 else ways[::-1]
            for way in order:
                load = os.getloadavg()[0]
                result = await measure(way, workload, seconds, rest[way.name])
                cpu_us = [round(us, 2) for us in result.cpu_us]
                rows.append(
                    {
                        "round": number,
                        "workload": workload.name,
                        "way": way.name,
                        "cpu_us": cpu_us,
                        "requests_per_s": round(result.requests_per_s),
                        "load": load,
                    }
                )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the medians of the rounds as Markdown: CPU in microseconds, and in brackets the ratio to the reference.

    The ratio is the median of those within a round. Without the reference, that to the first way. CPU of the gateway is
    also shown by process: that of Envoy and of the picker.
    """
    ways = list(dict.fromkeys(row["way"] for row in rows))
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    reference = REFERENCE if REFERENCE in ways else ways[0]
    by_round: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(dict)
    for row in rows:
        by_round[row["way"], row["workload"]][row["round"]] = row["cpu_us"]
    lines = [f"| CPU in µs for each | {' | '.join(workloads)} |", f"|---|{'---:|' * len(workloads)}"]
    for way in ways:
        cells = [_cell(by_round[way, workload], by_round[reference, workload]) for workload in workloads]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(cpu_us: dict[int, list[float]], reference: dict[int, list[float]]) -> str:
    """Both are by round."""
    ratio = statistics.median(sum(us) / sum(reference[number]) for number, us in cpu_us.items())
    by_process = [statistics.median(us) for us in zip(*cpu_us.values(), strict=True)]
    parts = f" = {' + '.join(f'{us:.0f}' for us in by_process)}" if len(by_process) > 1 else ""
    return f"{statistics.median(map(sum, cpu_us.values())):.0f}{parts} ({ratio:.2f})"


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", type=Path, metavar="TREE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of one measurement without streams")
    parser.add_argument("--envoy-workers", type=int, default=WORKERS, help="threads of each Envoy")
    parser.add_argument("--only", nargs="*", default=[], metavar="TEXT", help="ways whose names contain one of these")
    parser.add_argument("--workloads", nargs="*", default=[], metavar="TEXT", help="workloads that start with these")
    parser.add_argument("--out", type=Path, help="file for all rounds")
    options = parser.parse_args(arguments)
    workloads = [w for w in WORKLOADS if not options.workloads or w.name.startswith(tuple(options.workloads))]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, ExitStack() as stack:
        directory, engines = Path(folder), free_ports(ENGINES)
        start_process(stack, directory, [sys.executable, "-m", "bench.gateway.upstream", *map(str, engines)])
        workers = options.envoy_workers
        ways = [envoy_alone(stack, directory, engines, workers), *gateways(stack, ROOT, engines, "", workers)]
        for tree in options.trees:
            ways += gateways(stack, tree.resolve(), engines, f", {tree.name}", workers)
        ways += routers(stack, directory, engines)
        ways = [way for way in ways if not options.only or any(text in way.name for text in options.only)]
        for way in ways:
            wait_ready(way)
        rows = uvloop.run(run_rounds(ways, workloads, options.rounds, options.seconds))
    if options.out is not None:
        options.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    print(table(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
