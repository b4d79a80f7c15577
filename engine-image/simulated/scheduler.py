"""What goes into a step: vLLM's rule of continuous batching with chunked prefill.

Problem: which requests wait, stall or lose their place decides latency more than any coefficient.
Idea: the rule itself. Running sequences first, in their order, each with all the tokens it lacks (one when it decodes)
within the token budget; who finds no block for its next token takes the place of the last one, which starts anew later.
Then, if nobody lost a place, waiting sequences in order of arrival, until budget, slots or blocks are used up. A prompt
whose KV comes from another engine gets its blocks and waits aside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from simulated.blocks import BlockPool
from simulated.sequences import Sequence


@dataclass(frozen=True)
class Limits:
    """What a step and the cache may hold."""

    max_num_seqs: int
    budget: int
    block_size: int
    prefix_caching: bool = True


@dataclass(slots=True)
class Step:
    """One step's work; `emits` are those that get a token from it. `end_s` is set by whoever runs it."""

    tokens: int = 0  # prefilled
    pairs: float = 0.0  # sum n (ctx + n / 2) over prefilled chunks
    sequences: int = 0  # decoding
    cached: int = 0  # tokens that these read
    emits: list[Sequence] = field(default_factory=list)
    end_s: float = 0.0


class Scheduler:
    """The queue, the batch and the cache. `fetches` collects sequences that began to wait for another engine's KV."""

    def __init__(self, limits: Limits, pool: BlockPool, admitted: Callable[[Sequence], None]) -> None:
        self.limits = limits
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.loading: set[Sequence] = set()
        self.fetches: list[Sequence] = []
        self.preempted = 0
        self._admitted = admitted

    def compose(self, now_s: float) -> Step | None:
        """The next step, None where there is nothing to compute."""
        step = Step()
        lost = self.preempted
        room = self._continue(step)
        if self.preempted == lost:
            self._admit(step, room, now_s)
        return step if step.tokens or step.sequences else None

    def loaded(self, sequence: Sequence) -> None:
        """The prompt's KV has come: all but its last token need not be computed, and it is next."""
        self.loading.discard(sequence)
        sequence.computed = sequence.prompt_tokens - 1
        self._name(sequence, sequence.prompt_tokens)
        self.waiting.appendleft(sequence)

    def unloaded(self, sequence: Sequence) -> None:
        """The prompt's KV will not come: it is computed here, and it is next."""
        self.loading.discard(sequence)
        self._drop(sequence)
        sequence.remote = False
        sequence.fetched_tokens = 0
        self.waiting.appendleft(sequence)

    def remove(self, sequence: Sequence) -> list[int]:
        """Takes a sequence out, wherever it is; returns the blocks it held, which are the caller's now."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.loading:
            self.loading.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        blocks, sequence.blocks = sequence.blocks, []
        return blocks

    def _continue(self, step: Step) -> int:
        """Puts running sequences into a step; returns what is left of the budget."""
        room = self.limits.budget
        place = 0
        while place < len(self.running) and room:
            sequence = self.running[place]
            place += 1
            if sequence.output < sequence.max_tokens:
                lacking = min(sequence.prompt_tokens + sequence.output - sequence.computed, room)
                if self._make_room(sequence, sequence.computed + lacking):
                    self._put(step, sequence, lacking)
                    room -= lacking
        return room

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for so many tokens, at the cost of the last ones in the batch; False if it was itself the last."""
        while not self._grow(sequence, tokens):
            last = next(one for one in reversed(self.running) if not one.settled)
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        missing = -(-tokens // self.limits.block_size) - len(sequence.blocks)
        if missing > 0:
            blocks = self.pool.allocate(missing)
            if blocks is None:
                return False
            sequence.blocks += blocks
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._drop(sequence)
        sequence.preemptions += 1
        self.preempted += 1
        self.waiting.appendleft(sequence)

    def _drop(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.named = 0

    def _admit(self, step: Step, room: int, now_s: float) -> None:
        while self.waiting and room and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            away = sequence.remote and not sequence.fetched_tokens
            if not self._place(sequence, sequence.prompt_tokens if away else room):
                return
            self.waiting.popleft()
            if away:
                sequence.fetched_tokens = sequence.prompt_tokens - sequence.computed
                self.loading.add(sequence)
                self.fetches.append(sequence)
                continue
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now_s
            self.running.append(sequence)
            tokens = min(sequence.length - sequence.computed, room)
            self._put(step, sequence, tokens)
            room -= tokens

    def _place(self, sequence: Sequence, most: int) -> bool:
        """Blocks for the next `most` tokens at most, those that the cache has among them; all or none."""
        size = self.limits.block_size
        known: list[int] = []
        if not sequence.blocks and self.limits.prefix_caching:
            # the last token is computed in any case: something must make the first output
            known = self.pool.cached(sequence.contents((sequence.length - 1) // size, size))
        computed = sequence.computed or len(known) * size
        until = min(sequence.length, computed + most)
        missing = -(-until // size) - len(known) - len(sequence.blocks)
        if missing > self.pool.free - self.pool.idle(known):
            return False
        if known:
            self.pool.share(known)
            sequence.blocks = [*known]
            sequence.computed = computed
            sequence.named = len(known)
        self._grow(sequence, until)
        if sequence.scheduled_s is None and not sequence.preemptions and not sequence.fetched_tokens:
            sequence.cached_tokens = len(known) * size
            self._admitted(sequence)
        return True

    def _put(self, step: Step, sequence: Sequence, tokens: int) -> None:
        """Schedules a sequence's next tokens. One token behind others costs what a decode costs, whatever it is."""
        computed = sequence.computed
        if tokens == 1 and computed:
            step.sequences += 1
            step.cached += computed
        else:
            step.tokens += tokens
            step.pairs += tokens * (computed + tokens / 2)
        computed += tokens
        sequence.computed = computed
        if computed // self.limits.block_size > sequence.named:
            self._name(sequence, computed)
        if computed == sequence.prompt_tokens + sequence.output:
            sequence.output += 1
            step.emits.append(sequence)

    def _name(self, sequence: Sequence, tokens: int) -> None:
        if not self.limits.prefix_caching:
            return
        full = tokens // self.limits.block_size
        contents = sequence.contents(full, self.limits.block_size)
        for place in range(sequence.named, full):
            self.pool.name(sequence.blocks[place], contents[place])
        sequence.named = full
