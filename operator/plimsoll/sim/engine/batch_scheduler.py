"""Composition of a step: vLLM's rule of continuous batching with chunked prefill.

Problem: which requests wait, stall or are preempted decides latency more than any coefficient.

Idea: the rule itself. Running sequences come first, in order of admission, each with all its missing tokens within the
token budget. A sequence without a free block preempts the last one, which is recomputed later. Then, if none was
preempted, waiting sequences follow in order of arrival until budget, slots or blocks are used up. A prompt whose KV
comes from another engine gets its blocks and waits for the transfer.

A step uses at most `max_adapters` LoRA adapters. A waiting sequence of a further one is skipped, and those behind it
are not (Scheduler.schedule of vLLM 0.32: scheduled_loras). So adapters with sequences in each step keep others out.
"""

from __future__ import annotations

from collections import deque

from plimsoll.sim.engine.decode_batch import DecodeBatch
from plimsoll.sim.engine.engine_metrics import EngineMetrics
from plimsoll.sim.engine.gpu_adapters import GpuAdapters
from plimsoll.sim.engine.kv_cache import KvCache
from plimsoll.sim.engine.sequence import EngineSequence
from plimsoll.sim.engine.step_run import StepBatch


class BatchScheduler:
    """The queue, the batch and the cache of one engine. max_sequences: running at once. token_budget: tokens of a step.
    max_adapters: LoRA adapters of a step, 0 for an engine without them.

    running: sequences that have a slot. preempted: whether the newest step preempted a sequence.
    """

    def __init__(
        self, max_sequences: int, token_budget: int, kv_cache: KvCache, metrics: EngineMetrics, max_adapters: int = 0
    ) -> None:
        self.max_sequences, self.token_budget = max_sequences, token_budget
        self.adapters = GpuAdapters(max_adapters)
        self.waiting: deque[EngineSequence] = deque()
        self.decodes = DecodeBatch(kv_cache.size)
        self.loading_kv: set[EngineSequence] = set()
        self.running = 0
        self.preempted = False
        self._kv_cache, self._metrics = kv_cache, metrics
        self._partial_prefill: EngineSequence | None = None

    def compose(self, now_s: float) -> StepBatch:
        """Return the work of the next step. Sequences in `new_decodes` decode from the step after it on."""
        batch, decodes, self.preempted = StepBatch(), self.decodes, False
        if decodes.next_blocks > self._kv_cache.free:
            self._preempt_for_blocks()
        batch.decodes, batch.context = len(decodes.sequences), decodes.context_tokens
        self._kv_cache.allocate(decodes.next_blocks)
        budget_left = self.token_budget - batch.decodes
        if self._partial_prefill is not None and budget_left:
            budget_left = self._continue(self._partial_prefill, batch, budget_left)
        if not self.preempted:
            self.admit(batch, budget_left, now_s)
        if self.adapters.max_adapters:
            batch.adapter_loads = self.adapters.use(self._adapters_of(batch))
        return batch

    def compose_more(self, steps: int) -> list[EngineSequence]:
        """Repeat the newest step, which only decodes, `steps` times. Returns the sequences that end
        with the last one.
        """
        if blocks := self.decodes.blocks_of(steps):
            self._kv_cache.allocate(blocks)
        return self.decodes.advance(steps)

    def on_kv_loaded(self, sequence: EngineSequence) -> None:
        """Schedule a sequence next whose KV has arrived; only its last prompt token is left to compute."""
        self.loading_kv.discard(sequence)
        sequence.computed_tokens = sequence.prompt_tokens - 1
        self.waiting.appendleft(sequence)

    def on_kv_failed(self, sequence: EngineSequence) -> None:
        """Schedule a sequence next whose KV transfer failed; its prompt is computed here."""
        self.loading_kv.discard(sequence)
        self._kv_cache.release(sequence)
        sequence.computed_tokens = sequence.transferred_tokens = 0
        sequence.admitted = sequence.remote = False
        self.waiting.appendleft(sequence)

    def end(self, sequence: EngineSequence) -> None:
        """End a sequence whose last token has been generated."""
        self.running -= 1
        if sequence.keeps_kv:
            self._kv_cache.lend(sequence)
        else:
            self._kv_cache.release(sequence)

    def remove(self, sequence: EngineSequence) -> None:
        """Remove a sequence that has not ended, in any state."""
        if sequence in self.loading_kv:
            self.loading_kv.discard(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running -= 1
            if sequence is self._partial_prefill:
                self._partial_prefill = None
            elif sequence in self.decodes.sequences:
                self.decodes.remove(sequence)
        self._kv_cache.release(sequence)

    def _preempt_for_blocks(self) -> None:
        """Allocate blocks to the sequences that need one now, in their order, by preempting the last ones."""
        order = [*self.decodes.sequences]
        if self._partial_prefill is not None:
            order.append(self._partial_prefill)
        free, index = self._kv_cache.free, 0
        while index < len(order):
            sequence = order[index]
            if sequence is not self._partial_prefill and self.decodes.needs_block(sequence):
                while free < 1 and index < len(order):
                    free += self._preempt(order.pop())
                free -= 1  # of no matter where it was itself the last
            index += 1

    def _preempt(self, sequence: EngineSequence) -> int:
        """Preempt a sequence, which is recomputed later. Returns the number of freed blocks."""
        if sequence is self._partial_prefill:
            self._partial_prefill = None
        else:
            self.decodes.remove(sequence)
        before = self._kv_cache.free
        self._kv_cache.release(sequence)
        sequence.computed_tokens = 0
        sequence.preemptions += 1
        self.running -= 1
        self._metrics.preemptions += 1
        self.preempted = True
        self.waiting.appendleft(sequence)
        return self._kv_cache.free - before

    def _continue(self, sequence: EngineSequence, batch: StepBatch, budget_left: int) -> int:
        """Add the next chunk of a running prompt. Returns the remaining token budget."""
        tokens = min(sequence.prompt_tokens + sequence.scheduled_output - sequence.computed_tokens, budget_left)
        if not self._kv_cache.grow(sequence, sequence.computed_tokens + tokens):
            self._preempt(sequence)
            return budget_left
        self._partial_prefill = None
        self._add_chunk(batch, sequence, tokens)
        return budget_left - tokens

    def admit(self, batch: StepBatch, budget_left: int, now_s: float) -> None:
        """Add waiting sequences to a step, within the remaining token budget."""
        max_adapters, skipped = self.adapters.max_adapters, []
        adapters = self._adapters_of(batch) if max_adapters and self.waiting else {}
        while self.waiting and budget_left and self.running < self.max_sequences and self._partial_prefill is None:
            sequence = self.waiting[0]
            is_new = bool(max_adapters and sequence.adapter) and sequence.adapter not in adapters
            if is_new and len(adapters) == max_adapters:
                skipped.append(self.waiting.popleft())
                continue
            fetches_kv = sequence.remote and not sequence.transferred_tokens
            if not self._kv_cache.allocate_next(sequence, sequence.prompt_tokens if fetches_kv else budget_left):
                break
            self.waiting.popleft()
            if is_new:
                adapters[sequence.adapter] = None
            if not sequence.admitted:
                sequence.admitted = True
                self._metrics.record_admission(sequence.prompt_tokens, sequence.cached_tokens)
            if fetches_kv:
                sequence.transferred_tokens = sequence.prompt_tokens - sequence.computed_tokens
                self.loading_kv.add(sequence)
                batch.kv_fetches.append(sequence)
                continue
            self.running += 1
            if sequence.scheduled_s is None:
                sequence.scheduled_s = now_s
            tokens = min(sequence.prompt_tokens + sequence.scheduled_output - sequence.computed_tokens, budget_left)
            self._add_chunk(batch, sequence, tokens)
            budget_left -= tokens
        self.waiting.extendleft(reversed(skipped))

    def _adapters_of(self, batch: StepBatch) -> dict[str, None]:
        """Return the LoRA adapters of a step."""
        sequences = [*self.decodes.sequences, *batch.prefill_completions]
        if self._partial_prefill is not None:
            sequences.append(self._partial_prefill)
        return dict.fromkeys(sequence.adapter for sequence in sequences if sequence.adapter)

    def _add_chunk(self, batch: StepBatch, sequence: EngineSequence, tokens: int) -> None:
        """Add a chunk; a single token behind others costs as much as a decode."""
        batch.prefills += 1
        batch.cached += sequence.computed_tokens
        if tokens == 1 and sequence.computed_tokens:
            batch.single_token_sequences += 1
            batch.single_token_context += sequence.computed_tokens
        else:
            batch.tokens += tokens
            batch.pairs += tokens * (sequence.computed_tokens + tokens / 2)
        sequence.computed_tokens += tokens
        self._kv_cache.register_computed(sequence)
        if sequence.computed_tokens < sequence.prompt_tokens + sequence.scheduled_output:
            self._partial_prefill = sequence
            return
        sequence.scheduled_output += 1
        batch.prefill_completions.append(sequence)
        (batch.final_sequences if sequence.scheduled_output >= sequence.output_tokens else batch.new_decodes).append(
            sequence
        )
