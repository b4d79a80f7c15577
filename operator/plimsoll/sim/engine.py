"""One engine in virtual time: vLLM's continuous batching with chunked prefill, fast-forwarded while nothing changes.

Problem: which requests wait, stall or are preempted decides latency more than any coefficient, so the schedule must
equal vLLM's to the step. But most steps only add one token to each stream, and a day has half a billion of them.

Idea: steps are composed as in vLLM, with two in flight. Running sequences come first, each with all the tokens it lacks
within the token budget; a sequence without a free block preempts the last one. Waiting sequences follow in arrival
order until budget, slots or blocks are used up. A step that only decodes is followed by identical steps until a
sequence ends, blocks run out or an external event occurs. They form one `StepRun`, whose times are a closed form
(`step_timing`). An external event truncates the run where the next step was not yet composed. A decoding sequence costs
nothing until it ends: its tokens, context and blocks follow from the step number.

Every method first processes all events up to its `now_s`; the next internal event is due at `next_event_s`.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable

from plimsoll.core.ports import EngineReading
from plimsoll.sim.engine_metrics import EngineMetrics
from plimsoll.sim.iteration import Iteration, StepWork, queued_work
from plimsoll.sim.kv_cache import KvCache
from plimsoll.sim.kv_link import KvLink
from plimsoll.sim.sequence import EngineSequence
from plimsoll.sim.step_run import StepBatch, StepRun
from plimsoll.sim.step_timing import StepTiming


class SimulatedEngine:
    """One replica's engine core. fast_forward: whether steps are combined; False is the slow reference.

    first_token_sequences, finished_sequences: sequences whose first or last token was generated. kv_fetches: sequences
    whose KV is in transfer, with its time of arrival. The caller clears these three lists.
    """

    MAX_STEPS_IN_FLIGHT = 2  # steps: one is composed while the one before it runs

    def __init__(
        self,
        max_sequences: int,
        token_budget: int,
        kv_cache: KvCache,
        timing: StepTiming,
        kv_link: KvLink,
        metrics: EngineMetrics,
        fast_forward: bool = True,
    ) -> None:
        """max_sequences: sequences at once. token_budget: tokens of a step."""
        self.metrics = metrics
        self.kv_cache = kv_cache
        self.first_token_sequences: list[EngineSequence] = []
        self.finished_sequences: list[EngineSequence] = []
        self.kv_fetches: list[tuple[EngineSequence, float]] = []
        self.next_event_s = math.inf
        self.waiting: deque[EngineSequence] = deque()
        self._max_sequences, self._token_budget, self._timing, self._kv_link, self._fast_forward = (
            max_sequences,
            token_budget,
            timing,
            kv_link,
            fast_forward,
        )
        self._decoding: dict[EngineSequence, None] = {}  # in order of admission
        self._shift_sum = 0
        self._block_crossings = [
            0
        ] * kv_cache.size  # decoding sequences by the step, modulo a block, at which they need one
        self._finish_heap: list[tuple[int, int, EngineSequence]] = []
        self._partial_prefill: EngineSequence | None = None
        self._loading_kv: set[EngineSequence] = set()
        self._used_slots = 0
        self._steps = 0
        self._serial = 0
        self._steps_in_flight: list[StepRun] = []
        self._device_free_s = -math.inf
        self._preempted = False
        self._starved = False
        self._last_completed: StepRun | None = None  # the newest one that is complete

    @property
    def idle(self) -> bool:
        """Whether the engine has no sequence, and keeps no KV for another engine."""
        return (
            not (self._steps_in_flight or self.waiting or self._loading_kv or self._used_slots)
            and not self.kv_cache.is_lending
        )

    @property
    def running(self) -> int:
        return self._used_slots

    def add(self, sequence: EngineSequence, now_s: float) -> None:
        """Add an arriving sequence."""
        self.advance(now_s)
        sequence.arrived_s = now_s
        if not self.waiting:
            self._truncate_run(now_s)
        self.waiting.append(sequence)
        self._reschedule(now_s)

    def on_kv_loaded(self, sequence: EngineSequence, now_s: float) -> None:
        """The prompt's KV has arrived: only its last token is left to compute, and the sequence is next."""
        self.advance(now_s)
        if sequence not in self._loading_kv:
            return
        self._loading_kv.discard(sequence)
        sequence.computed_tokens = sequence.prompt_tokens - 1
        self._truncate_run(now_s)
        self.waiting.appendleft(sequence)
        self._reschedule(now_s)

    def on_kv_fetched(self, sequence: EngineSequence, now_s: float) -> None:
        """Another engine has fetched the KV that was kept here, or will never fetch it."""
        self.advance(now_s)
        if self.waiting:
            self._truncate_run(now_s)
        self.kv_cache.reclaim(sequence.id)
        self._reschedule(now_s)

    def advance(self, now_s: float) -> None:
        """Process all events up to now_s."""
        while self.next_event_s <= now_s:
            event_s = self.next_event_s
            if self._steps_in_flight[0].end_s <= event_s:
                self._complete(self._steps_in_flight.pop(0))
            self._compose_steps(event_s)

    def scrape(self, pod: str, now_s: float, at_s: float) -> EngineReading:
        """The engine's metrics now; at_s: the same moment in seconds since the epoch."""
        self.advance(now_s)
        for run in self._steps_in_flight:
            self._commit(run, self._composed_steps(run, now_s))
            self._count_tokens(run, self._timing.completed_steps(run.series, now_s - run.start_s, run.composed))
        waiting = len(self.waiting) + len(self._loading_kv)
        return self.metrics.reading(pod, at_s, self._used_slots, waiting, self.kv_cache.used_share)

    def iteration(self, pod: str, now_s: float) -> Iteration:
        """The newest completed step, and the queued work."""
        self.advance(now_s)
        run, step_number = self._last_completed, 0
        if self._steps_in_flight:
            step_number = self._timing.completed_steps(
                self._steps_in_flight[0].series,
                now_s - self._steps_in_flight[0].start_s,
                self._steps_in_flight[0].count,
            )
            run = self._steps_in_flight[0] if step_number else run
        waiting_work = queued_work(self.waiting, self._loading_kv)
        if run is None or not self._steps_in_flight:
            return Iteration(pod, queued=waiting_work)
        step_number = step_number or run.count
        duration_s = self._timing.duration_s(run.series, step_number) - self._timing.duration_s(
            run.series, step_number - 1
        )
        if step_number == 1:
            duration_s += run.start_s - run.previous_end_s
        work = run.first_step_work._replace(
            context=run.first_step_work.context + (step_number - 1) * run.first_step_work.decodes
        )
        return Iteration(pod, duration_s, work, waiting_work)

    # ---------------------------------------------------------------- time

    def _compose_steps(self, now_s: float) -> None:
        """Composes until two steps are in flight, or nothing is left to compose."""
        in_flight = self._steps_in_flight
        self._starved = False
        while len(in_flight) < self.MAX_STEPS_IN_FLIGHT:
            if in_flight:
                run = in_flight[0]
                if run.count > 1 and now_s < run.next_compose_s:
                    break
                self._commit(run, run.count)
            composed = self._compose(now_s)
            if composed is None and self._preempted and not in_flight:
                continue  # whoever lost its place is admitted anew
            if composed is None:
                self._starved = True
                break
            in_flight.append(composed)
        self._set_next_event()

    def _reschedule(self, now_s: float) -> None:
        """Something came from outside: an idle engine begins, a busy one looks when a step has ended."""
        if self._steps_in_flight:
            self._set_next_event()
        else:
            self._compose_steps(now_s)

    def _set_next_event(self) -> None:
        """Sets when something happens by itself."""
        in_flight = self._steps_in_flight
        if not in_flight:
            self.next_event_s = math.inf
        elif len(in_flight) == self.MAX_STEPS_IN_FLIGHT or self._starved:
            self.next_event_s = in_flight[0].end_s
        else:
            self.next_event_s = in_flight[0].next_compose_s

    def _truncate_run(self, now_s: float) -> None:
        """Something has come: of the last run there is only what was composed by now."""
        if not self._steps_in_flight:
            return
        run = self._steps_in_flight[-1]
        composed = max(run.composed, self._composed_steps(run, now_s))
        self._commit(run, composed)
        if composed < run.count:
            run.count = composed
            self._set_end_times(run)

    def _composed_steps(self, run: StepRun, now_s: float) -> int:
        """Steps of a run that are composed by now."""
        if run.count == 1 or now_s < run.second_composed_s:
            return 1
        if now_s < run.start_s:
            return 2
        return min(run.count, 2 + self._timing.completed_steps(run.series, now_s - run.start_s, run.count))

    def _set_end_times(self, run: StepRun) -> None:
        """Sets when a run ends, and when what follows it is composed."""
        run.end_s = self._device_free_s = run.start_s + self._timing.duration_s(run.series, run.count)
        run.next_compose_s = run.second_composed_s
        if run.count > 1:
            run.next_compose_s = run.start_s + self._timing.duration_s(run.series, run.count - 1)

    # ---------------------------------------------------------------- composing

    def _compose(self, now_s: float) -> StepRun | None:
        if now_s >= self._timing.next_heat_update_s:
            self._timing.update_heat(now_s)
        batch, self._preempted = StepBatch(), False
        if self._block_crossings[self._steps % self.kv_cache.size] > self.kv_cache.free:
            self._preempt_for_blocks()
        sequences, context_tokens = len(self._decoding), self._shift_sum + self._steps * len(self._decoding)
        self.kv_cache.allocate(self._block_crossings[self._steps % self.kv_cache.size])
        budget_left = self._token_budget - sequences
        if self._partial_prefill is not None and budget_left:
            budget_left = self._continue(self._partial_prefill, batch, budget_left)
        if not self._preempted:
            self._admit(batch, budget_left)
        start_s = max(now_s, self._device_free_s)
        if batch.kv_fetches:
            start_s = self._post_fetches(batch.kv_fetches, start_s)
        if not (sequences or batch.tokens or batch.single_token_sequences):
            return None
        stretch = self._timing.series(
            self._steps,
            batch.tokens,
            batch.pairs,
            sequences + batch.single_token_sequences,
            context_tokens + batch.single_token_context,
        )
        second_s, after_s = now_s, start_s
        if self._steps_in_flight:
            second_s = after_s = self._steps_in_flight[-1].end_s
        run = StepRun(stretch, start_s, second_s, after_s, 1, sequences + len(batch.prefill_completions))
        run.prefill_completions, run.final_sequences = batch.prefill_completions, batch.final_sequences
        run.first_step_work = StepWork(
            batch.prefills, batch.tokens + batch.single_token_sequences, batch.cached, sequences, context_tokens
        )
        if self._fast_forward and not (batch.tokens or batch.single_token_sequences):
            run.count = self._identical_steps(run, sequences)
        self._timing.add_compute(batch.tokens, batch.pairs, batch.single_token_sequences)
        self._assign_steps(run, 1)
        for sequence in batch.new_decodes:
            self._start_decoding(sequence)
        self._set_end_times(run)
        return run

    def _identical_steps(self, run: StepRun, sequences: int) -> int:
        """How many steps follow each other with the same sequences."""
        if self.waiting and (self._preempted or any(flying.final_sequences for flying in self._steps_in_flight)):
            return 1
        count = min(self._finish_heap[0][0] - self._steps + 1, self._timing.max_steps(self._steps))
        if self.kv_cache.free < sequences * (count // self.kv_cache.size + 1):
            count = min(count, self._steps_with_blocks(sequences))
        throttle_s = self._timing.next_heat_update_s
        if run.second_composed_s >= throttle_s:
            return 1
        if throttle_s < math.inf:
            count = min(count, 2 + self._timing.completed_steps(run.series, throttle_s - run.start_s, count))
        return count

    def _steps_with_blocks(self, sequences: int) -> int:
        """Steps for which there are blocks; the first one has its own already."""
        size = self.kv_cache.size
        rounds, blocks_left = divmod(self.kv_cache.free, sequences)
        step = rounds * size + 1
        while blocks_left >= 0:
            blocks_left -= self._block_crossings[(self._steps + step) % size]
            step += blocks_left >= 0
        return step

    def _commit(self, run: StepRun, composed: int) -> None:
        """The first so many steps of a run are composed: blocks are taken, and who is done is not composed again."""
        new_steps = composed - run.composed
        if new_steps <= 0:
            return
        size, crossing, first = self.kv_cache.size, self._block_crossings, self._steps
        sequences = len(self._decoding)
        if sequences:
            rounds, rest = divmod(new_steps, size)
            new_blocks = rounds * sequences
            for step in range(first, first + rest):
                new_blocks += crossing[step % size]
            self.kv_cache.allocate(new_blocks)
        self._assign_steps(run, new_steps)

    def _assign_steps(self, run: StepRun, new_steps: int) -> None:
        """So many more of a run's steps have their place in the order of all steps."""
        run.composed += new_steps
        self._timing.add_compute(0, 0.0, len(self._decoding) * new_steps)
        self._steps += new_steps
        finishing = self._finish_heap
        while finishing and finishing[0][0] < self._steps:
            sequence = heapq.heappop(finishing)[2]
            if sequence.finish_step == self._steps - 1:
                run.final_sequences.append(sequence)
                self._stop_decoding(sequence)

    def _start_decoding(self, sequence: EngineSequence) -> None:
        """From the next step on it decodes."""
        sequence.token_offset = sequence.computed_tokens - self._steps
        sequence.finish_step = self._steps + sequence.output_tokens - sequence.scheduled_output - 1
        self._decoding[sequence] = None
        self._shift_sum += sequence.token_offset
        self._block_crossings[-sequence.token_offset % self.kv_cache.size] += 1
        self._serial += 1
        heapq.heappush(self._finish_heap, (sequence.finish_step, self._serial, sequence))

    def _stop_decoding(self, sequence: EngineSequence) -> None:
        """It decodes no more: all it lacks is in steps, or it has lost its place."""
        del self._decoding[sequence]
        self._shift_sum -= sequence.token_offset
        self._block_crossings[-sequence.token_offset % self.kv_cache.size] -= 1
        sequence.computed_tokens = sequence.token_offset + self._steps
        sequence.scheduled_output = sequence.output_tokens - (sequence.finish_step - self._steps + 1)
        sequence.own_blocks = self.kv_cache.blocks_for(sequence.computed_tokens) - sequence.shared_blocks
        sequence.finish_step = -1

    def _preempt_for_blocks(self) -> None:
        """Blocks for those that need one now, in their order, at the cost of the last ones."""
        size, step = self.kv_cache.size, self._steps
        order = [*self._decoding]
        if self._partial_prefill is not None:
            order.append(self._partial_prefill)
        free, index = self.kv_cache.free, 0
        while index < len(order):
            sequence = order[index]
            if sequence is not self._partial_prefill and (sequence.token_offset + step) % size == 0:
                while free < 1 and index < len(order):
                    free += self._preempt(order.pop())
                free -= 1  # of no matter where it was itself the last
            index += 1

    def _preempt(self, sequence: EngineSequence) -> int:
        """It loses its place and begins anew later; returns the blocks that became free."""
        if sequence is self._partial_prefill:
            self._partial_prefill = None
        else:
            self._stop_decoding(sequence)
        before = self.kv_cache.free
        self.kv_cache.release(sequence)
        sequence.computed_tokens = 0
        self._used_slots -= 1
        self.metrics.preemptions += 1
        self._preempted = True
        self.waiting.appendleft(sequence)
        return self.kv_cache.free - before

    def _continue(self, sequence: EngineSequence, batch: StepBatch, budget_left: int) -> int:
        """The next chunk of the prompt that is under way; returns what is left of the budget."""
        tokens = min(sequence.prompt_tokens + sequence.scheduled_output - sequence.computed_tokens, budget_left)
        if not self.kv_cache.grow(sequence, sequence.computed_tokens + tokens):
            self._preempt(sequence)
            return budget_left
        self._partial_prefill = None
        self._add_chunk(batch, sequence, tokens)
        return budget_left - tokens

    def _admit(self, batch: StepBatch, budget_left: int) -> None:
        while self.waiting and budget_left and self._used_slots < self._max_sequences and self._partial_prefill is None:
            sequence = self.waiting[0]
            fetches_kv = sequence.remote and not sequence.transferred_tokens
            if not self.kv_cache.allocate_next(sequence, sequence.prompt_tokens if fetches_kv else budget_left):
                return
            self.waiting.popleft()
            sequence.admitted = True
            if fetches_kv:
                sequence.transferred_tokens = sequence.prompt_tokens - sequence.computed_tokens
                self._loading_kv.add(sequence)
                batch.kv_fetches.append(sequence)
                continue
            self._used_slots += 1
            tokens = min(sequence.prompt_tokens + sequence.scheduled_output - sequence.computed_tokens, budget_left)
            self._add_chunk(batch, sequence, tokens)
            budget_left -= tokens

    def _add_chunk(self, batch: StepBatch, sequence: EngineSequence, tokens: int) -> None:
        """One token behind others costs what a decode costs, whatever it is."""
        batch.prefills += 1
        batch.cached += sequence.computed_tokens
        if tokens == 1 and sequence.computed_tokens:
            batch.single_token_sequences += 1
            batch.single_token_context += sequence.computed_tokens
        else:
            batch.tokens += tokens
            batch.pairs += tokens * (sequence.computed_tokens + tokens / 2)
        sequence.computed_tokens += tokens
        self.kv_cache.register_computed(sequence)
        if sequence.computed_tokens < sequence.prompt_tokens + sequence.scheduled_output:
            self._partial_prefill = sequence
            return
        sequence.scheduled_output += 1
        batch.prefill_completions.append(sequence)
        (batch.final_sequences if sequence.scheduled_output >= sequence.output_tokens else batch.new_decodes).append(
            sequence
        )

    def _post_fetches(self, fetches: list[EngineSequence], start_s: float) -> float:
        """Asks for KV: the loop stands still meanwhile. Returns when it goes on."""
        posted_s = start_s
        for sequence in fetches:
            post_s, transfer_s = (
                self._kv_link.post_s(sequence.transferred_tokens),
                self._kv_link.transfer_s(sequence.transferred_tokens),
            )
            posted_s += post_s
            self.metrics.post_s += post_s
            self.metrics.transfer_s += post_s + transfer_s
            self.kv_fetches.append((sequence, posted_s + transfer_s))
        self._device_free_s = start_s + self._kv_link.stall_share * (posted_s - start_s)
        return self._device_free_s

    # ---------------------------------------------------------------- completing

    def _count_tokens(self, run: StepRun, completed: int) -> None:
        before, new_steps = run.completed, completed - run.completed
        if new_steps > 0:
            decoding = run.emitting - len(run.prefill_completions)
            if decoding:
                self._observe_itl(run, before, completed, decoding, self.metrics.record_itl)
            run.completed = completed
            if run.emitting:
                self.metrics.steps += new_steps
                self.metrics.generated_tokens += new_steps * run.emitting

    def _observe_itl(
        self, run: StepRun, first: int, last: int, decoding: int, observe: Callable[[float, int], None]
    ) -> None:
        """Of some steps of a run, alike but for the first one of all where the loop stood still before it."""
        seconds = self._timing.duration_s
        stall_s = run.start_s - run.previous_end_s
        if first == 0 and stall_s > 0.0 and last > 1:
            observe(stall_s + seconds(run.series, 1), decoding)
            first, stall_s = 1, 0.0
        elapsed_s = seconds(run.series, last) - (seconds(run.series, first) if first else -stall_s)
        observe(elapsed_s / (last - first), decoding * (last - first))

    def _complete(self, run: StepRun) -> None:
        self._commit(run, run.count)
        self._count_tokens(run, run.count)
        self._last_completed = run
        decoding = run.emitting - len(run.prefill_completions)
        if decoding:
            self._observe_itl(run, 0, run.count, decoding, self.metrics.itl.observe)
        for sequence in run.prefill_completions:
            if sequence.first_token_s is None:
                sequence.first_token_s = run.end_s
                self.metrics.record_first_token(
                    sequence.prompt_tokens,
                    sequence.cached_tokens,
                    sequence.transferred_tokens,
                    run.end_s - sequence.arrived_s,
                )
                self.first_token_sequences.append(sequence)
        for sequence in run.final_sequences:
            sequence.last_token_s = run.end_s
            self._used_slots -= 1
            if sequence.keeps_kv:
                self.kv_cache.lend(sequence)
            else:
                self.kv_cache.release(sequence)
            assert sequence.first_token_s is not None
            self.metrics.record_completion(
                sequence.prompt_tokens, sequence.output_tokens, run.end_s - sequence.first_token_s
            )
            self.finished_sequences.append(sequence)
