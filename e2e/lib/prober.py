"""The prober: one small request a second to every watched service, beside every scenario.

Problem: `Ready` must not lie, and a scenario that only looks at its own load would not notice. Idea: before each
probe the service's Ready condition is read; a probe sent while Ready has been true for two seconds must go well.
The only excuse is a stream that was open when a scenario killed an engine (`excuse`). Prompts are unique and longer
than one KV block, so that probes of a two-tier service take the road of real requests.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import aiohttp

from e2e.lib.background import BackgroundThread
from e2e.lib.client import Prompt, Target, send, session
from e2e.lib.kube import condition
from e2e.lib.load import unique_text
from e2e.lib.request_log import RequestLog, RequestRecord

PROBE_INTERVAL_S = 1.0
SETTLED_S = 2.0
PATIENCE_S = 90.0
MAX_IN_FLIGHT = 10  # for all services; a starved machine is not starved further
KEEP_TOKENS = 8
PROMPT_WORDS = 130

Look = Callable[[], dict[str, Any] | None]


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe and for how long the service had been Ready when it was sent, None if it was not."""

    record: RequestRecord
    ready_for_s: float | None

    @property
    def counts_against_ready(self) -> bool:
        return self.ready_for_s is not None and self.ready_for_s >= SETTLED_S


def ready_for(obj: dict[str, Any] | None, now: float) -> float | None:
    """Seconds since the object became Ready (`now` since the epoch); None if it is not Ready or not there."""
    ready = condition(obj, "Ready")
    if ready.get("status") != "True":
        return None
    return now - datetime.fromisoformat(ready["lastTransitionTime"]).timestamp()


class Prober(BackgroundThread):
    """Probes in a thread of its own from the first `watch` to the end of the session."""

    def __init__(self) -> None:
        super().__init__(lambda: asyncio.run(self._run()), PATIENCE_S + PROBE_INTERVAL_S, "prober")
        self._watched: dict[str, tuple[Target, Look]] = {}
        self._probes: list[Probe] = []
        self._kills: list[tuple[float, float]] = []
        self._under_way: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._lock = threading.Condition()
        self._held = False

    def watch(self, key: str, target: Target, look: Look) -> None:
        """Probes `target` from now on; `look` reads the InferenceService."""
        with self._lock:
            self._watched[key] = (target, look)

    def unwatch(self, key: str) -> None:
        """Probes it no more; returns when its last probe has ended, so that what `look` reads from may be closed."""
        with self._lock:
            self._watched.pop(key, None)
            self._lock.wait_for(lambda: not self._under_way[key], PATIENCE_S)

    def allow_failures(self, begin: float, end: float) -> None:
        """An engine or a gateway was killed between `begin` and `end`: probes open then may have been its own."""
        self._kills.append((begin, end))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No probe is under way in the block: for reading counters that must add up to the token."""
        with self._lock:
            self._held = True
            self._lock.wait_for(lambda: not self._under_way.total(), PATIENCE_S)
        try:
            yield
        finally:
            with self._lock:
                self._held = False

    def probes(self, since: float, model: str | None = None) -> list[Probe]:
        with self._lock:
            return [p for p in self._probes if p.record.sent_at >= since and model in (None, p.record.model)]

    def ledger(self, since: float, model: str | None = None) -> RequestLog:
        return RequestLog(p.record for p in self.probes(since, model))

    def ready_violations(self, since: float) -> list[Probe]:
        """Probes that failed although Ready had been true for two seconds, and that no kill excuses."""
        failed = (p for p in self.probes(since) if p.counts_against_ready and not p.record.ok)
        return [p for p in failed if not any(p.record.overlaps(*allowed) for allowed in self._kills)]

    def summary(self, since: float) -> str:
        probes = self.probes(since)
        early = sum(not p.counts_against_ready for p in probes)
        failed = sum(not p.record.ok for p in probes)
        return (
            f"prober: {len(probes)} probes, {failed} failed; {early} of all before Ready had held for {SETTLED_S:.0f} s"
        )

    async def _run(self) -> None:
        async with session() as http, asyncio.TaskGroup() as tasks:
            while not self._stop.is_set():
                beat = time.monotonic()
                for key, target, look in self._next_probes():
                    tasks.create_task(self._probe(http, key, target, look))
                await asyncio.sleep(max(0.0, beat + PROBE_INTERVAL_S - time.monotonic()))

    def _next_probes(self) -> list[tuple[str, Target, Look]]:
        with self._lock:
            if self._held or self._under_way.total() >= MAX_IN_FLIGHT:
                return []
            self._under_way.update(self._watched.keys())
            return [(key, *targets_watched) for key, targets_watched in self._watched.items()]

    async def _probe(self, http: aiohttp.ClientSession, key: str, target: Target, look: Look) -> None:
        try:
            obj = await asyncio.to_thread(look)
            known = ready_for(obj, time.time())
            prompt = Prompt(unique_text(PROMPT_WORDS, f"probe {next(self._numbers)} {time.time_ns()}"), KEEP_TOKENS)
            record = await send(http, target, prompt, "probe", PATIENCE_S)
            with self._lock:
                self._probes.append(Probe(record, known))
        finally:
            with self._lock:
                self._under_way[key] -= 1
                self._lock.notify_all()
