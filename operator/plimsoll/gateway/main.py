"""Entry points of `plimsoll gateway init` and `plimsoll gateway run`."""

from __future__ import annotations

import asyncio
import resource
import signal

import uvloop

from plimsoll.adapters.kube import Kube
from plimsoll.gateway import bootstrap
from plimsoll.gateway.app import Gateway
from plimsoll.gateway.settings import Settings
from plimsoll.gateway.watch import Source


def init(settings: Settings | None = None) -> None:
    """Write what Envoy starts from; ends at once."""
    bootstrap.init(settings or Settings.from_environment())


def run(settings: Settings | None = None) -> None:
    """Run the picker until SIGTERM has been drained. Raises if one of its parts fails: the pod starts it anew."""
    _allow_many_connections()
    uvloop.run(_with_cluster(settings or Settings.from_environment()))


def _allow_many_connections() -> None:
    """Each request that is held is an open file, and many machines allow a thousand unless asked."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _with_cluster(settings: Settings) -> None:
    kube = await Kube.connect()
    try:
        await serve(settings, kube)
    finally:
        await kube.close()


async def serve(settings: Settings, source: Source) -> None:
    """Run one gateway over any source of objects, ended by SIGTERM or SIGINT."""
    gateway = Gateway(settings, source)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, gateway.stop)
    await gateway.run()
