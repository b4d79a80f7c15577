"""What quantity attacks do to a gateway: `python -m bench.gateway.attacks [PATTERN]`.

A real Envoy and picker with the chart's memory limits, all on 127.0.0.1. For each attack whose name has the pattern, a
gateway of its own: first without the attack, then with it, for the same time. Meanwhile another client asks through the
gateway and, in turns, the engine directly; five streams wait for their end. The attackers and the engines that they ask
are another process. Prints a Markdown table; latencies in milliseconds, as before and during the attack. The direct way
shows what the machine itself adds. Resident memory of the picker includes its worker process.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import aiohttp
import yaml

from bench.gateway import attack_clients
from bench.gateway.attack_clients import Outcomes
from bench.gateway.latency import Route, drive
from bench.gateway.measured_picker import BLOCKS
from plimsoll.core.units import parse_quantity
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.kube_objects import pod, service
from tests.gateway.picker_harness import service_with_slo
from tests.gateway.quantity_attacks import flood, peak_bytes
from tests.gateway.stack import ROOT, GatewayStack, wait_until

SECONDS, RATE = 5.0, 25.0  # of each half; requests per second on each way
STREAMS = 5
NICE = 5  # of the attackers: on two cores the load generator itself would slow the gateway
CONTAINERS = yaml.safe_load((ROOT / "charts/plimsoll/values.yaml").read_text())["gateway"]
ENVOY_BYTES, PICKER_BYTES = (
    int(parse_quantity(CONTAINERS[name]["resources"]["limits"]["memory"])) for name in ("envoy", "picker")
)
HEAD = (
    "attack",
    "Envoy MB",
    "picker MB",
    "p50 ms",
    "p99 ms",
    "direct p50 ms",
    "block ms",
    "outcomes",
    "others, streams",
)


class MeasuredStack(GatewayStack):
    picker_program = ROOT / "bench/gateway/measured_picker.py"


class Probe(Route):
    """Another client's way; it goes on after a failure."""

    failures = 0

    async def send(self) -> None:
        try:
            await super().send()
        except (RuntimeError, OSError, asyncio.IncompleteReadError, ValueError):
            self.failures += 1


class Sample(NamedTuple):
    """Milliseconds through the gateway and directly, and the longest block of the picker's loop in milliseconds."""

    gateway: dict[str, float]
    direct: dict[str, float]
    block_ms: float
    failures: int


def attack_in_process(control: Connection) -> None:
    """Run the attackers and the engines of their models. Sends the engines' ports, then the outcomes of each attack."""
    os.nice(NICE)

    async def run() -> None:
        vision, busy = await FakeEngine().start(), await FakeEngine().start()
        vision.behaviour.release_event, busy.behaviour.release_event = asyncio.Event(), asyncio.Event()
        endless = await asyncio.start_server(flood, "127.0.0.1", 0)
        control.send((vision.port, busy.port, endless.sockets[0].getsockname()[1]))
        known = attack_clients.attacks()
        while (order := await asyncio.to_thread(control.recv)) is not None:
            name, port = order
            control.send(await known[name](port, SECONDS))

    asyncio.run(run())


def resident_bytes(pid: int) -> int:
    """The resident set of a process and its children."""
    total, waiting = 0, [pid]
    while waiting:
        process = waiting.pop()
        try:
            total += int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
            for task in Path(f"/proc/{process}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return total


async def peak_of(pid: int, found: list[int]) -> None:
    """Never returns; keeps the largest resident set of a process with its children in `found`."""
    while True:
        found[0] = max(found[0], resident_bytes(pid))
        await asyncio.sleep(0.05)


async def sample(stack: GatewayStack, engine: FakeEngine) -> Sample:
    through, direct = Probe(stack.settings.port), Probe(engine.port)
    started_s = time.monotonic()
    await drive([through, direct], int(SECONDS * RATE), RATE)
    for route in (through, direct):
        route.close()
    lines = (stack.objects_file.with_name(BLOCKS)).read_text().splitlines()
    blocks = [float(block) for at, block in map(str.split, lines) if float(at) > started_s]
    return Sample(through.quantiles(), direct.quantiles(), 1e3 * max(blocks), through.failures)


async def stream_fully(stack: GatewayStack) -> bool:
    try:
        async with stack.ask(stream=True) as answer:
            return str(await answer.text()).endswith("data: [DONE]\n\n")
    except aiohttp.ClientError:
        return False


async def measure(
    name: str, directory: Path, ports: tuple[int, ...], attack: Callable[[int], Awaitable[Outcomes]]
) -> tuple[str, ...]:
    """Returns the row of one attack."""
    stack = MeasuredStack(directory, envoy_memory_bytes=ENVOY_BYTES, poll_seconds=2.0)
    try:
        engine = await stack.engine()
        models = dict(zip(("vision", "busy", "flood"), ports, strict=True))
        pods = [pod(engine.address), *(pod(f"127.0.0.1:{port}", service=model) for model, port in models.items())]
        services = [service(), service("vision"), service_with_slo("busy", batch=2), service("flood")]
        await stack.start(services, pods)
        await stack.wait_routable(engine)
        assert stack.envoy is not None
        assert stack.picker is not None
        await sample_warm_up(stack, engine)
        before = await sample(stack, engine)
        engine.behaviour.pause = asyncio.Event()
        streams = [asyncio.create_task(stream_fully(stack)) for _ in range(STREAMS)]
        await wait_until(lambda: engine.open == STREAMS, "the streams run")
        picker_peak = [0]
        watching = asyncio.create_task(peak_of(stack.picker.pid, picker_peak))
        during, outcomes = await asyncio.gather(sample(stack, engine), attack(stack.settings.port))
        watching.cancel()
        engine.behaviour.pause.set()
        whole = sum(await asyncio.gather(*streams))
        stats = await stack.admin.stats()
        refused = Counter({limit.value: count for limit, count in stats.reached.items() if count})
        refused.update({"passed by the picker": stats.failed_open} if stats.failed_open else {})
        envoy_peak = peak_bytes(stack.envoy.pid)
    finally:
        await stack.shut_down()
    return (
        name,
        f"{envoy_peak / 1e6:.0f}",
        f"{max(picker_peak[0], 0) / 1e6:.0f}",
        *(f"{before.gateway[q]:.1f} → {during.gateway[q]:.1f}" for q in ("p50", "p99")),
        f"{before.direct['p50']:.1f} → {during.direct['p50']:.1f}",
        f"{before.block_ms:.1f} → {during.block_ms:.1f}",
        _counts(outcomes) + (f"; limits: {_counts(refused)}" if refused else ""),
        f"{before.failures + during.failures} failed, {whole} of {STREAMS} streams whole",
    )


async def sample_warm_up(stack: GatewayStack, engine: FakeEngine) -> None:
    routes: list[Route] = [Probe(stack.settings.port), Probe(engine.port)]
    await drive(routes, int(2 * RATE), RATE)
    for route in routes:
        route.close()


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.most_common()) or "-"


async def run(pattern: str, control: Connection) -> None:
    ports = control.recv()

    async def attack(name: str, port: int) -> Outcomes:
        control.send((name, port))
        outcomes: Outcomes = await asyncio.to_thread(control.recv)
        return outcomes

    print(f"limits: Envoy {ENVOY_BYTES / 1e6:.0f} MB, picker {PICKER_BYTES / 1e6:.0f} MB;", end=" ")
    print(f"open files {resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,}; load {os.getloadavg()[0]:.1f}\n")
    print(f"| {' | '.join(HEAD)} |\n|---|{'---:|' * 6}---|---|", flush=True)
    medians = []
    for name in attack_clients.selected(pattern):
        with tempfile.TemporaryDirectory(dir="/tmp") as directory:
            row = await measure(name, Path(directory), ports, lambda port, name=name: attack(name, port))  # type: ignore[misc]
        medians.append(float(row[5].split()[0]))
        print(f"| {' | '.join(row)} |", flush=True)
    print(f"\ndirect median before the attacks {statistics.median(medians):.1f} ms; load {os.getloadavg()[0]:.1f}")
    control.send(None)


def main(pattern: str = "") -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ours, theirs = multiprocessing.Pipe()
    attacker = multiprocessing.get_context("spawn").Process(target=attack_in_process, args=(theirs,), daemon=True)
    attacker.start()
    try:
        asyncio.run(run(pattern, ours))
    finally:
        attacker.terminate()
        attacker.join()


if __name__ == "__main__":
    main(*sys.argv[1:2])
