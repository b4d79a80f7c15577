"""One engine in virtual time: vLLM's continuous batching with chunked prefill, leaping where nothing changes.

Problem: which requests wait, stall or lose their place decides latency more than any coefficient, so the schedule
must be vLLM's to the step; but most steps only give each stream one more token, and there are half a billion of them
a day.

Idea: steps are composed as vLLM composes them, two in flight: running sequences first, each with all the tokens it
lacks within the token budget, who finds no block takes the place of the last one; then waiting ones in order of
arrival until budget, slots or blocks are used up. A step that only decodes is followed by others like it until a
sequence ends, blocks run out or something comes from outside: they are one `Run`, whose times are a closed form
(`pace`). What comes from outside cuts the run where the next step was not composed yet. A decoding sequence costs
nothing until it ends: its tokens, context and blocks follow from the number of the step.

Every method first lets happen what happens by its `now`; `due_s` says when the next thing happens by itself.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable

from plimsoll.core.ports import EngineReading
from plimsoll.sim.blocks import Blocks
from plimsoll.sim.iteration import Did, Iteration, queued
from plimsoll.sim.job import Job
from plimsoll.sim.meters import Meters
from plimsoll.sim.pace import Pace
from plimsoll.sim.steps import Batch, Run
from plimsoll.sim.wire import Wire


class Engine:
    """One replica's engine core. leap: whether steps are taken together; False is the slow reference.

    firsts, ends: sequences whose first or last token came out, for whoever drives; sent: sequences whose KV is on its
    way, with the moment when it is there. All three are the driver's to clear.
    """

    in_flight = 2  # steps: one is composed while the one before it runs

    def __init__(
        self, most: int, budget: int, blocks: Blocks, pace: Pace, wire: Wire, meters: Meters, leap: bool = True
    ) -> None:
        """most: sequences at once. budget: tokens of a step."""
        self.meters = meters
        self.blocks = blocks
        self.firsts: list[Job] = []
        self.ends: list[Job] = []
        self.sent: list[tuple[Job, float]] = []
        self.due_s = math.inf
        self.waiting: deque[Job] = deque()
        self._most, self._budget, self._pace, self._wire, self._leap = most, budget, pace, wire, leap
        self._decoding: dict[Job, None] = {}  # in order of admission
        self._shifts = 0
        self._crossing = [0] * blocks.size  # decoding sequences by the step, modulo a block, at which they need one
        self._finishing: list[tuple[int, int, Job]] = []
        self._partial: Job | None = None
        self._loading: set[Job] = set()
        self._slots = 0
        self._steps = 0
        self._serial = 0
        self._flight: list[Run] = []
        self._free_s = -math.inf
        self._lost = False
        self._starved = False
        self._past: Run | None = None  # the newest one that is complete

    @property
    def idle(self) -> bool:
        """Whether it holds nothing, not even KV that another engine will fetch."""
        return not (self._flight or self.waiting or self._loading or self._slots) and not self.blocks.lent

    @property
    def running(self) -> int:
        return self._slots

    def add(self, job: Job, now_s: float) -> None:
        """A sequence has arrived."""
        self.advance(now_s)
        job.arrived_s = now_s
        if not self.waiting:
            self._cut(now_s)
        self.waiting.append(job)
        self._touched(now_s)

    def loaded(self, job: Job, now_s: float) -> None:
        """The prompt's KV has come: all but its last token need not be computed, and it is next."""
        self.advance(now_s)
        if job not in self._loading:
            return
        self._loading.discard(job)
        job.computed = job.prompt - 1
        self._cut(now_s)
        self.waiting.appendleft(job)
        self._touched(now_s)

    def fetched(self, job: Job, now_s: float) -> None:
        """Another engine has the KV that was kept here, or will never fetch it."""
        self.advance(now_s)
        if self.waiting:
            self._cut(now_s)
        self.blocks.returned(job.name)
        self._touched(now_s)

    def advance(self, now_s: float) -> None:
        """Lets everything happen that happens by now."""
        while self.due_s <= now_s:
            moment_s = self.due_s
            if self._flight[0].end_s <= moment_s:
                self._complete(self._flight.pop(0))
            self._fill(moment_s)

    def scraped(self, pod: str, now_s: float, at_s: float) -> EngineReading:
        """The engine's metrics now; at_s: the same moment since the epoch."""
        self.advance(now_s)
        for run in self._flight:
            self._commit(run, self._composed(run, now_s))
            self._count(run, self._pace.within(run.stretch, now_s - run.start_s, run.composed))
        waiting = len(self.waiting) + len(self._loading)
        return self.meters.reading(pod, at_s, self._slots, waiting, self.blocks.used)

    def iteration(self, pod: str, now_s: float) -> Iteration:
        """The newest step that is complete, and what waits."""
        self.advance(now_s)
        run, nth = self._past, 0
        if self._flight:
            nth = self._pace.within(self._flight[0].stretch, now_s - self._flight[0].start_s, self._flight[0].count)
            run = self._flight[0] if nth else run
        waits = queued(self.waiting, self._loading)
        if run is None or not self._flight:
            return Iteration(pod, queued=waits)
        nth = nth or run.count
        took_s = self._pace.seconds(run.stretch, nth) - self._pace.seconds(run.stretch, nth - 1)
        if nth == 1:
            took_s += run.start_s - run.after_s
        did = run.did._replace(context=run.did.context + (nth - 1) * run.did.decodes)
        return Iteration(pod, took_s, did, waits)

    # ---------------------------------------------------------------- time

    def _fill(self, now_s: float) -> None:
        """Composes until two steps are in flight, or nothing is left to compose."""
        flight = self._flight
        self._starved = False
        while len(flight) < self.in_flight:
            if flight:
                run = flight[0]
                if run.count > 1 and now_s < run.last_s:
                    break
                self._commit(run, run.count)
            made = self._compose(now_s)
            if made is None and self._lost and not flight:
                continue  # whoever lost its place is admitted anew
            if made is None:
                self._starved = True
                break
            flight.append(made)
        self._wait()

    def _touched(self, now_s: float) -> None:
        """Something came from outside: an idle engine begins, a busy one looks when a step has ended."""
        if self._flight:
            self._wait()
        else:
            self._fill(now_s)

    def _wait(self) -> None:
        """Sets when something happens by itself."""
        flight = self._flight
        if not flight:
            self.due_s = math.inf
        elif len(flight) == self.in_flight or self._starved:
            self.due_s = flight[0].end_s
        else:
            self.due_s = flight[0].last_s

    def _cut(self, now_s: float) -> None:
        """Something has come: of the last run there is only what was composed by now."""
        if not self._flight:
            return
        run = self._flight[-1]
        composed = max(run.composed, self._composed(run, now_s))
        self._commit(run, composed)
        if composed < run.count:
            run.count = composed
            self._time(run)

    def _composed(self, run: Run, now_s: float) -> int:
        """Steps of a run that are composed by now."""
        if run.count == 1 or now_s < run.second_s:
            return 1
        if now_s < run.start_s:
            return 2
        return min(run.count, 2 + self._pace.within(run.stretch, now_s - run.start_s, run.count))

    def _time(self, run: Run) -> None:
        """Sets when a run ends, and when what follows it is composed."""
        run.end_s = self._free_s = run.start_s + self._pace.seconds(run.stretch, run.count)
        run.last_s = run.second_s
        if run.count > 1:
            run.last_s = run.start_s + self._pace.seconds(run.stretch, run.count - 1)

    # ---------------------------------------------------------------- composing

    def _compose(self, now_s: float) -> Run | None:
        if now_s >= self._pace.next_heat_s:
            self._pace.heat(now_s)
        batch, self._lost = Batch(), False
        if self._crossing[self._steps % self.blocks.size] > self.blocks.free:
            self._squeeze()
        sequences, read = len(self._decoding), self._shifts + self._steps * len(self._decoding)
        self.blocks.take(self._crossing[self._steps % self.blocks.size])
        room = self._budget - sequences
        if self._partial is not None and room:
            room = self._continue(self._partial, batch, room)
        if not self._lost:
            self._admit(batch, room)
        start_s = max(now_s, self._free_s)
        if batch.fetches:
            start_s = self._post(batch.fetches, start_s)
        if not (sequences or batch.tokens or batch.single):
            return None
        stretch = self._pace.stretch(
            self._steps, batch.tokens, batch.pairs, sequences + batch.single, read + batch.read
        )
        second_s, after_s = now_s, start_s
        if self._flight:
            second_s = after_s = self._flight[-1].end_s
        run = Run(stretch, start_s, second_s, after_s, 1, sequences + len(batch.prompts))
        run.prompts, run.finals = batch.prompts, batch.finals
        run.did = Did(batch.prefills, batch.tokens + batch.single, batch.cached, sequences, read)
        if self._leap and not (batch.tokens or batch.single):
            run.count = self._alike(run, sequences)
        self._pace.spend(batch.tokens, batch.pairs, batch.single)
        self._number(run, 1)
        for job in batch.joining:
            self._join(job)
        self._time(run)
        return run

    def _alike(self, run: Run, sequences: int) -> int:
        """How many steps follow each other with the same sequences."""
        if self.waiting and (self._lost or any(flying.finals for flying in self._flight)):
            return 1
        count = min(self._finishing[0][0] - self._steps + 1, self._pace.longest(self._steps))
        if self.blocks.free < sequences * (count // self.blocks.size + 1):
            count = min(count, self._fitting(sequences))
        next_s = self._pace.next_heat_s
        if run.second_s >= next_s:
            return 1
        if next_s < math.inf:
            count = min(count, 2 + self._pace.within(run.stretch, next_s - run.start_s, count))
        return count

    def _fitting(self, sequences: int) -> int:
        """Steps for which there are blocks; the first one has its own already."""
        size = self.blocks.size
        rounds, left = divmod(self.blocks.free, sequences)
        step = rounds * size + 1
        while left >= 0:
            left -= self._crossing[(self._steps + step) % size]
            step += left >= 0
        return step

    def _commit(self, run: Run, composed: int) -> None:
        """The first so many steps of a run are composed: blocks are taken, and who is done is not composed again."""
        more = composed - run.composed
        if more <= 0:
            return
        size, crossing, first = self.blocks.size, self._crossing, self._steps
        sequences = len(self._decoding)
        if sequences:
            rounds, rest = divmod(more, size)
            grown = rounds * sequences
            for step in range(first, first + rest):
                grown += crossing[step % size]
            self.blocks.take(grown)
        self._number(run, more)

    def _number(self, run: Run, more: int) -> None:
        """So many more of a run's steps have their place in the order of all steps."""
        run.composed += more
        self._pace.spend(0, 0.0, len(self._decoding) * more)
        self._steps += more
        finishing = self._finishing
        while finishing and finishing[0][0] < self._steps:
            job = heapq.heappop(finishing)[2]
            if job.finish == self._steps - 1:
                run.finals.append(job)
                self._settle(job)

    def _join(self, job: Job) -> None:
        """From the next step on it decodes."""
        job.shift = job.computed - self._steps
        job.finish = self._steps + job.output - job.made - 1
        self._decoding[job] = None
        self._shifts += job.shift
        self._crossing[-job.shift % self.blocks.size] += 1
        self._serial += 1
        heapq.heappush(self._finishing, (job.finish, self._serial, job))

    def _settle(self, job: Job) -> None:
        """It decodes no more: all it lacks is in steps, or it has lost its place."""
        del self._decoding[job]
        self._shifts -= job.shift
        self._crossing[-job.shift % self.blocks.size] -= 1
        job.computed = job.shift + self._steps
        job.made = job.output - (job.finish - self._steps + 1)
        job.blocks = self.blocks.needed(job.computed) - job.shared
        job.finish = -1

    def _squeeze(self) -> None:
        """Blocks for those that need one now, in their order, at the cost of the last ones."""
        size, step = self.blocks.size, self._steps
        order = [*self._decoding]
        if self._partial is not None:
            order.append(self._partial)
        free, place = self.blocks.free, 0
        while place < len(order):
            job = order[place]
            if job is not self._partial and (job.shift + step) % size == 0:
                while free < 1 and place < len(order):
                    free += self._preempt(order.pop())
                free -= 1  # of no matter where it was itself the last
            place += 1

    def _preempt(self, job: Job) -> int:
        """It loses its place and begins anew later; returns the blocks that became free."""
        if job is self._partial:
            self._partial = None
        else:
            self._settle(job)
        before = self.blocks.free
        self.blocks.release(job)
        job.computed = 0
        self._slots -= 1
        self.meters.preemptions += 1
        self._lost = True
        self.waiting.appendleft(job)
        return self.blocks.free - before

    def _continue(self, job: Job, batch: Batch, room: int) -> int:
        """The next chunk of the prompt that is under way; returns what is left of the budget."""
        tokens = min(job.prompt + job.made - job.computed, room)
        if not self.blocks.grow(job, job.computed + tokens):
            self._preempt(job)
            return room
        self._partial = None
        self._put(batch, job, tokens)
        return room - tokens

    def _admit(self, batch: Batch, room: int) -> None:
        while self.waiting and room and self._slots < self._most and self._partial is None:
            job = self.waiting[0]
            away = job.remote and not job.moved
            if not self.blocks.place(job, job.prompt if away else room):
                return
            self.waiting.popleft()
            job.admitted = True
            if away:
                job.moved = job.prompt - job.computed
                self._loading.add(job)
                batch.fetches.append(job)
                continue
            self._slots += 1
            tokens = min(job.prompt + job.made - job.computed, room)
            self._put(batch, job, tokens)
            room -= tokens

    def _put(self, batch: Batch, job: Job, tokens: int) -> None:
        """One token behind others costs what a decode costs, whatever it is."""
        batch.prefills += 1
        batch.cached += job.computed
        if tokens == 1 and job.computed:
            batch.single += 1
            batch.read += job.computed
        else:
            batch.tokens += tokens
            batch.pairs += tokens * (job.computed + tokens / 2)
        job.computed += tokens
        self.blocks.computed(job)
        if job.computed < job.prompt + job.made:
            self._partial = job
            return
        job.made += 1
        batch.prompts.append(job)
        (batch.finals if job.made >= job.output else batch.joining).append(job)

    def _post(self, fetches: list[Job], start_s: float) -> float:
        """Asks for KV: the loop stands still meanwhile. Returns when it goes on."""
        posted_s = start_s
        for job in fetches:
            post_s, travel_s = self._wire.post_s(job.moved), self._wire.travel_s(job.moved)
            posted_s += post_s
            self.meters.post_s += post_s
            self.meters.transfer_s += post_s + travel_s
            self.sent.append((job, posted_s + travel_s))
        self._free_s = start_s + self._wire.lost_share * (posted_s - start_s)
        return self._free_s

    # ---------------------------------------------------------------- completing

    def _count(self, run: Run, completed: int) -> None:
        before, more = run.completed, completed - run.completed
        if more > 0:
            decoding = run.emits - len(run.prompts)
            if decoding:
                self._gaps(run, before, completed, decoding, self.meters.gap)
            run.completed = completed
            if run.emits:
                self.meters.steps += more
                self.meters.generated += more * run.emits

    def _gaps(self, run: Run, first: int, last: int, decoding: int, observe: Callable[[float, int], None]) -> None:
        """Of some steps of a run, alike but for the first one of all where the loop stood still before it."""
        seconds = self._pace.seconds
        stood_s = run.start_s - run.after_s
        if first == 0 and stood_s > 0.0 and last > 1:
            observe(stood_s + seconds(run.stretch, 1), decoding)
            first, stood_s = 1, 0.0
        took_s = seconds(run.stretch, last) - (seconds(run.stretch, first) if first else -stood_s)
        observe(took_s / (last - first), decoding * (last - first))

    def _complete(self, run: Run) -> None:
        self._commit(run, run.count)
        self._count(run, run.count)
        self._past = run
        decoding = run.emits - len(run.prompts)
        if decoding:
            self._gaps(run, 0, run.count, decoding, self.meters.gaps.observe)
        for job in run.prompts:
            if job.first_s is None:
                job.first_s = run.end_s
                self.meters.first(job.prompt, job.cached, job.moved, run.end_s - job.arrived_s)
                self.firsts.append(job)
        for job in run.finals:
            job.last_s = run.end_s
            self._slots -= 1
            if job.produce:
                self.blocks.lend(job)
            else:
                self.blocks.release(job)
            assert job.first_s is not None
            self.meters.ended(job.prompt, job.output, run.end_s - job.first_s)
            self.ends.append(job)
