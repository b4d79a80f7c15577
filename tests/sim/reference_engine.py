"""A second engine, only for comparison: it looks at each sequence in each step, and shares no rule with the first one.

Without prefix cache, heat and noise. Everything that the real one derives from counts is done here one by one.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from plimsoll.sim.engine.kv_link import KvLink
from plimsoll.sim.profiles import HardwareProfile


@dataclass(eq=False)
class ReferenceSequence:
    """A sequence and what has come of it."""

    arrived_s: float
    prompt: int
    output: int
    remote: bool
    adapter: str = ""
    scheduled: int = 0
    computed: int = 0
    blocks: int = 0
    fetched: bool = False
    emitted: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None


class ReferenceEngine:
    """One engine with two steps in flight. Times in seconds."""

    def __init__(self, profile: HardwareProfile, max_adapters: int = 0) -> None:
        self._profile = profile
        self._max_adapters = max_adapters
        self._link = KvLink(profile.layers, profile.block_size, profile.kv_bytes_per_token)
        self._free = profile.kv_tokens // profile.block_size
        self._waiting: deque[ReferenceSequence] = deque()
        self._running: list[ReferenceSequence] = []
        self._in_flight: deque[tuple[float, list[ReferenceSequence]]] = deque()
        self._arrivals: list[tuple[float, int, ReferenceSequence]] = []
        self._device_free_s = -math.inf
        self.preemptions = self.steps = self.tokens = 0

    def run(
        self, lengths: Sequence[tuple[float, int, int]], remote: bool, adapters: Sequence[str] = ()
    ) -> list[ReferenceSequence]:
        """Plays requests (arrival, prompt tokens, output tokens) to their end."""
        names = adapters or [""] * len(lengths)
        sequences = [
            ReferenceSequence(at_s, prompt, output, remote, name)
            for (at_s, prompt, output), name in zip(lengths, names, strict=True)
        ]
        for sequence in sequences:
            self._advance(sequence.arrived_s)
            self._waiting.append(sequence)
            if not self._in_flight:
                self._compose(sequence.arrived_s)
        self._advance(math.nextafter(math.inf, 0.0))
        return sequences

    def _advance(self, now_s: float) -> None:
        while True:
            idle_s = self._arrivals[0][0] if self._arrivals else math.inf
            event_s = self._in_flight[0][0] if self._in_flight else idle_s
            if event_s > now_s:
                return
            if self._in_flight:
                self._complete(*self._in_flight.popleft())
            self._compose(event_s)

    def _complete(self, end_s: float, emitting: list[ReferenceSequence]) -> None:
        self.steps += bool(emitting)
        self.tokens += len(emitting)
        for sequence in emitting:
            sequence.emitted += 1
            sequence.first_token_s = sequence.first_token_s or end_s
            if sequence.emitted == sequence.output:
                sequence.last_token_s = end_s
                self._running.remove(sequence)
                self._free += sequence.blocks

    def _compose(self, now_s: float) -> None:
        while self._arrivals and self._arrivals[0][0] <= now_s:
            sequence = heapq.heappop(self._arrivals)[2]
            sequence.computed = sequence.prompt - 1
            self._waiting.appendleft(sequence)
        while len(self._in_flight) < 2:
            chunks, fetches = self._schedule()
            start_s = max(now_s, self._device_free_s)
            posted_s = start_s
            for sequence in fetches:
                posted_s += self._link.post_s(sequence.prompt)
                arrival_s = posted_s + self._link.transfer_s(sequence.prompt)
                heapq.heappush(self._arrivals, (arrival_s, id(sequence), sequence))
            if fetches:
                start_s = self._device_free_s = start_s + self._link.stall_share * (posted_s - start_s)
            if not chunks:
                return
            self._device_free_s = start_s + self._step_s(chunks)
            self._in_flight.append((self._device_free_s, self._emitting(chunks)))

    def _schedule(self) -> tuple[list[tuple[ReferenceSequence, int]], list[ReferenceSequence]]:
        """The step's sequences with their new tokens, and sequences whose KV is fetched from now on."""
        budget, chunks, fetches, preempted = self._profile.budget, [], [], self.preemptions
        for sequence in [*self._running]:
            if sequence in self._running and budget and sequence.scheduled < sequence.output:
                missing = min(sequence.prompt + sequence.scheduled - sequence.computed, budget)
                if self._make_room(sequence, missing):
                    chunks.append((sequence, missing))
                    budget -= missing
        if self.preemptions > preempted:
            return chunks, fetches
        scheduled, skipped = {sequence.adapter for sequence, _ in chunks} - {""}, []
        while self._waiting and budget and len(self._running) < self._profile.max_num_seqs:
            sequence = self._waiting[0]
            if sequence.adapter and len(scheduled | {sequence.adapter}) > self._max_adapters:
                skipped.append(self._waiting.popleft())
                continue
            fetches_kv = sequence.remote and not sequence.fetched
            missing = sequence.prompt + sequence.scheduled - sequence.computed
            tokens = missing if fetches_kv else min(missing, budget)
            if not self._grow(sequence, tokens):
                break
            self._waiting.popleft()
            if fetches_kv:
                sequence.fetched = True
                fetches.append(sequence)
                continue
            self._running.append(sequence)
            chunks.append((sequence, tokens))
            budget -= tokens
            scheduled |= {sequence.adapter} - {""}
        self._waiting.extendleft(reversed(skipped))
        return chunks, fetches

    def _make_room(self, sequence: ReferenceSequence, tokens: int) -> bool:
        while not self._grow(sequence, tokens):
            last = next(one for one in reversed(self._running) if one.scheduled < one.output)
            self._running.remove(last)
            self._free += last.blocks
            last.blocks = last.computed = 0
            self.preemptions += 1
            self._waiting.appendleft(last)
            if last is sequence:
                return False
        return True

    def _grow(self, sequence: ReferenceSequence, tokens: int) -> bool:
        missing = max(0, -(-(sequence.computed + tokens) // self._profile.block_size) - sequence.blocks)
        if missing > self._free:
            return False
        self._free -= missing
        sequence.blocks += missing
        return True

    def _step_s(self, chunks: list[tuple[ReferenceSequence, int]]) -> float:
        """One token behind others costs what a decode costs; its context is read."""
        profile, c = self._profile, self._profile.coefficients
        decodes = [sequence for sequence, tokens in chunks if tokens == 1 and sequence.computed]
        prefills = [(sequence, tokens) for sequence, tokens in chunks if tokens > 1 or not sequence.computed]
        read = sum(tokens for _, tokens in prefills)
        seconds = c.base + c.dec * len(decodes) + c.ctx * sum(sequence.computed for sequence in decodes)
        if read:
            pairs = sum(tokens * (sequence.computed + tokens / 2) for sequence, tokens in prefills)
            seconds += c.anypre + c.pretok * read + c.preattn * pairs
        return seconds + profile.hinge_dec * max(0, len(decodes) - max(0, profile.hinge_sequences - read))

    def _emitting(self, chunks: list[tuple[ReferenceSequence, int]]) -> list[ReferenceSequence]:
        emitting = []
        for sequence, tokens in chunks:
            sequence.computed += tokens
            if sequence.computed == sequence.prompt + sequence.scheduled:
                sequence.scheduled += 1
                emitting.append(sequence)
        return emitting
