"""The work queue in virtual time: order, coalescing, backoff."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from plimsoll.controllers.workqueue import MIN_FAILURE_PAUSE_SECONDS, WorkQueue
from plimsoll.core.errors import BackendUnavailable
from tests.virtual_time import in_virtual_time


@asynccontextmanager
async def running(queue: WorkQueue[str]) -> AsyncIterator[None]:
    task = asyncio.create_task(queue.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def settle(queue: WorkQueue[str]) -> None:
    """Wait until no key is waiting, in process or due later."""
    async with asyncio.timeout(3600):
        while not queue.is_idle:
            await asyncio.sleep(0.1)


async def test_worker_lets_others_run_after_each_key() -> None:
    worked, seen = list[int](), list[int]()

    async def work(key: int) -> None:
        worked.append(key)

    queue = WorkQueue(work, workers=1)
    for key in range(50):
        queue.add(key)
    task = asyncio.create_task(queue.run())
    while len(worked) < 50:
        await asyncio.sleep(0)
        seen.append(len(worked))
    task.cancel()
    assert set(seen) >= set(range(1, 51))


async def test_ended_queue_is_kept_by_no_timer() -> None:
    async def work(key: str) -> None:
        return None

    queue = WorkQueue(work)
    queue.add_later("a", 3600.0)
    async with running(queue):
        await asyncio.sleep(0)
    assert queue.is_idle


@in_virtual_time
async def test_key_failing_for_days_keeps_its_queue_running() -> None:
    """Two to the power of the failures is too large for a float after 1,024 of them, which take 17 hours."""
    failed, others = 0, list[str]()

    async def work(key: str) -> None:
        nonlocal failed
        if key != "rejected":
            others.append(key)
            return
        failed += 1
        raise BackendUnavailable("rejected")

    queue = WorkQueue(work)
    queue.add("rejected")
    async with running(queue):
        await asyncio.sleep(86_400.0)
        queue.add("other")
        await asyncio.sleep(1.0)
    assert failed > 1_200
    assert others == ["other"]


@in_virtual_time
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


@in_virtual_time
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


@in_virtual_time
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


@in_virtual_time
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


@in_virtual_time
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


@in_virtual_time
async def test_failing_key_that_adds_itself_does_not_spin() -> None:
    """A status that says something else after each failure is a change of the object."""
    rounds = 0

    async def work(key: str) -> None:
        nonlocal rounds
        rounds += 1
        queue.add(key)
        raise BackendUnavailable("no", retry_after_seconds=10.0)

    queue, pauses = WorkQueue(work), 60
    async with running(queue):
        queue.add("a")
        await asyncio.sleep(pauses * MIN_FAILURE_PAUSE_SECONDS)
    assert 2 < rounds <= 2 * (pauses + 2), "once after each pause, and once more for the change"


@in_virtual_time
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
        await asyncio.sleep(60.0)
        queue.add("b")
        await asyncio.sleep(0.1)
    assert worked.count("a") > 1
    assert worked.count("b") == 1


@in_virtual_time
async def test_age_is_that_of_the_oldest_key() -> None:
    gate = asyncio.Event()

    async def work(key: str) -> None:
        if key == "hangs":
            await gate.wait()

    queue = WorkQueue(work, workers=2)
    async with running(queue):
        assert queue.age_s == queue.stalled_s == 0.0
        queue.add("hangs")
        await asyncio.sleep(30.0)
        queue.add("other")
        await asyncio.sleep(10.0)
        assert (queue.age_s, queue.stalled_s) == (40.0, 10.0)  # another one has ended meanwhile
        queue.add("hangs")
        await asyncio.sleep(90.0)
        assert (queue.age_s, queue.stalled_s) == (130.0, 100.0)
        gate.set()
        await settle(queue)
        assert queue.age_s == queue.stalled_s == 0.0


@in_virtual_time
async def test_queue_that_no_worker_serves_yet_is_not_stalled() -> None:
    """A leader that cannot list its services has keys, but a restart would not help."""

    async def work(_: str) -> None:
        await asyncio.Event().wait()

    queue = WorkQueue(work)
    queue.add("early")
    await asyncio.sleep(900.0)
    assert (queue.age_s, queue.stalled_s) == (900.0, 0.0)
    async with running(queue):
        await asyncio.sleep(30.0)
        assert queue.stalled_s == 30.0


@in_virtual_time
async def test_failing_key_that_waits_for_its_retry_has_no_age() -> None:
    async def work(key: str) -> None:
        raise BackendUnavailable("down")

    queue = WorkQueue(work)
    async with running(queue):
        queue.add("a")
        await asyncio.sleep(300.0)
        assert queue.age_s < 1.0
