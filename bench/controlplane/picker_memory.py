"""Memory and CPU of one picker by the number of services: `python -m bench.controlplane.picker_memory [SERVICES ...]`.

The real picker process, without Envoy, reads its objects from a file: for each service an InferenceService with an SLO,
published admission limits, and ten engine pods. Prints the resident memory once `/signals` has all endpoints, its peak,
the CPU time until then, the share of a core at rest with an operator's poll of `/signals` each second, and the largest
time of such a poll.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from plimsoll.gateway.envoy.bootstrap import write_files
from tests.gateway.kube_objects import Object, pod
from tests.gateway.picker_harness import service_with_slo
from tests.gateway.stack import GatewayStack, stop

SIZES = (10, 100, 1000)
ENDPOINTS = 10
REST_S = 20.0
MAX_WAIT_S = 300.0
ROW = "{:>9} {:>10} {:>8} {:>9} {:>8} {:>8} {:>12}"


def _fleet(services: int) -> tuple[list[Object], list[Object]]:
    made, pods = [], []
    for number in range(services):
        name = f"s{number}"
        made.append(service_with_slo(name))
        hosts = (f"127.{number // 250 + 1}.{number % 250}.{at + 1}:9" for at in range(ENDPOINTS))
        pods += [pod(host, service=name) for host in hosts]
    return made, pods


def _memory_mb(pid: int, field: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith(field))) / 1024


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _endpoints(gateway: GatewayStack) -> int:
    try:
        return sum(len(one["endpoints"]) for one in (await gateway.signals())["services"].values())
    except aiohttp.ClientError:
        return 0


async def measure(services: int, folder: Path) -> None:
    """Print the row of a number of services."""
    gateway = GatewayStack(folder)
    gateway.settings.directory.mkdir(parents=True)
    write_files(gateway.settings)
    gateway.write_objects(*_fleet(services))
    async with aiohttp.ClientSession() as gateway.http:
        gateway.start_picker()
        assert gateway.picker is not None
        pid, deadline_s = gateway.picker.pid, time.monotonic() + MAX_WAIT_S
        try:
            while await _endpoints(gateway) < services * ENDPOINTS:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(gateway.log.read_text()[-2000:])
                await asyncio.sleep(0.5)
            loaded_s, began_s, longest_s, began = _cpu_s(pid), _cpu_s(pid), 0.0, time.monotonic()
            while time.monotonic() - began < REST_S:
                asked_s = time.monotonic()
                await gateway.signals()
                longest_s = max(longest_s, time.monotonic() - asked_s)
                await asyncio.sleep(1.0)
            share = 100 * (_cpu_s(pid) - began_s) / (time.monotonic() - began)
            memory = f"{_memory_mb(pid, 'VmRSS'):.0f}", f"{_memory_mb(pid, 'VmHWM'):.0f}"
            cpu = f"{loaded_s:.1f} s", f"{share:.1f}", f"{1e3 * longest_s:.0f} ms"
            print(ROW.format(services, services * ENDPOINTS, *memory, *cpu), flush=True)
        finally:
            stop(gateway.picker)


async def main(sizes: tuple[int, ...]) -> None:
    """Measure each size."""
    print(ROW.format("services", "endpoints", "MB", "peak MB", "CPU", "% core", "/signals"), flush=True)
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            await measure(size, Path(folder))


if __name__ == "__main__":
    asyncio.run(main(tuple(int(word) for word in sys.argv[1:]) or SIZES))
