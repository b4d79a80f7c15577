"""The engine core in virtual time: what has happened by `now`, and when something happens next.

Problem: a schedule must be exact to the microsecond while the process that computes it wakes up when it can.
Idea: nothing here reads a clock. `advance(now)` runs every step that has ended by then, at its own time; whoever adds
or removes a sequence says when. As in vLLM two steps are in flight: one is composed while the one before it runs, so
what arrives waits for the rest of one step and the whole of the next.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import Final

from simulated.block_pool import BlockPool
from simulated.engine_metrics import EngineMetrics
from simulated.kv_transfer import STALL_SHARE, KvLink, LeaseTable
from simulated.plant import StepTimePlant
from simulated.scheduler import EngineStep, Scheduler, StepLimits
from simulated.sequence import EngineSequence, Outcome

MAX_STEPS_IN_FLIGHT: Final = 2


class EngineCore:
    """One engine. All times in seconds on one clock that never goes back.

    `touched` collects sequences with news for whoever listens to them; it is the listener's to clear.
    """

    def __init__(
        self,
        limits: StepLimits,
        blocks: int,
        plant: StepTimePlant,
        kv_link: KvLink,
        leases: LeaseTable,
        metrics: EngineMetrics,
    ) -> None:
        self.pool = BlockPool(blocks)
        self.leases = leases
        self.metrics = metrics
        self.updated: set[EngineSequence] = set()
        self.fetching_kv: set[EngineSequence] = set()
        self._scheduler = Scheduler(limits, self.pool, metrics.record_admission)
        self._plant = plant
        self._kv_link = kv_link
        self._steps_in_flight: deque[EngineStep] = deque()
        self._device_free_s = -math.inf
        self._kv_arrivals: list[tuple[float, int, EngineSequence, float]] = []
        self._serial = 0

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._scheduler.waiting)

    @property
    def loading(self) -> int:
        """Sequences whose KV is on its way."""
        return len(self._scheduler.loading_kv)

    @property
    def preemptions(self) -> int:
        """How often a sequence lost its place."""
        return self._scheduler.preemptions

    def add(self, sequence: EngineSequence, now_s: float) -> None:
        """A sequence has arrived."""
        self.advance(now_s)
        self._scheduler.waiting.append(sequence)
        self._fill_if_idle(now_s)

    def end_sequence(self, sequence: EngineSequence, outcome: Outcome, now_s: float) -> None:
        """Takes a sequence out before its end; counts it as vLLM does what it ends itself."""
        self.advance(now_s)
        if sequence.outcome is None:
            self._remove(sequence, outcome)
            self.metrics.record_end(sequence, now_s)
            self.updated.add(sequence)
            self._fill_if_idle(now_s)

    def drop_sequence(self, sequence: EngineSequence, now_s: float) -> None:
        """Takes a sequence out whose client has gone: it is in no metric."""
        self.advance(now_s)
        if sequence.outcome is None:
            self._remove(sequence, "abort")
            self._fill_if_idle(now_s)

    def fetch_failed(self, sequence: EngineSequence, now_s: float) -> None:
        """The KV of a sequence will not come; it is computed here. Nothing where it has come already."""
        self.advance(now_s)
        if sequence in self._scheduler.loading_kv:
            self._scheduler.on_kv_failed(sequence)
            self._fill_if_idle(now_s)
        elif not sequence.fetched_tokens:
            sequence.remote = False

    def free_lease(self, request_id: str, now_s: float) -> bool:
        """A decode engine has fetched a prompt; whether it was still kept."""
        self.advance(now_s)
        blocks = self.leases.free(request_id)
        self.pool.release(blocks)
        self._fill_if_idle(now_s)
        return bool(blocks)

    def advance(self, now_s: float) -> None:
        """Lets everything happen that happens by now."""
        while (event_s := self.next_event_s()) <= now_s:
            self._expire_leases(event_s)
            if self._steps_in_flight and self._steps_in_flight[0].end_s <= event_s:
                self._complete(self._steps_in_flight.popleft())
                self._fill(event_s)
            else:
                self._fill_if_idle(event_s)

    def next_event_s(self) -> float:
        """When the next thing happens by itself; infinite where nothing will."""
        if self._steps_in_flight:
            return self._steps_in_flight[0].end_s
        arriving = self._kv_arrivals[0][0] if self._kv_arrivals else math.inf
        return min(arriving, self.leases.next_expiry_s())

    def step_end_s(self, now_s: float) -> float:
        """When the step that runs at `now_s` ends; `now_s` where none runs."""
        return min((step.end_s for step in self._steps_in_flight if step.end_s > now_s), default=now_s)

    def next_wakeup_s(self, now_s: float, coalesce_s: float) -> float:
        """When to look again: at the next step's end while something waits, begins or ends, else after some patience.

        Between, the batch only decodes, and its tokens may be handed over together.
        """
        soonest = self.next_event_s()
        if not self._steps_in_flight or self._scheduler.waiting or self._kv_arrivals:
            return soonest
        min_remaining = math.inf
        for sequence in self._scheduler.running:
            if not sequence.emitted_tokens:
                return soonest
            min_remaining = min(min_remaining, sequence.max_tokens - sequence.emitted_tokens)
        last = self._steps_in_flight[-1]
        step_s = last.end_s - self._steps_in_flight[0].end_s if len(self._steps_in_flight) > 1 else 0.0
        until_end = last.end_s + step_s * (min_remaining - len(self._steps_in_flight))
        return max(soonest, min(now_s + coalesce_s, until_end))

    def _fill_if_idle(self, now_s: float) -> None:
        """Begins to work if nothing is in flight; otherwise the end of a step will."""
        if not self._steps_in_flight:
            self._fill(now_s)

    def _fill(self, now_s: float) -> None:
        while self._kv_arrivals and self._kv_arrivals[0][0] <= now_s:
            self._on_kv_arrival(*heapq.heappop(self._kv_arrivals))
        while len(self._steps_in_flight) < MAX_STEPS_IN_FLIGHT:
            step = self._scheduler.compose(now_s)
            start_s = max(now_s, self._device_free_s)
            if self._scheduler.kv_fetches:
                start_s = self._post_fetches(start_s)
            if step is None:
                return
            step.end_s = start_s + self._plant.step_s(start_s, step.tokens, step.pairs, step.sequences, step.cached)
            self._device_free_s = step.end_s
            self._steps_in_flight.append(step)

    def _post_fetches(self, start_s: float) -> float:
        """Asks for KV: the loop stands still meanwhile. Returns when it goes on."""
        posted_s = start_s
        for sequence in self._scheduler.kv_fetches:
            post_s = self._kv_link.post_s(sequence.fetched_tokens)
            posted_s += post_s
            arrival_s = posted_s + self._kv_link.transfer_s(sequence.fetched_tokens)
            self._serial += 1
            heapq.heappush(self._kv_arrivals, (arrival_s, self._serial, sequence, post_s))
            self.fetching_kv.add(sequence)
        self._scheduler.kv_fetches.clear()
        self._device_free_s = start_s + STALL_SHARE * (posted_s - start_s)
        return self._device_free_s

    def _on_kv_arrival(self, arrival_s: float, _: int, sequence: EngineSequence, post_s: float) -> None:
        self.fetching_kv.discard(sequence)
        if sequence in self._scheduler.loading_kv:
            tokens, kv_link = sequence.fetched_tokens, self._kv_link
            self.metrics.record_kv_fetch(
                post_s,
                kv_link.transfer_s(tokens) + post_s,
                kv_link.transfer_bytes(tokens),
                kv_link.descriptors(tokens),
                tokens,
            )
            self._scheduler.on_kv_loaded(sequence)
            self.updated.add(sequence)

    def _complete(self, step: EngineStep) -> None:
        now_s, computed, emitted = step.end_s, 0, 0
        intervals: dict[float, int] = {}
        for sequence in step.emitting:
            if sequence.outcome is not None:
                continue
            emitted += 1
            sequence.emitted_tokens += 1
            if sequence.emitted_tokens == 1:
                sequence.first_token_s = now_s
                computed += self.metrics.record_first_token(sequence, now_s)
            else:
                interval_s = now_s - sequence.last_token_s
                intervals[interval_s] = intervals.get(interval_s, 0) + 1
            sequence.last_token_s = now_s
            if sequence.emitted_tokens >= sequence.max_tokens:
                self._remove(sequence, "length")
                self.metrics.record_end(sequence, now_s)
                self.updated.add(sequence)
            elif sequence.streamed:
                self.updated.add(sequence)
        if emitted:
            self.metrics.record_iteration(computed, intervals, emitted)

    def _remove(self, sequence: EngineSequence, outcome: Outcome) -> None:
        blocks = self._scheduler.remove(sequence)
        sequence.outcome = outcome
        if sequence.keeps_kv and outcome == "length":
            self.leases.grant(sequence.request_id, blocks, sequence.prompt_tokens, sequence.last_token_s)
        else:
            self.pool.release(blocks)

    def _expire_leases(self, now_s: float) -> None:
        for blocks in self.leases.pop_expired(now_s):
            self.pool.release(blocks)
            self.metrics.counters["nixl_num_kv_expired_reqs"] += 1
