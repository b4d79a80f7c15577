"""The load generator: open-loop arrivals or a closed loop, bounded in count and time.

Problem: scenarios do something to the cluster while requests flow, and read afterwards what became of each one.
Idea: a load is a plan (what to send and when) that runs in a thread of its own with its own event loop; the
scenario stays plain sequential code: `with Load(...) as load: break_something()`. An open loop sends at the planned
times whatever became of the earlier requests (that is how users arrive); a closed loop keeps a number under way.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import aiohttp

from e2e.lib.background import BackgroundThread
from e2e.lib.client import CLIENT_TIMEOUT_S, Prompt, Target, send, session
from e2e.lib.request_log import RequestLog

MAX_REQUESTS = 10_000
MAX_SECONDS = 900.0
FAILURE_BACKOFF_S = 0.1  # a closed loop must not spin when every request is refused at once

_TEXT = (
    "the line on the hull shows how much a ship may carry and still come home "
    "a fleet of engines has such a line too past it every stream slows for everyone"
)
_WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of an open loop and when to send it, in seconds after the start."""

    at_s: float
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests at planned times."""

    arrivals: Iterable[Arrival]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` users, each of whom waits for the answer, thinks for `think_s` seconds and asks again.

    Unlike arrivals at a rate it never asks more of a slow machine than it can do, so it suits scenarios that are
    about whether requests fail and not about how fast they are.
    """

    concurrency: int
    prompts: Callable[[int], Prompt]
    think_s: float = 0.0
    seconds: float = MAX_SECONDS


Plan = OpenLoop | ClosedLoop


def unique_text(words: int, seed: str | int) -> str:
    """A text of about `words` words that shares no prefix with another seed's (so that no cache can serve it)."""
    rng = random.Random(str(seed))
    return " ".join([f"{rng.getrandbits(48):x}", *(rng.choice(_WORDS) for _ in range(words))])


def poisson(rate: float, seconds: float, prompts: Callable[[int], Prompt], seed: int = 0) -> OpenLoop:
    """Poisson arrivals of `rate` requests/s for `seconds`, the n-th one asking `prompts(n)`."""
    return OpenLoop(_poisson(rate, seconds, prompts, random.Random(seed)))


def _poisson(rate: float, seconds: float, prompts: Callable[[int], Prompt], rng: random.Random) -> Iterator[Arrival]:
    at = rng.expovariate(rate)
    for n in itertools.count():
        if at >= seconds:
            return
        yield Arrival(at, prompts(n))
        at += rng.expovariate(rate)


class Load(BackgroundThread):
    """Runs a plan against a target in the background; every request ends up in `ledger`.

    As a context manager it stops sending at the end of the block and waits for what is under way. The bounds hold
    whatever the plan says: at most MAX_REQUESTS requests, nothing sent after MAX_SECONDS.
    """

    def __init__(self, target: Target, plan: Plan, source: str = "load", patience_s: float = CLIENT_TIMEOUT_S) -> None:
        super().__init__(lambda: asyncio.run(self._run()), name=f"load-{source}")
        self.ledger = RequestLog()
        self._target, self._plan, self._source, self._patience_s = target, plan, source, patience_s
        self._left = itertools.count(MAX_REQUESTS, -1)

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.wait()

    def stop(self) -> None:
        """Sends no further request; those under way go on."""
        self._stop.set()

    def wait(self) -> RequestLog:
        """Waits until the plan is done and every request has ended. Raises TimeoutError if it never does."""
        self._thread.join(MAX_SECONDS + self._patience_s)
        if self._thread.is_alive():
            raise TimeoutError("the load did not end")
        return self.ledger

    def run(self) -> RequestLog:
        """The whole plan, in the foreground."""
        self._thread.start()
        return self.wait()

    async def _run(self) -> None:
        async with session() as http, asyncio.TaskGroup() as tasks:
            if isinstance(self._plan, OpenLoop):
                await self._run_open(self._plan, http, tasks)
            else:
                self._run_closed(self._plan, http, tasks)

    def _may_send(self, elapsed_s: float) -> bool:
        return not self._stop.is_set() and elapsed_s < MAX_SECONDS and next(self._left) > 0

    async def _run_open(self, plan: OpenLoop, http: aiohttp.ClientSession, tasks: asyncio.TaskGroup) -> None:
        start = time.monotonic()
        for arrival in plan.arrivals:
            early = start + arrival.at_s - time.monotonic()
            await asyncio.to_thread(self._stop.wait, max(0.0, early))  # so that stop() need not wait for an arrival
            if not self._may_send(time.monotonic() - start):
                return
            tasks.create_task(self._send(http, arrival.prompt))

    def _run_closed(self, plan: ClosedLoop, http: aiohttp.ClientSession, tasks: asyncio.TaskGroup) -> None:
        numbers = itertools.count()
        for _ in range(plan.concurrency):
            tasks.create_task(self._worker(plan, http, numbers))

    async def _worker(self, plan: ClosedLoop, http: aiohttp.ClientSession, numbers: Iterator[int]) -> None:
        start = time.monotonic()
        while (elapsed := time.monotonic() - start) < plan.seconds and self._may_send(elapsed):
            succeeded = await self._send(http, plan.prompts(next(numbers)))
            await asyncio.sleep(plan.think_s if succeeded else max(plan.think_s, FAILURE_BACKOFF_S))

    async def _send(self, http: aiohttp.ClientSession, prompt: Prompt) -> bool:
        record = await send(http, self._target, prompt, self._source, self._patience_s)
        self.ledger.add(record)
        return record.ok
