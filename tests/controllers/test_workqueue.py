"""The work queue under a virtual clock of its own: order, coalescing, backoff."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from plimsoll.controllers.workqueue import WorkQueue
from plimsoll.core.errors import BackendUnavailable


@asynccontextmanager
async def running(queue: WorkQueue[str]) -> AsyncIterator[None]:
    task = asyncio.create_task(queue.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def settle(queue: WorkQueue[str]) -> None:
    async with asyncio.timeout(10):
        while not queue.is_idle:
            await asyncio.sleep(0.005)


async def test_add_many_times_before_work_runs_once() -> None:
    worked: list[str] = []

    async def work(key: str) -> None:
        worked.append(key)

    queue = WorkQueue(work)
    for _ in range(100):
        queue.add("a")
    async with running(queue):
        await settle(queue)
    assert worked == ["a"]


async def test_add_during_work_runs_once_more_not_concurrently() -> None:
    gate, active, most, rounds = asyncio.Event(), 0, 0, 0

    async def work(key: str) -> None:
        nonlocal active, most, rounds
        active, rounds = active + 1, rounds + 1
        most = max(most, active)
        await gate.wait()
        active -= 1

    queue = WorkQueue(work)
    async with running(queue):
        queue.add("a")
        while not rounds:
            await asyncio.sleep(0)
        queue.add("a")
        queue.add("a")
        gate.set()
        await settle(queue)
    assert (rounds, most) == (2, 1)


async def test_workers_limit_concurrency() -> None:
    active = most = 0

    async def work(key: str) -> None:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await asyncio.sleep(0)
        active -= 1

    queue = WorkQueue(work, workers=3)
    for key in "abcdefghij":
        queue.add(key)
    async with running(queue):
        await settle(queue)
    assert most == 3


async def test_failing_key_is_retried_and_others_continue() -> None:
    tried: list[str] = []

    async def work(key: str) -> None:
        tried.append(key)
        if key == "sick" and tried.count("sick") < 3:
            raise BackendUnavailable("not now")

    queue = WorkQueue(work)
    queue.add("sick")
    queue.add("well")
    async with running(queue):
        await settle(queue)
    assert tried.count("sick") == 3
    assert tried.count("well") == 1


async def test_unexpected_error_does_not_stop_queue() -> None:
    tried: list[str] = []

    async def work(key: str) -> None:
        tried.append(key)
        if tried.count(key) == 1:
            raise KeyError(key)

    queue = WorkQueue(work)
    queue.add("a")
    async with running(queue):
        await settle(queue)
    assert tried == ["a", "a"]


async def test_failing_key_that_adds_itself_does_not_spin() -> None:
    """A status that says something else after each failure is a change of the object."""
    rounds = 0

    async def work(key: str) -> None:
        nonlocal rounds
        rounds += 1
        queue.add(key)
        raise BackendUnavailable("no", retry_after_seconds=10.0)

    queue = WorkQueue(work)
    async with running(queue):
        queue.add("a")
        await asyncio.sleep(0.3)
    assert rounds <= 3


async def test_other_keys_do_not_wait_for_failing_key() -> None:
    worked: list[str] = []

    async def work(key: str) -> None:
        worked.append(key)
        if key == "a":
            queue.add(key)
            raise BackendUnavailable("no")

    queue = WorkQueue(work, workers=1)
    async with running(queue):
        queue.add("a")
        await asyncio.sleep(0.05)
        queue.add("b")
        await asyncio.sleep(0.05)
    assert "b" in worked
