"""Entry points of `plimsoll gateway init` and `plimsoll gateway run`."""

from __future__ import annotations

import asyncio
import resource
import signal
import sys

import uvloop

from plimsoll.adapters.kube_client import KubeClient
from plimsoll.gateway.app import GatewayProcess
from plimsoll.gateway.envoy import bootstrap
from plimsoll.gateway.objectives import ObjectiveSource
from plimsoll.gateway.settings import PickerSettings

# Longest wait of the event loop for the thread that encodes Envoy's configuration; the interpreter's default is 5 ms.
THREAD_SWITCH_SECONDS = 0.001


def init(settings: PickerSettings | None = None) -> None:
    """Write Envoy's initial configuration."""
    bootstrap.write_files(settings or PickerSettings.from_environment())


def run(settings: PickerSettings | None = None) -> None:
    """Run the picker until it has drained after SIGTERM. Raises if one of its tasks fails; the pod restarts it."""
    _raise_file_limit()
    uvloop.run(_serve_cluster(settings or PickerSettings.from_environment()))


def _raise_file_limit() -> None:
    """Raise the soft limit on open files: each queued request needs one, and the default is often 1024."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


async def _serve_cluster(settings: PickerSettings) -> None:
    kube = await KubeClient.connect()
    try:
        await serve(settings, kube)
    finally:
        await kube.close()


async def serve(settings: PickerSettings, source: ObjectiveSource) -> None:
    """Run one gateway with any source of objects until SIGTERM or SIGINT."""
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)
    gateway = GatewayProcess(settings, source)
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, gateway.stop)
    await gateway.run()
