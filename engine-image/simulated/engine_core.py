"""The engine core behind the API: the simulated engine, with the sequences of requests and KV of other engines.

Problem: a schedule must be exact to the microsecond although its process wakes up with delays.

Idea: the schedule is the simulator's (`plimsoll.sim.engine`), in virtual time. No code here reads a clock.
`advance(now)` processes everything that has happened by then, at its own time. This module adds what only a server has:
sequences that report their tokens and can be aborted, KV that arrives from other engines or is held for them, and the
next time at which a client needs an update.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from typing import cast

from plimsoll.sim.engine.kv_cache import KvCache
from plimsoll.sim.engine.kv_link import KvLink
from plimsoll.sim.engine.simulated_engine import SimulatedEngine
from plimsoll.sim.engine.step_run import StepRun
from plimsoll.sim.engine.step_timing import StepTiming
from plimsoll.sim.profiles import HardwareProfile
from simulated.kv_leases import LeaseTable
from simulated.sequence import Outcome, ServedSequence
from simulated.served_metrics import ServedMetrics


class EngineCore:
    """One engine. All times in seconds on one clock that never goes back.

    noise: relative errors of steps, see `StepTiming`. max_adapters: LoRA adapters of a step, 0 without LoRA. `updated`
    has the sequences with updates for their listeners; the caller clears it. `fetching_kv` has the sequences whose KV
    is in transfer.
    """

    def __init__(
        self,
        profile: HardwareProfile,
        kv_link: KvLink,
        leases: LeaseTable,
        metrics: ServedMetrics,
        *,
        prefix_caching: bool = True,
        noise: Sequence[float] = (),
        max_adapters: int = 0,
    ) -> None:
        size = profile.block_size
        self.kv_cache = KvCache(
            profile.kv_tokens // size,
            size,
            size if prefix_caching else 0,
            names_answers=True,
            names_after_duplicate=True,
        )
        self.leases = leases
        self.metrics = metrics
        self.updated: set[ServedSequence] = set()
        self.fetching_kv: set[ServedSequence] = set()
        self._kv_link = kv_link
        self._engine = SimulatedEngine(
            profile.max_num_seqs,
            profile.budget,
            self.kv_cache,
            StepTiming(profile, noise),
            kv_link,
            metrics,
            on_steps=self._on_steps,
            max_adapters=max_adapters,
        )
        self._present: set[ServedSequence] = set()
        self._kv_arrivals: list[tuple[float, int, ServedSequence]] = []
        self._arrival_order = itertools.count()

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return self._engine.running

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._engine.waiting)

    @property
    def loading(self) -> int:
        """Sequences whose KV is in transfer."""
        return len(self._engine.loading_kv)

    def add(self, sequence: ServedSequence, now_s: float) -> None:
        """Add a sequence; its TTFT counts from its arrival at the API."""
        self.advance(now_s)
        self._present.add(sequence)
        self._engine.add(sequence, now_s, sequence.arrived_s)
        self._collect()

    def end_sequence(self, sequence: ServedSequence, outcome: Outcome, now_s: float) -> None:
        """End a sequence before its last token, and count it as vLLM counts requests that it ends itself."""
        self.advance(now_s)
        if sequence.outcome is None:
            self._remove(sequence, outcome, now_s)
            self.metrics.record_early_end(sequence, now_s)
            self.updated.add(sequence)

    def drop_sequence(self, sequence: ServedSequence, now_s: float) -> None:
        """End a sequence whose client has disconnected; no metric counts it."""
        self.advance(now_s)
        if sequence.outcome is None:
            self._remove(sequence, "abort", now_s)

    def fetch_failed(self, sequence: ServedSequence, now_s: float) -> None:
        """Compute the prompt of a sequence here, because its KV transfer failed. No effect after the transfer."""
        self.advance(now_s)
        self._engine.on_kv_failed(sequence, now_s)
        self._collect()

    def free_lease(self, request_id: str, now_s: float) -> bool:
        """Free a prompt that a decode engine has fetched; returns whether it was still held."""
        self.advance(now_s)
        sequence = self.leases.pop(request_id)
        if sequence is None:
            return False
        self._engine.on_kv_fetched(sequence, now_s)
        self._collect()
        return True

    def advance(self, now_s: float) -> None:
        """Process all events up to now_s, and count the generated tokens."""
        while (event_s := self.next_event_s()) <= now_s:
            self._engine.advance(event_s)
            self._collect()
            self._receive_kv(event_s)
            self._expire_leases(event_s)
        self._engine.count_steps(now_s)

    def next_event_s(self) -> float:
        """Return the time of the next internal event; infinite without one."""
        return min(self._engine.next_event_s, self._next_kv_event_s())

    def step_end_s(self, now_s: float) -> float:
        """Return the end of the step that runs at `now_s`; `now_s` if none runs."""
        self.advance(now_s)
        return self._engine.step_end_s(now_s)

    def next_wakeup_s(self, now_s: float, coalesce_s: float) -> float:
        """Return when the next update is due. Tokens of a stream may wait for coalesce_s, or for the end of a step.

        No sequence begins or ends in between, so a later call returns the same times.
        """
        runs = self._engine.runs_in_flight
        wake_s = next(
            (run.end_s for run in runs if run.prefill_completions or run.final_sequences),
            runs[-1].end_s if runs else math.inf,
        )
        if any(cast(ServedSequence, sequence).streamed for run in runs for sequence in run.decoding):
            wake_s = min(wake_s, max(now_s + coalesce_s, self._engine.step_end_s(now_s)))
        return min(wake_s, self._next_kv_event_s())

    def _next_kv_event_s(self) -> float:
        arrival_s = self._kv_arrivals[0][0] if self._kv_arrivals else math.inf
        return min(arrival_s, self.leases.next_expiry_s())

    def _on_steps(self, run: StepRun, steps: int, ended_s: float) -> None:
        """Give each sequence of a run a token of each of the steps that have ended, the last of them at ended_s."""
        decoding = cast("list[ServedSequence]", run.decoding)
        completions = cast("list[ServedSequence]", run.prefill_completions)
        self.metrics.record_steps(steps, run.emitting, completions, ended_s)
        for sequence in (*decoding, *completions):
            sequence.emitted_tokens += steps
            sequence.last_token_s = ended_s
            if sequence.streamed:
                self.updated.add(sequence)

    def _collect(self) -> None:
        """Process the results of the engine."""
        engine = self._engine
        engine.first_token_sequences.clear()
        for fetched, arrival_s in engine.kv_fetches:
            sequence = cast(ServedSequence, fetched)
            heapq.heappush(self._kv_arrivals, (arrival_s, next(self._arrival_order), sequence))
            self.fetching_kv.add(sequence)
        engine.kv_fetches.clear()
        for finished in engine.finished_sequences:
            sequence = cast(ServedSequence, finished)
            assert sequence.last_token_s is not None
            self._present.discard(sequence)
            sequence.outcome = "length"
            self.metrics.record_end(sequence, sequence.last_token_s)
            self.updated.add(sequence)
            if sequence.keeps_kv:
                self.leases.grant(sequence, sequence.last_token_s)
        engine.finished_sequences.clear()

    def _receive_kv(self, now_s: float) -> None:
        while self._kv_arrivals and self._kv_arrivals[0][0] <= now_s:
            _, _, sequence = heapq.heappop(self._kv_arrivals)
            self.fetching_kv.discard(sequence)
            if sequence in self._engine.loading_kv:
                self.metrics.record_kv_fetch(self._kv_link, sequence.transferred_tokens)
                self._engine.on_kv_loaded(sequence, now_s)
                self.updated.add(sequence)
                self._collect()

    def _expire_leases(self, now_s: float) -> None:
        for sequence in self.leases.pop_expired(now_s):
            self.metrics.nixl_counts["nixl_num_kv_expired_reqs"] += 1
            self._engine.on_kv_fetched(sequence, now_s)
            self._collect()

    def _remove(self, sequence: ServedSequence, outcome: Outcome, now_s: float) -> None:
        sequence.outcome = outcome
        if sequence in self._present:
            self._present.remove(sequence)
            self._engine.remove(sequence, now_s)
            self._collect()
