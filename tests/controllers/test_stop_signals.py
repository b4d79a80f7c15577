"""A signal ends the operator also where kopf has replaced its handlers, and where kopf has ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from plimsoll.controllers import kopf_handlers, stop_signals
from tests.controllers.test_kopf_storage import Server, served

GUARD_S = 30.0


class Stop:
    """The request to stop, and when its handlers were set."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.taken: asyncio.Queue[None] = asyncio.Queue()
        self.take_signals()

    def take_signals(self) -> None:
        stop_signals.set_on_signals(self.requested)
        self.taken.put_nowait(None)


@contextlib.asynccontextmanager
async def watching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Stop, asyncio.Task[None]]]:
    """A watch of services by kopf, after kopf has set its own handlers of signals."""
    stop = Stop()
    async with asyncio.timeout(GUARD_S), served(Server(), tmp_path, monkeypatch):
        await stop.taken.get()
        watch = kopf_handlers.watch_services(lambda obj, gone: None, ("team",), stop.take_signals)
        task = asyncio.create_task(watch)
        await stop.taken.get()
        yield stop, task


async def test_signal_while_kopf_runs_requests_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with watching(tmp_path, monkeypatch) as (stop, task):
        signal.raise_signal(signal.SIGTERM)
        await stop.requested.wait()
        task.cancel()
        await asyncio.wait((task,))


async def test_signal_after_kopf_ended_requests_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with watching(tmp_path, monkeypatch) as (stop, task):
        task.cancel()
        await asyncio.wait((task,))
        signal.raise_signal(signal.SIGTERM)
        await stop.requested.wait()


async def test_stop_request_cancels_work_and_ends() -> None:
    requested, has_begun = asyncio.Event(), asyncio.Event()

    async def work() -> bool:
        has_begun.set()
        await asyncio.Event().wait()
        return False

    running = asyncio.create_task(stop_signals.run_until(requested, work))
    await has_begun.wait()
    requested.set()
    assert await asyncio.wait_for(running, GUARD_S)
