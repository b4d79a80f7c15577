"""One engine in virtual time: vLLM's continuous batching with chunked prefill, fast-forwarded while nothing changes.

Problem: which requests wait, stall or are preempted decides latency more than any coefficient, so the schedule must
equal vLLM's to the step. But most steps only add one token to each stream, and a day has half a billion of them.

Idea: steps are composed as in vLLM (`batch_scheduler`), with two in flight. A step that only decodes is followed by
identical steps until a sequence ends, blocks run out or an external event occurs. They form one `StepRun`, whose times
are a closed form (`step_timing`). An external event truncates the run where the next step was not yet composed. A
decoding sequence costs nothing until it ends: its tokens, context and blocks follow from the step number
(`decode_batch`).

Every method first processes all events up to its `now_s`; the next internal event is due at `next_event_s`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from plimsoll.sim.engine.batch_scheduler import BatchScheduler
from plimsoll.sim.engine.engine_metrics import EngineMetrics
from plimsoll.sim.engine.iteration import Iteration, StepWork, queued_work
from plimsoll.sim.engine.kv_cache import KvCache
from plimsoll.sim.engine.kv_link import KvLink
from plimsoll.sim.engine.sequence import EngineSequence
from plimsoll.sim.engine.step_run import StepRun
from plimsoll.sim.engine.step_timing import StepTiming

StepListener = Callable[[StepRun, int, float], None]


class SimulatedEngine:
    """One replica's engine core. fast_forward: whether steps are combined; False is the slow reference.

    `first_token_sequences` and `finished_sequences` have the sequences whose first or last token was generated, and
    `kv_fetches` those whose KV is in transfer, with its time of arrival. The caller clears these three lists.

    on_steps: called with a run, the number of its steps that have ended since, and the end of the last of them; the run
    has the sequences that got a token of each. `remove` needs it. Without it a decoding sequence costs no time.
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
        on_steps: StepListener | None = None,
        max_adapters: int = 0,
        adapter_load_s: float = 0.0,
    ) -> None:
        """max_sequences: sequences at once. token_budget: tokens of a step. max_adapters: LoRA adapters of a step.
        adapter_load_s: time by which the copy of one to the GPU delays a step.
        """
        self.metrics = metrics
        self.kv_cache = kv_cache
        self.first_token_sequences: list[EngineSequence] = []
        self.finished_sequences: list[EngineSequence] = []
        self.kv_fetches: list[tuple[EngineSequence, float]] = []
        self.next_event_s = math.inf
        self._scheduler = BatchScheduler(max_sequences, token_budget, kv_cache, metrics, max_adapters)
        self._adapter_load_s = adapter_load_s
        self.waiting = self._scheduler.waiting
        self._timing, self._kv_link, self._fast_forward, self._on_steps = timing, kv_link, fast_forward, on_steps
        self._steps_in_flight: list[StepRun] = []
        self._device_free_s = -math.inf
        self._starved = False
        self._last_completed: StepRun | None = None  # the newest one that is complete

    @property
    def idle(self) -> bool:
        """Whether the engine has no sequence, and holds no KV for another engine."""
        return (
            not (self._steps_in_flight or self.waiting or self.loading_kv or self.running)
            and not self.kv_cache.is_lending
        )

    @property
    def running(self) -> int:
        """Sequences that have a slot."""
        return self._scheduler.running

    @property
    def loading_kv(self) -> Collection[EngineSequence]:
        """Sequences whose KV is in transfer."""
        return self._scheduler.loading_kv

    @property
    def runs_in_flight(self) -> Sequence[StepRun]:
        """The composed steps that have not ended, in order."""
        return self._steps_in_flight

    def add(self, sequence: EngineSequence, now_s: float, arrived_s: float | None = None) -> None:
        """Add an arriving sequence. arrived_s: when the engine's front end received it, from which TTFT counts."""
        self.advance(now_s)
        sequence.arrived_s = now_s if arrived_s is None else arrived_s
        if not self.waiting or self._scheduler.adapters.max_adapters:  # it may pass those of other adapters
            self._truncate_run(now_s)
        self.waiting.append(sequence)
        self._reschedule(now_s)

    def on_kv_loaded(self, sequence: EngineSequence, now_s: float) -> None:
        """Schedule a sequence next whose KV has arrived; only its last prompt token is left to compute."""
        self.advance(now_s)
        if sequence not in self.loading_kv:
            return
        self._truncate_run(now_s)
        self._scheduler.on_kv_loaded(sequence)
        self._reschedule(now_s)

    def on_kv_failed(self, sequence: EngineSequence, now_s: float) -> None:
        """Schedule a sequence next whose KV transfer failed; its prompt is computed here. No effect
        after the transfer.
        """
        self.advance(now_s)
        if sequence in self.loading_kv:
            self._truncate_run(now_s)
            self._scheduler.on_kv_failed(sequence)
            self._reschedule(now_s)
        elif not sequence.transferred_tokens:
            sequence.remote = False

    def remove(self, sequence: EngineSequence, now_s: float) -> None:
        """Remove a sequence that has not ended, in any state. Its tokens in flight are lost, and its
        blocks are freed.
        """
        self.count_steps(now_s)
        self._truncate_run(now_s)
        for run in self._steps_in_flight:
            run.drop(sequence)
        self._scheduler.remove(sequence)
        self._reschedule(now_s)

    def on_kv_fetched(self, sequence: EngineSequence, now_s: float) -> None:
        """Release KV that another engine has fetched, or will never fetch."""
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

    def count_steps(self, now_s: float) -> None:
        """Count the steps that have ended by now, also those of unfinished runs."""
        self.advance(now_s)
        for run in self._steps_in_flight:
            self._commit(run, self._composed_steps(run, now_s))
            self._count_tokens(run, self._timing.completed_steps(run.series, now_s - run.start_s, run.composed))

    def step_end_s(self, now_s: float) -> float:
        """Return the end of the step that runs at now_s; now_s if none runs."""
        self.advance(now_s)
        if self._steps_in_flight:
            run = self._steps_in_flight[0]
            ended = self._timing.completed_steps(run.series, now_s - run.start_s, run.count - 1)
            return run.start_s + self._timing.duration_s(run.series, ended + 1)
        return now_s

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
        waiting_work = queued_work(self.waiting, self.loading_kv)
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
        """Compose steps until two are in flight, or nothing is left to compose."""
        in_flight = self._steps_in_flight
        self._starved = False
        while len(in_flight) < self.MAX_STEPS_IN_FLIGHT:
            if in_flight:
                run = in_flight[0]
                if run.count > 1 and now_s < run.next_compose_s:
                    break
                self._commit(run, run.count)
            composed = self._compose(now_s)
            if composed is None and self._scheduler.preempted and not in_flight:
                continue  # preempted sequences are admitted again
            if composed is None:
                self._starved = True
                break
            in_flight.append(composed)
        self._set_next_event()

    def _reschedule(self, now_s: float) -> None:
        """Process an external event: an idle engine starts, a busy one composes again after its current step."""
        if self._steps_in_flight:
            self._set_next_event()
        else:
            self._compose_steps(now_s)

    def _set_next_event(self) -> None:
        """Set the time of the next internal event."""
        in_flight = self._steps_in_flight
        if not in_flight:
            self.next_event_s = math.inf
        elif len(in_flight) == self.MAX_STEPS_IN_FLIGHT or self._starved:
            self.next_event_s = in_flight[0].end_s
        else:
            self.next_event_s = in_flight[0].next_compose_s

    def _truncate_run(self, now_s: float) -> None:
        """Cut the last run to the steps composed by now, because of an external event."""
        if not self._steps_in_flight:
            return
        run = self._steps_in_flight[-1]
        composed = max(run.composed, self._composed_steps(run, now_s))
        self._commit(run, composed)
        if composed < run.count:
            run.count = composed
            self._set_end_times(run)

    def _composed_steps(self, run: StepRun, now_s: float) -> int:
        """Return the number of steps of a run that are composed by now."""
        if run.count == 1 or now_s < run.second_composed_s:
            return 1
        if now_s < run.start_s:
            return 2
        return min(run.count, 2 + self._timing.completed_steps(run.series, now_s - run.start_s, run.count))

    def _set_end_times(self, run: StepRun) -> None:
        """Set the end of a run, and the time at which the next step is composed."""
        run.end_s = self._device_free_s = run.start_s + self._timing.duration_s(run.series, run.count)
        run.next_compose_s = run.second_composed_s
        if run.count > 1:
            run.next_compose_s = run.start_s + self._timing.duration_s(run.series, run.count - 1)

    # ---------------------------------------------------------------- composing

    def _compose(self, now_s: float) -> StepRun | None:
        if now_s >= self._timing.next_heat_update_s:
            self._timing.update_heat(now_s)
        decodes, batch = self._scheduler.decodes, self._scheduler.compose(now_s)
        start_s = max(now_s, self._device_free_s)
        if batch.kv_fetches:
            start_s = self._post_fetches(batch.kv_fetches, start_s)
        if not (batch.decodes or batch.tokens or batch.single_token_sequences):
            return None
        start_s += batch.adapter_loads * self._adapter_load_s
        series = self._timing.series(
            decodes.step,
            batch.tokens,
            batch.pairs,
            batch.decodes + batch.single_token_sequences,
            batch.context + batch.single_token_context,
        )
        second_s, after_s = now_s, start_s
        if self._steps_in_flight:
            second_s = after_s = self._steps_in_flight[-1].end_s
        run = StepRun(series, start_s, second_s, after_s, 1, batch.decodes + len(batch.prefill_completions))
        run.prefill_completions = batch.prefill_completions
        run.first_step_work = StepWork(
            batch.prefills, batch.tokens + batch.single_token_sequences, batch.cached, batch.decodes, batch.context
        )
        if self._on_steps is not None:
            run.decoding = [*decodes.sequences]
        if self._fast_forward and not (batch.tokens or batch.single_token_sequences):
            run.count = self._identical_steps(run, batch.decodes)
        self._timing.add_compute(batch.tokens, batch.pairs, batch.single_token_sequences)
        self._timing.add_compute(0, 0.0, batch.decodes)
        run.composed, run.final_sequences = 1, [*batch.final_sequences, *decodes.advance(1)]
        for sequence in batch.new_decodes:
            decodes.add(sequence)
        self._set_end_times(run)
        return run

    def _identical_steps(self, run: StepRun, sequences: int) -> int:
        """Return the number of consecutive steps with the same sequences."""
        if self.waiting and (
            self._scheduler.preempted or any(flying.final_sequences for flying in self._steps_in_flight)
        ):
            return 1
        decodes = self._scheduler.decodes
        count = min(decodes.steps_to_first_end, self._timing.max_steps(decodes.step))
        if self.kv_cache.free < sequences * (count // self.kv_cache.size + 1):
            count = min(count, decodes.steps_within(self.kv_cache.free))
        throttle_s = self._timing.next_heat_update_s
        if run.second_composed_s >= throttle_s:
            return 1
        if throttle_s < math.inf:
            count = min(count, 2 + self._timing.completed_steps(run.series, throttle_s - run.start_s, count))
        return count

    def _commit(self, run: StepRun, composed: int) -> None:
        """Compose the first `composed` steps of a run: allocate blocks, and remove the sequences that end."""
        new_steps = composed - run.composed
        if new_steps > 0:
            run.composed = composed
            self._timing.add_compute(0, 0.0, len(self._scheduler.decodes.sequences) * new_steps)
            run.final_sequences += self._scheduler.compose_more(new_steps)

    def _post_fetches(self, fetches: list[EngineSequence], start_s: float) -> float:
        """Post the KV reads, which blocks the main loop. Returns when it continues."""
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
            if self._on_steps is not None:
                self._on_steps(run, new_steps, run.start_s + self._timing.duration_s(run.series, completed))

    def _observe_itl(
        self, run: StepRun, first: int, last: int, decoding: int, observe: Callable[[float, int], None]
    ) -> None:
        """Record the inter-token latencies of some steps of a run; only the first one may include a
        blocked main loop.
        """
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
                self.metrics.prefill_s += run.end_s - (
                    run.end_s if sequence.scheduled_s is None else sequence.scheduled_s
                )
                self.metrics.record_first_token(
                    sequence.prompt_tokens,
                    sequence.cached_tokens,
                    sequence.transferred_tokens,
                    run.end_s - sequence.arrived_s,
                )
                self.first_token_sequences.append(sequence)
        for sequence in run.final_sequences:
            sequence.last_token_s = run.end_s
            self._scheduler.end(sequence)
            assert sequence.first_token_s is not None
            self.metrics.record_completion(
                sequence.prompt_tokens, sequence.output_tokens, run.end_s - sequence.first_token_s
            )
            self.finished_sequences.append(sequence)
