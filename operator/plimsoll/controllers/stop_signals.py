"""SIGTERM and SIGINT end the process, whatever its parts are doing."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable

from plimsoll.telemetry.service_log import ServiceLog

log = ServiceLog(__name__)


def set_on_signals(stop_requested: asyncio.Event) -> None:
    """Set the event on SIGTERM and SIGINT, whatever handled them before."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop_requested.set)


async def run_until(stop_requested: asyncio.Event, work: Callable[[], Awaitable[bool]]) -> bool:
    """Run `work` until it returns or a stop is requested. Returns its result, True after a stop."""
    work_task = asyncio.ensure_future(work())
    stop_task = asyncio.ensure_future(stop_requested.wait())
    await asyncio.wait((work_task, stop_task), return_when=asyncio.FIRST_COMPLETED)
    stop_task.cancel()
    if not work_task.done():
        work_task.cancel()
    try:
        return await work_task
    except asyncio.CancelledError:
        log.info(None, "operator stopped")
        return True
