"""Runs the engine core in real time, and notifies the waiting requests.

Problem: a step takes 5 ms, waking up and writing to 32 sockets takes one or two; dozens of engines share two cores.
Idea: deadlines are the core's and absolute, so a late wake-up does not delay the next token. The driver wakes up at the
end of each step that begins or ends something, and otherwise when tokens have waited long enough.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from typing import Any, Final

from simulated import kv_side_channel
from simulated.engine_core import EngineCore
from simulated.sequence import ServedSequence

MIN_WAIT_SECONDS: Final = 1e-3  # event loops round to milliseconds, and go round in circles for less
DEAD_ENGINE_EXIT_SECONDS: Final = 4.4  # vLLM's own end after its engine core's


class RealTimeDriver:
    """Drives one engine core on the clock of the running event loop. coalesce_s: how long tokens may wait for the next
    ones.
    """

    def __init__(self, core: EngineCore, coalesce_s: float, recompute: bool) -> None:
        self.core = core
        self.live: set[ServedSequence] = set()
        self.deferred = 0  # handshakes with other engines under way
        self.core_died = asyncio.Event()
        self.hung = False
        self._coalesce_s = coalesce_s
        self._recompute = recompute
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._claims: dict[ServedSequence, kv_side_channel.KvClaim] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def dead(self) -> bool:
        """Whether the engine core has ended."""
        return self.core_died.is_set()

    @property
    def stands_still(self) -> bool:
        """Whether the engine core runs no more steps."""
        return self.dead or self.hung

    def now(self) -> float:
        """Return the engine's clock, s. The loop's clock may be a millisecond behind."""
        return time.monotonic()

    def backlog_tokens(self) -> int:
        """Return the prompt tokens of the sequences without a token yet."""
        return sum(sequence.prompt_tokens for sequence in self.live if not sequence.emitted_tokens)

    def submit(self, sequence: ServedSequence, delay_s: float) -> None:
        """Submit a sequence, which reaches the engine core after a delay."""
        self.live.add(sequence)
        self._idle.clear()
        self._loop.call_later(delay_s, self._add_to_core, sequence)

    async def submit_remote(self, sequence: ServedSequence, params: Mapping[str, Any], delay_s: float) -> None:
        """Submit a sequence whose prompt another engine has computed, once that engine has responded."""
        self.live.add(sequence)
        self._idle.clear()
        self.deferred += 1
        try:
            claim = await kv_side_channel.claim_kv(params, lambda: self._on_peer_lost(sequence))
        finally:
            self.deferred -= 1
        if claim is None:
            self._on_peer_lost(sequence)
        else:
            self._claims[sequence] = claim
        self._loop.call_later(delay_s, self._add_to_core, sequence)

    def abort_sequence(self, sequence: ServedSequence) -> None:
        """Abort a sequence whose client has disconnected."""
        if sequence.outcome is None:
            if not self.hung:
                self.core.drop_sequence(sequence, self.now())
            self._remove(sequence)
            self.catch_up()

    def catch_up(self) -> None:
        """Process all events up to now, notify waiting requests, and set the next wake-up."""
        now = self.now()
        core = self.core
        if self.stands_still:
            return
        core.advance(now)
        if core.updated:
            touched, core.updated = core.updated, set()
            for sequence in touched:
                if sequence.outcome is not None:
                    self._remove(sequence)
                elif sequence in self._claims and sequence.computed_tokens and sequence not in core.fetching_kv:
                    self._claims.pop(sequence).release()
                sequence.on_update()
        if self._timer is not None:
            self._timer.cancel()
        next_s = core.next_wakeup_s(now, self._coalesce_s)
        wait_s = max(MIN_WAIT_SECONDS, next_s - now)
        self._timer = self._loop.call_later(wait_s, self.catch_up) if next_s < math.inf else None

    def on_lease_freed(self, request_id: str) -> None:
        """Free KV that a decode engine has fetched."""
        if not self.core.free_lease(request_id, self.now()):
            self.core.metrics.nixl_counts["nixl_num_notifications_after_expiry"] += 1
        self.catch_up()

    async def wait_drained(self, timeout_s: float) -> bool:
        """Wait until the engine is empty; returns False after the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def abort_all(self) -> None:
        """Abort all remaining sequences, as vLLM does after its shutdown timeout."""
        for sequence in tuple(self.live):
            self.core.end_sequence(sequence, "abort", self.now())
        self.catch_up()

    def kill_core(self) -> None:
        """End the engine core, and notify its waiting requests."""
        self.catch_up()
        self.core_died.set()
        if self._timer is not None:
            self._timer.cancel()
        for sequence in tuple(self.live):
            sequence.on_update()

    def hang_core(self) -> None:
        """Stop the engine core in the middle of a step, without notifying anything."""
        self.catch_up()
        self.hung = True
        if self._timer is not None:
            self._timer.cancel()

    async def wait_for_core(self) -> None:
        """Return after the current step, when the core reads its messages; never if the core hangs."""
        await asyncio.sleep(self.core.step_end_s(self.now()) - self.now())
        if self.hung:
            await asyncio.get_running_loop().create_future()

    def _add_to_core(self, sequence: ServedSequence) -> None:
        if sequence.outcome is None and not self.stands_still:
            self.core.add(sequence, self.now())
            self.catch_up()

    def _remove(self, sequence: ServedSequence) -> None:
        self.live.discard(sequence)
        if sequence in self._claims:
            self._claims.pop(sequence).release()
        if not self.live:
            self._idle.set()

    def _on_peer_lost(self, sequence: ServedSequence) -> None:
        """Handle the loss of the engine that holds a prompt's KV."""
        self._claims.pop(sequence, None)
        if sequence.outcome is not None or self.stands_still:
            return
        self.core.metrics.nixl_counts["nixl_num_failed_transfers"] += 1
        if self._recompute:
            self.core.fetch_failed(sequence, self.now())
        else:
            self.core.end_sequence(sequence, "error", self.now())
        self.catch_up()
