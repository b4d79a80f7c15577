"""Probes the engine core from inside the API server: whether its loop still runs.

Problem: vLLM's /health is 200 while its engine core hangs, because the API server is another process. Its counters do
not show it either: none of them changes while one long prompt is computed in chunks, or while KV blocks are in
transfer.

Idea: the core handles vLLM's own `is_sleeping` in its loop, between two steps, from a variable. One probe is open at a
time, so a hanging core collects no more than one. It costs one message each way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CoreAnswer:
    """Whether the core has responded, and the seconds that it took, or has taken so far: at most about one step."""

    answered: bool
    seconds: float


class CoreProbe:
    """The probe of one engine core. `clock` in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._question_at = 0.0
        self._question: asyncio.Task[float] | None = None

    async def wait_answer(self, engine_client: object, seconds: float) -> CoreAnswer:
        """Wait for the open probe for at most `seconds`; start one if none is open."""
        if self._question is None:
            self._question_at = self._clock()
            self._question = asyncio.create_task(self._ask(engine_client))
        question, question_at = self._question, self._question_at
        await asyncio.wait({question}, timeout=seconds)
        if not question.done():
            return CoreAnswer(False, self._clock() - question_at)
        if self._question is question:
            self._question = None
        return CoreAnswer(True, question.result() - question_at)

    async def _ask(self, engine_client: object) -> float:
        """Return the response time. If the core has no such call, the API server's response counts."""
        ask = getattr(engine_client, "is_sleeping", None)
        if ask is not None:
            try:
                await ask()
            except Exception as error:  # noqa: BLE001  vLLM's own; /health tells of a dead core
                log.warning("the engine core cannot be asked for progress: %s: %s", type(error).__name__, error)
        return self._clock()
