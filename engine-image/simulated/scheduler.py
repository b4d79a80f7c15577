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

from simulated.block_pool import BlockPool
from simulated.sequence import EngineSequence


@dataclass(frozen=True)
class StepLimits:
    """What a step and the cache may hold."""

    max_num_seqs: int
    token_budget: int
    block_size: int
    prefix_caching: bool = True


@dataclass(slots=True)
class EngineStep:
    """One step's work; `emits` are those that get a token from it. `end_s` is set by whoever runs it."""

    tokens: int = 0  # prefilled
    pairs: float = 0.0  # sum n (ctx + n / 2) over prefilled chunks
    sequences: int = 0  # decoding
    cached: int = 0  # tokens that these read
    emitting: list[EngineSequence] = field(default_factory=list)
    end_s: float = 0.0


class Scheduler:
    """The queue, the batch and the cache. `fetches` collects sequences that began to wait for another engine's KV."""

    def __init__(self, limits: StepLimits, pool: BlockPool, on_admission: Callable[[EngineSequence], None]) -> None:
        self.limits = limits
        self.pool = pool
        self.waiting: deque[EngineSequence] = deque()
        self.running: list[EngineSequence] = []
        self.loading_kv: set[EngineSequence] = set()
        self.kv_fetches: list[EngineSequence] = []
        self.preemptions = 0
        self._on_admission = on_admission

    def compose(self, now_s: float) -> EngineStep | None:
        """The next step, None where there is nothing to compute."""
        step = EngineStep()
        preempted_before = self.preemptions
        budget_left = self._continue(step)
        if self.preemptions == preempted_before:
            self._admit(step, budget_left, now_s)
        return step if step.tokens or step.sequences else None

    def on_kv_loaded(self, sequence: EngineSequence) -> None:
        """The prompt's KV has come: all but its last token need not be computed, and it is next."""
        self.loading_kv.discard(sequence)
        sequence.computed_tokens = sequence.prompt_tokens - 1
        self._register_blocks(sequence, sequence.prompt_tokens)
        self.waiting.appendleft(sequence)

    def on_kv_failed(self, sequence: EngineSequence) -> None:
        """The prompt's KV will not come: it is computed here, and it is next."""
        self.loading_kv.discard(sequence)
        self._release_blocks(sequence)
        sequence.remote = False
        sequence.fetched_tokens = 0
        self.waiting.appendleft(sequence)

    def remove(self, sequence: EngineSequence) -> list[int]:
        """Takes a sequence out, wherever it is; returns the blocks it held, which are the caller's now."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.loading_kv:
            self.loading_kv.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        blocks, sequence.blocks = sequence.blocks, []
        return blocks

    def _continue(self, step: EngineStep) -> int:
        """Puts running sequences into a step; returns what is left of the budget."""
        budget_left = self.limits.token_budget
        index = 0
        while index < len(self.running) and budget_left:
            sequence = self.running[index]
            index += 1
            if sequence.scheduled_output < sequence.max_tokens:
                missing_tokens = min(
                    sequence.prompt_tokens + sequence.scheduled_output - sequence.computed_tokens, budget_left
                )
                if self._make_room(sequence, sequence.computed_tokens + missing_tokens):
                    self._add_chunk(step, sequence, missing_tokens)
                    budget_left -= missing_tokens
        return budget_left

    def _make_room(self, sequence: EngineSequence, tokens: int) -> bool:
        """Blocks for so many tokens, at the cost of the last ones in the batch; False if it was itself the last."""
        while not self._grow(sequence, tokens):
            last = next(one for one in reversed(self.running) if not one.is_fully_scheduled)
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _grow(self, sequence: EngineSequence, tokens: int) -> bool:
        missing = -(-tokens // self.limits.block_size) - len(sequence.blocks)
        if missing > 0:
            blocks = self.pool.allocate(missing)
            if blocks is None:
                return False
            sequence.blocks += blocks
        return True

    def _preempt(self, sequence: EngineSequence) -> None:
        self.running.remove(sequence)
        self._release_blocks(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def _release_blocks(self, sequence: EngineSequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed_tokens = sequence.registered_blocks = 0

    def _admit(self, step: EngineStep, budget_left: int, now_s: float) -> None:
        while self.waiting and budget_left and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            fetches_kv = sequence.remote and not sequence.fetched_tokens
            if not self._allocate_next(sequence, sequence.prompt_tokens if fetches_kv else budget_left):
                return
            self.waiting.popleft()
            if fetches_kv:
                sequence.fetched_tokens = sequence.prompt_tokens - sequence.computed_tokens
                self.loading_kv.add(sequence)
                self.kv_fetches.append(sequence)
                continue
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now_s
            self.running.append(sequence)
            tokens = min(sequence.length - sequence.computed_tokens, budget_left)
            self._add_chunk(step, sequence, tokens)
            budget_left -= tokens

    def _allocate_next(self, sequence: EngineSequence, max_tokens: int) -> bool:
        """Blocks for the next `most` tokens at most, those that the cache has among them; all or none."""
        size = self.limits.block_size
        cached_blocks: list[int] = []
        if not sequence.blocks and self.limits.prefix_caching:
            # the last token is computed in any case: something must make the first output
            cached_blocks = self.pool.cached_prefix(sequence.content_hashes((sequence.length - 1) // size, size))
        computed = sequence.computed_tokens or len(cached_blocks) * size
        until = min(sequence.length, computed + max_tokens)
        missing = -(-until // size) - len(cached_blocks) - len(sequence.blocks)
        if missing > self.pool.free - self.pool.count_unused(cached_blocks):
            return False
        if cached_blocks:
            self.pool.share(cached_blocks)
            sequence.blocks = [*cached_blocks]
            sequence.computed_tokens = computed
            sequence.registered_blocks = len(cached_blocks)
        self._grow(sequence, until)
        if sequence.scheduled_s is None and not sequence.preemptions and not sequence.fetched_tokens:
            sequence.cached_tokens = len(cached_blocks) * size
            self._on_admission(sequence)
        return True

    def _add_chunk(self, step: EngineStep, sequence: EngineSequence, tokens: int) -> None:
        """Schedules a sequence's next tokens. One token behind others costs what a decode costs, whatever it is."""
        computed = sequence.computed_tokens
        if tokens == 1 and computed:
            step.sequences += 1
            step.cached += computed
        else:
            step.tokens += tokens
            step.pairs += tokens * (computed + tokens / 2)
        computed += tokens
        sequence.computed_tokens = computed
        if computed // self.limits.block_size > sequence.registered_blocks:
            self._register_blocks(sequence, computed)
        if computed == sequence.prompt_tokens + sequence.scheduled_output:
            sequence.scheduled_output += 1
            step.emitting.append(sequence)

    def _register_blocks(self, sequence: EngineSequence, tokens: int) -> None:
        if not self.limits.prefix_caching:
            return
        full = tokens // self.limits.block_size
        contents = sequence.content_hashes(full, self.limits.block_size)
        for place in range(sequence.registered_blocks, full):
            self.pool.register(sequence.blocks[place], contents[place])
        sequence.registered_blocks = full
