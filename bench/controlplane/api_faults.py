"""What an operator does while the API server misbehaves: `python -m bench.controlplane.api_faults [SECONDS]`.

A real API server behind a proxy that injects one fault at a time, and operators as processes of their own with a lease
of 4 s. Prints for each fault, while one operator leads and while it starts: whether the process stays, when it steps
down, its requests per second, its memory at the end, and how long after the end of the fault a service that was created
meanwhile has its Deployment. SECONDS is the length of each fault, 60 by default.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from plimsoll.adapters.kube_client import KubeClient
from tests.apiserver import ApiServer, api_server
from tests.controllers import test_api_faults as runs
from tests.controllers.faulty_api import Fault, faulty_api

DEFAULT_SECONDS = 60.0
ROW = "{:48} {:9} {:>6} {:>10} {:>11} {:>7} {:>9}"
HEAD = ("fault", "when", "stays", "steps down", "requests/s", "MB", "right in")
UNTIL_S = 120.0


class Row(NamedTuple):
    """One run: whether the process stays, when it no longer led, requests per second, megabytes, and seconds."""

    stays: bool
    stepped_down_s: float | None
    requests_per_s: float
    resident_mb: float
    right_s: float


async def measure(cluster: ApiServer, kube: KubeClient, fault: Fault, seconds: float, *, at_start: bool) -> Row:
    """Run one operator through one fault."""
    name = f"{'start' if at_start else 'lead'}-{fault.name.lower().replace('_', '-')}"
    with tempfile.TemporaryDirectory() as folder:
        async with faulty_api(cluster) as proxy:
            if at_start:
                await proxy.set(fault)
            async with runs.operator(proxy, Path(folder)) as run:
                if not at_start:
                    await runs.until("it leads", runs.leads(kube, "op-1"), UNTIL_S)
                    await runs.create(kube, f"before-{name}")
                    await runs.until("it reconciles", runs.has_deployment(kube, f"before-{name}"), UNTIL_S)
                    await proxy.set(fault)
                proxy.requests.clear()
                began, stepped_down_s = time.monotonic(), None
                await runs.create(kube, name)
                while time.monotonic() - began < seconds:
                    await asyncio.sleep(0.2)
                    if stepped_down_s is None and run.count("lease lost"):
                        stepped_down_s = time.monotonic() - began
                stays, requests = run.process.returncode is None, proxy.requests.total()
                resident_mb = _resident_mb(run.process.pid) if stays else 0.0
                await proxy.set(Fault.NONE)
                back = time.monotonic()
                await runs.until("it is right", runs.has_deployment(kube, name), UNTIL_S)
                return Row(stays, stepped_down_s, requests / seconds, resident_mb, time.monotonic() - back)


def _resident_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) / 1024


async def main(seconds: float) -> None:
    """Print the table."""
    print(ROW.format(*HEAD))
    with api_server() as cluster:
        cluster.install_crds()
        kube = await KubeClient.connect(str(cluster.kubeconfig))
        namespace = {"metadata": {"name": runs.SYSTEM}}
        await kube._json("POST", "/api/v1/namespaces", None, namespace, "application/json")
        for fault in (fault for fault in Fault if fault is not Fault.NONE):
            for at_start in (False, True):
                with contextlib.redirect_stdout(io.StringIO()):  # the operator's log
                    row = await measure(cluster, kube, fault, seconds, at_start=at_start)
                down = "-" if row.stepped_down_s is None else f"{row.stepped_down_s:.1f} s"
                when = "at start" if at_start else "leading"
                requests = "-" if fault is Fault.REFUSE else f"{row.requests_per_s:.1f}"  # the proxy does not see them
                cells = (requests, f"{row.resident_mb:.0f}", f"{row.right_s:.1f} s")
                print(ROW.format(fault.value, when, "yes" if row.stays else "NO", down, *cells), flush=True)
        await kube.close()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_SECONDS))
