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

from simulated.blocks import BlockPool
from simulated.meters import Meters
from simulated.plant import Plant
from simulated.scheduler import Limits, Scheduler, Step
from simulated.sequences import Outcome, Sequence
from simulated.transfer import LOST_SHARE, Leases, Wire

IN_FLIGHT: Final = 2


class Core:
    """One engine. All times in seconds on one clock that never goes back.

    `touched` collects sequences with news for whoever listens to them; it is the listener's to clear.
    """

    def __init__(self, limits: Limits, blocks: int, plant: Plant, wire: Wire, leases: Leases, meters: Meters) -> None:
        self.pool = BlockPool(blocks)
        self.leases = leases
        self.meters = meters
        self.touched: set[Sequence] = set()
        self.fetching: set[Sequence] = set()
        self._scheduler = Scheduler(limits, self.pool, meters.admitted)
        self._plant = plant
        self._wire = wire
        self._flight: deque[Step] = deque()
        self._free_s = -math.inf
        self._arriving: list[tuple[float, int, Sequence, float]] = []
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
        return len(self._scheduler.loading)

    @property
    def preemptions(self) -> int:
        """How often a sequence lost its place."""
        return self._scheduler.preempted

    def add(self, sequence: Sequence, now_s: float) -> None:
        """A sequence has arrived."""
        self.advance(now_s)
        self._scheduler.waiting.append(sequence)
        self._start(now_s)

    def end(self, sequence: Sequence, outcome: Outcome, now_s: float) -> None:
        """Takes a sequence out before its end; counts it as vLLM does what it ends itself."""
        self.advance(now_s)
        if sequence.outcome is None:
            self._leave(sequence, outcome)
            self.meters.ended(sequence, now_s)
            self.touched.add(sequence)
            self._start(now_s)

    def forget(self, sequence: Sequence, now_s: float) -> None:
        """Takes a sequence out whose client has gone: it is in no metric."""
        self.advance(now_s)
        if sequence.outcome is None:
            self._leave(sequence, "abort")
            self._start(now_s)

    def fetch_failed(self, sequence: Sequence, now_s: float) -> None:
        """The KV of a sequence will not come; it is computed here. Nothing where it has come already."""
        self.advance(now_s)
        if sequence in self._scheduler.loading:
            self._scheduler.unloaded(sequence)
            self._start(now_s)
        elif not sequence.fetched_tokens:
            sequence.remote = False

    def free_lease(self, request_id: str, now_s: float) -> bool:
        """A decode engine has fetched a prompt; whether it was still kept."""
        self.advance(now_s)
        blocks = self.leases.free(request_id)
        self.pool.release(blocks)
        self._start(now_s)
        return bool(blocks)

    def advance(self, now_s: float) -> None:
        """Lets everything happen that happens by now."""
        while (moment := self.next_s()) <= now_s:
            self._expire(moment)
            if self._flight and self._flight[0].end_s <= moment:
                self._complete(self._flight.popleft())
                self._fill(moment)
            else:
                self._start(moment)

    def next_s(self) -> float:
        """When the next thing happens by itself; infinite where nothing will."""
        if self._flight:
            return self._flight[0].end_s
        arriving = self._arriving[0][0] if self._arriving else math.inf
        return min(arriving, self.leases.next_s())

    def next_news_s(self, now_s: float, patience_s: float) -> float:
        """When to look again: at the next step's end while something waits, begins or ends, else after some patience.

        Between, the batch only decodes, and its tokens may be handed over together.
        """
        soonest = self.next_s()
        if not self._flight or self._scheduler.waiting or self._arriving:
            return soonest
        spare = math.inf
        for sequence in self._scheduler.running:
            if not sequence.emitted:
                return soonest
            spare = min(spare, sequence.max_tokens - sequence.emitted)
        last = self._flight[-1]
        step_s = last.end_s - self._flight[0].end_s if len(self._flight) > 1 else 0.0
        until_end = last.end_s + step_s * (spare - len(self._flight))
        return max(soonest, min(now_s + patience_s, until_end))

    def _start(self, now_s: float) -> None:
        """Begins to work if nothing is in flight; otherwise the end of a step will."""
        if not self._flight:
            self._fill(now_s)

    def _fill(self, now_s: float) -> None:
        while self._arriving and self._arriving[0][0] <= now_s:
            self._arrive(*heapq.heappop(self._arriving))
        while len(self._flight) < IN_FLIGHT:
            step = self._scheduler.compose(now_s)
            start = max(now_s, self._free_s)
            if self._scheduler.fetches:
                start = self._post(start)
            if step is None:
                return
            step.end_s = start + self._plant.seconds(start, step.tokens, step.pairs, step.sequences, step.cached)
            self._free_s = step.end_s
            self._flight.append(step)

    def _post(self, start: float) -> float:
        """Asks for KV: the loop stands still meanwhile. Returns when it goes on."""
        posted = start
        for sequence in self._scheduler.fetches:
            post_s = self._wire.post_s(sequence.fetched_tokens)
            posted += post_s
            there_s = posted + self._wire.travel_s(sequence.fetched_tokens)
            self._serial += 1
            heapq.heappush(self._arriving, (there_s, self._serial, sequence, post_s))
            self.fetching.add(sequence)
        self._scheduler.fetches.clear()
        self._free_s = start + LOST_SHARE * (posted - start)
        return self._free_s

    def _arrive(self, there_s: float, _: int, sequence: Sequence, post_s: float) -> None:
        self.fetching.discard(sequence)
        if sequence in self._scheduler.loading:
            tokens, wire = sequence.fetched_tokens, self._wire
            self.meters.fetched(post_s, wire.travel_s(tokens) + post_s, wire.bytes(tokens), wire.pieces(tokens), tokens)
            self._scheduler.loaded(sequence)
            self.touched.add(sequence)

    def _complete(self, step: Step) -> None:
        now_s, computed, emitted = step.end_s, 0, 0
        gaps: dict[float, int] = {}
        for sequence in step.emits:
            if sequence.outcome is not None:
                continue
            emitted += 1
            sequence.emitted += 1
            if sequence.emitted == 1:
                sequence.first_s = now_s
                computed += self.meters.first(sequence, now_s)
            else:
                gap = now_s - sequence.last_s
                gaps[gap] = gaps.get(gap, 0) + 1
            sequence.last_s = now_s
            if sequence.emitted >= sequence.max_tokens:
                self._leave(sequence, "length")
                self.meters.ended(sequence, now_s)
                self.touched.add(sequence)
            elif sequence.streamed:
                self.touched.add(sequence)
        if emitted:
            self.meters.iteration(computed, gaps, emitted)

    def _leave(self, sequence: Sequence, outcome: Outcome) -> None:
        blocks = self._scheduler.remove(sequence)
        sequence.outcome = outcome
        if sequence.produce and outcome == "length":
            self.leases.grant(sequence.request_id, blocks, sequence.prompt_tokens, sequence.last_s)
        else:
            self.pool.release(blocks)

    def _expire(self, now_s: float) -> None:
        for blocks in self.leases.expired(now_s):
            self.pool.release(blocks)
            self.meters.counters["nixl_num_kv_expired_reqs"] += 1
