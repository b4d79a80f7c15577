"""A small discrete-event lab for admission: engines that step, clients that come back, gates and plain caps.

Engines schedule as vLLM does: decodes first, then prompts in order of arrival within the token budget, one step
composed while another runs, the newest preempted and computed again where KV runs out. Their step model is the plant's.
They can keep the blocks of prompts, the least recently used of which go when KV is needed.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.placement import BLOCK_TOKENS
from plimsoll.core.admission.request import AdmissionDecision, AdmissionOutcome, AdmissionRequest
from plimsoll.core.capacity.tier_model import HTTP_OVERHEAD_PER_TOKEN_S, HTTP_OVERHEAD_S
from plimsoll.core.engine_model.step_time import EngineLimits, StepModel


@dataclass
class ClientRequest:
    """One client's request: what it asks, and what became of it."""

    id: str
    arrived_s: float
    prompt: int
    output: int
    request_class: str = "chat"
    tenant: str = "t"
    target_s: float = 0.5
    admitted_s: float | None = None
    first_s: float | None = None
    end_s: float | None = None
    outcome: AdmissionOutcome | None = None
    attempts: int = 0
    retry_advice: list[int] = field(default_factory=list)
    remaining_tokens: int = 0  # tokens still to make
    context: int = 0  # tokens to prefill, more than the prompt after a preemption
    blocks: tuple[int, ...] = ()  # chained hashes of the prompt's blocks of 128 tokens
    cached_tokens: int = 0  # tokens that were cached when its prefill began

    @property
    def tpot_s(self) -> float:
        if self.end_s is None or self.first_s is None or self.output < 2:
            return 0.0
        return (self.end_s - self.first_s) / (self.output - 1)

    def within_slo(self, tpot_s: float) -> bool:
        """In promise, counted from its first arrival."""
        return (
            self.end_s is not None
            and self.first_s is not None
            and self.first_s - self.arrived_s <= self.target_s
            and self.tpot_s <= tpot_s
        )


class PrefixCache:
    """What an engine holds of prompts that it has seen: the least recently used blocks go, ends before beginnings."""

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, None] = OrderedDict()

    def hits(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks are there."""
        return next((k for k, block in enumerate(blocks) if block not in self.blocks), len(blocks))

    def use(self, blocks: Sequence[int], capacity: float) -> None:
        for block in reversed(blocks):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        while len(self.blocks) > capacity:
            self.blocks.popitem(last=False)


FrontendModel = Callable[[float, int], tuple[float, float]]


class StepEngine:
    """One replica, step by step; the work of a step is constant time, however large the batch.

    front: what a request that is sent now takes outside of the engine, before and after, while so many run, beside what
    the core has for it.
    """

    def __init__(
        self,
        model: StepModel,
        limits: EngineLimits,
        rng: np.random.Generator | None = None,
        cache: PrefixCache | None = None,
        front: FrontendModel | None = None,
    ) -> None:
        self.model, self.limits, self.rng, self.cache = model, limits, rng, cache
        self.front = front
        self.waiting: deque[ClientRequest] = deque()
        self.running: dict[str, tuple[ClientRequest, int]] = {}  # with the step of its first token
        self.finish: list[tuple[int, int, str]] = []
        self.cached = 0
        self.partial = 0  # tokens already prefilled of the first that waits
        self.number = 0
        self.preempted = 0
        self.ends_at: float | None = None  # of the step under way
        self.composed: _Step | None = None
        self.current: _Step | None = None

    def submit(self, job: ClientRequest, now: float) -> None:
        job.remaining_tokens, job.context = job.output, job.prompt
        self.waiting.append(job)
        if self.ends_at is None:
            self._begin(now)

    def step_done(self, now: float) -> list[ClientRequest]:
        """The step under way ends; returns those that are finished."""
        assert self.current is not None
        for job in self.current.first:
            if job.first_s is None:
                after_s = self.front(now, len(self.running))[1] if self.front else 0.0
                job.first_s = now + HTTP_OVERHEAD_S + HTTP_OVERHEAD_PER_TOKEN_S * job.prompt + after_s
        done = self.current.done
        for job in done:
            self._cache_prompt(job)
        self._begin(now)
        return done

    def _cache_prompt(self, job: ClientRequest) -> None:
        """Its prompt was used now; what running answers take up, prompts cannot have."""
        if self.cache is not None:
            answers = self.cached - sum(other.context for other, _ in self.running.values())
            self.cache.use(job.blocks, (self.limits.kv_tokens - answers) // BLOCK_TOKENS)

    def _begin(self, now: float) -> None:
        step = self.composed or self._compose()
        self.composed = None
        if step is None:
            self.current, self.ends_at = None, None
            return
        self.current = step
        self.ends_at = now + step.seconds
        self.composed = self._compose()

    def _compose(self) -> _Step | None:
        while self.finish and self.finish[0][0] <= self.number:
            _, number, id = heapq.heappop(self.finish)
            found = self.running.get(id)
            if found is not None and found[1] == number:
                del self.running[id]
                self.cached -= found[0].prompt + found[0].output
        while self.cached + len(self.running) > self.limits.kv_tokens:
            self._preempt()
        self.number += 1
        step = _Step()
        n = len(self.running)
        tokens, pairs = self._prefill(step, self.limits.token_budget - n)
        if not n and not tokens:
            return None
        m = self.model
        seconds = m.base_s + (m.any_prefill_s if tokens else 0.0) + m.prefill_token_s * tokens
        seconds += m.prefill_pair_s * pairs + m.sequence_s * n + m.cached_token_s * self.cached
        step.seconds = seconds * (1.0 if self.rng is None else float(np.exp(0.03 * self.rng.standard_normal())))
        self.cached += n
        for job in step.first:
            self.running[job.id] = (job, self.number)
            self.cached += job.context + 1
            heapq.heappush(self.finish, (self.number + job.remaining_tokens - 1, self.number, job.id))
        while self.finish and self.finish[0][0] <= self.number:
            _, number, id = heapq.heappop(self.finish)
            found = self.running.get(id)
            if found is not None and found[1] == number:
                step.done.append(found[0])
                del self.running[id]
                self.cached -= found[0].prompt + found[0].output
        return step

    def _prefill(self, step: _Step, budget: int) -> tuple[int, float]:
        tokens, pairs, room = 0, 0.0, self.limits.kv_tokens - self.cached
        slots = self.limits.max_sequences - len(self.running)
        while self.waiting and budget > 0 and slots > 0:
            job = self.waiting[0]
            if job.context + 1 > room:
                break
            if self.cache is not None and not self.partial:
                self.partial = min(BLOCK_TOKENS * self.cache.hits(job.blocks), job.context - 1)
                job.cached_tokens = max(job.cached_tokens, self.partial)
            chunk = min(budget, job.context - self.partial)
            pairs += chunk * (self.partial + chunk / 2)
            tokens, budget, self.partial = tokens + chunk, budget - chunk, self.partial + chunk
            if self.partial < job.context:
                break
            self.partial = 0
            room -= job.context + 1
            slots -= 1
            step.first.append(self.waiting.popleft())
            self._cache_prompt(job)
        return tokens, pairs

    def _preempt(self) -> None:
        id = next(reversed(self.running))
        job, began = self.running.pop(id)
        made = self.number - began + 1
        self.cached -= job.context + made
        job.context, job.remaining_tokens = job.context + made, job.remaining_tokens - made
        self.waiting.appendleft(job)
        self.preempted += 1


@dataclass
class _Step:
    seconds: float = 0.0
    first: list[ClientRequest] = field(default_factory=list)
    done: list[ClientRequest] = field(default_factory=list)


class ControllerPolicy:
    """The gate under test. share: of every engine, that it may use. told: what prompts begin with."""

    def __init__(
        self,
        gate: AdmissionController,
        on_tick: Callable[[AdmissionController, float], None] | None = None,
        share: float = 1.0,
        reported: bool = True,
    ) -> None:
        self.gate, self.on_tick, self.share, self.reported = gate, on_tick, share, reported
        self.jobs: dict[str, ClientRequest] = {}
        self.engines = 0

    def offer(self, job: ClientRequest, now: float) -> list[tuple[ClientRequest, int]]:
        id = f"{job.id}/{job.attempts}"
        job.attempts += 1
        self.jobs[id] = job
        blocks = job.blocks if self.reported else ()
        requests = AdmissionRequest(
            id, job.request_class, job.tenant, now, job.prompt, body_hash=hash(job.id), block_hashes=blocks
        )
        return self._take([self.gate.submit(requests, now)], now)

    def done(self, job: ClientRequest, now: float) -> list[tuple[ClientRequest, int]]:
        id = f"{job.id}/{job.attempts - 1}"
        self.jobs.pop(id, None)
        assert job.first_s is not None
        assert job.admitted_s is not None
        self.gate.complete(id, now, job.output, job.first_s - job.admitted_s)
        return self.wake(now)

    def wake(self, now: float) -> list[tuple[ClientRequest, int]]:
        return self._take(self.gate.release(now), now)

    def wake_s(self) -> float:
        return self.gate.wake_at_s

    def ready(self, engines: int, now: float) -> list[tuple[ClientRequest, int]]:
        self.engines = engines
        batch = int(self.gate.pool.cost_model.batch * self.share)
        self.gate.set_replicas({str(k): batch for k in range(engines)}, now)
        return self.wake(now)

    def tick(self, now: float) -> None:
        if self.on_tick is not None:
            self.on_tick(self.gate, now)

    def _take(self, decisions: Iterable[AdmissionDecision], now: float) -> list[tuple[ClientRequest, int]]:
        let_in = []
        for decision in decisions:
            job = self.jobs[decision.request_id]
            job.outcome = decision.outcome
            if decision.outcome is AdmissionOutcome.ADMITTED:
                assert decision.address is not None
                let_in.append((job, int(decision.address)))
            elif decision.outcome is not AdmissionOutcome.QUEUED:
                del self.jobs[decision.request_id]
                if decision.retry is not None and decision.retry.retry_after_s is not None:
                    job.retry_advice.append(decision.retry.retry_after_s)
        return let_in


class CapPolicy:
    """A constant cap on what is in flight on each engine; the rest waits, first come first served, while in time."""

    def __init__(self, cap: int, hold: bool, model: StepModel) -> None:
        self.cap, self.hold, self.model = cap, hold, model
        self.inflight: list[int] = []
        self.where: dict[str, int] = {}
        self.queue: deque[ClientRequest] = deque()

    def offer(self, job: ClientRequest, now: float) -> list[tuple[ClientRequest, int]]:
        self.queue.append(job)
        let_in = self.wake(now)
        if not self.hold:
            while self.queue:
                self.queue.pop().outcome = AdmissionOutcome.SHED_SATURATED
        return let_in

    def done(self, job: ClientRequest, now: float) -> list[tuple[ClientRequest, int]]:
        self.inflight[self.where.pop(job.id)] -= 1
        return self.wake(now)

    def wake(self, now: float) -> list[tuple[ClientRequest, int]]:
        let_in = []
        while self.queue and self.inflight:
            engine = min(range(len(self.inflight)), key=lambda k: self.inflight[k])
            if self.inflight[engine] >= self.cap:
                break
            job = self.queue.popleft()
            m = self.model
            own_s = m.prefill_token_s * job.prompt + 3 * m.base_s + HTTP_OVERHEAD_S + 0.3 * job.target_s
            if job.arrived_s + job.target_s - own_s < now:
                job.outcome = AdmissionOutcome.SHED_SATURATED
                continue
            job.outcome = AdmissionOutcome.ADMITTED
            self.inflight[engine] += 1
            self.where[job.id] = engine
            let_in.append((job, engine))
        return let_in

    def wake_s(self) -> float:
        return float("inf")

    def ready(self, engines: int, now: float) -> list[tuple[ClientRequest, int]]:
        self.inflight += [0] * (engines - len(self.inflight))
        return self.wake(now)

    def tick(self, now: float) -> None:
        """It does not learn."""


class Policy(Protocol):
    """Who decides where and when requests go: each call returns those that go now, with their engines."""

    def offer(self, job: ClientRequest, now: float) -> list[tuple[ClientRequest, int]]: ...
    def done(self, job: ClientRequest, now: float) -> list[tuple[ClientRequest, int]]: ...
    def wake(self, now: float) -> list[tuple[ClientRequest, int]]: ...
    def wake_s(self) -> float: ...
    def ready(self, engines: int, now: float) -> list[tuple[ClientRequest, int]]: ...
    def tick(self, now: float) -> None: ...


Retry = Callable[[ClientRequest, float], list[float]]


def no_retry(job: ClientRequest, now: float) -> list[float]:
    """A client that takes the first refusal."""
    return []


class _Simulation:
    """The events of one run, in order of time."""

    def __init__(self, policy: Policy, engines: list[StepEngine], retry: Retry) -> None:
        self.policy, self.engines, self.retry = policy, engines, retry
        self.events: list[tuple[float, int, str, int, ClientRequest | None]] = []
        self.number = 0
        self.undecided: list[ClientRequest] = []
        self.woken = float("inf")

    def push(self, at: float, kind: str, index: int = 0, job: ClientRequest | None = None) -> None:
        self.number += 1
        heapq.heappush(self.events, (at, self.number, kind, index, job))

    def run(self, until_s: float) -> None:
        while self.events and self.events[0][0] <= until_s:
            now, _, kind, index, job = heapq.heappop(self.events)
            getattr(self, kind)(now, index, job)
            self.undecided = [each for each in self.undecided if not self.back(each, now)]
            wake_s = max(self.policy.wake_s(), now)
            if wake_s < self.woken:
                self.woken = wake_s
                self.push(wake_s, "wake")

    def begin(self, let_in: list[tuple[ClientRequest, int]], now: float) -> None:
        for job, k in let_in:
            job.admitted_s = now
            front, running = self.engines[k].front, len(self.engines[k].running)
            if front is None:
                self.submit(now, k, job)
            else:
                self.push(now + front(now, running)[0], "submit", k, job)

    def submit(self, now: float, index: int, job: ClientRequest | None) -> None:
        assert job is not None
        engine = self.engines[index]
        idle = engine.ends_at is None
        engine.submit(job, now)
        if idle:
            self.push(engine.ends_at or now, "step", index)

    def step(self, now: float, index: int, _: ClientRequest | None) -> None:
        engine = self.engines[index]
        done = engine.step_done(now)
        if engine.ends_at is not None:  # else the next to begin there starts it
            self.push(engine.ends_at, "step", index)
        for job in done:
            if engine.front is None:
                self.done(now, index, job)
            else:
                self.push(now + engine.front(now, len(engine.running))[1], "done", index, job)

    def done(self, now: float, _: int, job: ClientRequest | None) -> None:
        assert job is not None
        job.end_s = max(now, job.first_s or now)
        self.begin(self.policy.done(job, now), now)

    def offer(self, now: float, _: int, job: ClientRequest | None) -> None:
        assert job is not None
        self.begin(self.policy.offer(job, now), now)
        if self.retry is not no_retry:
            self.undecided.append(job)

    def ready(self, now: float, index: int, _: ClientRequest | None) -> None:
        self.begin(self.policy.ready(index, now), now)

    def wake(self, now: float, _: int, __: ClientRequest | None) -> None:
        self.woken = float("inf")
        self.begin(self.policy.wake(now), now)

    def tick(self, now: float, _: int, __: ClientRequest | None) -> None:
        self.policy.tick(now)
        self.push(now + 1.0, "tick")

    def back(self, job: ClientRequest, now: float) -> bool:
        """Whether the fate of this attempt is known; refused clients come back as they do."""
        if job.outcome is AdmissionOutcome.QUEUED:
            return False
        if job.outcome is not AdmissionOutcome.ADMITTED:
            for at in self.retry(job, now):
                self.push(at, "offer", job=job)
        return True


def run(
    policy: Policy,
    engines: list[StepEngine],
    jobs: list[ClientRequest],
    until_s: float,
    ready_s: list[float] | None = None,
    retry: Retry = no_retry,
) -> None:
    """Plays the jobs, changed in place. ready_s: when each engine is ready. retry: times at which a refused client is
    back. Ticks come every second."""
    simulation = _Simulation(policy, engines, retry)
    for k, at in enumerate(sorted(ready_s or [0.0] * len(engines)), start=1):
        simulation.push(at, "ready", k)
    for job in jobs:
        simulation.push(job.arrived_s, "offer", job=job)
    simulation.push(0.0, "tick")
    simulation.run(until_s)


def poisson(
    rate: float, seconds: float, rng: np.random.Generator, start_s: float = 0.0, prefix: str = "j", **same: object
) -> list[ClientRequest]:
    """Arrivals of chat requests: prompts of about 1,200 tokens, answers of about 220, lognormal."""
    gaps = rng.exponential(1 / rate, int(rate * seconds * 1.2) + 50)
    times = start_s + np.cumsum(gaps)
    times = times[times < start_s + seconds]
    prompts = np.ceil(1000 * np.exp(0.6 * rng.standard_normal(times.size)))
    outputs = np.ceil(195 * np.exp(0.5 * rng.standard_normal(times.size)))
    base = ClientRequest("", 0.0, 1, 1)
    return [
        replace(base, id=f"{prefix}{i}", arrived_s=float(t), prompt=int(p), output=int(o), retry_advice=[], **same)  # type: ignore[arg-type]
        for i, (t, p, o) in enumerate(zip(times, prompts, outputs, strict=True))
    ]


def goodput(jobs: Iterable[ClientRequest], tpot_s: float, start_s: float, end_s: float) -> tuple[float, float]:
    """Requests in promise per second of those offered in the window, and their share of those let in."""
    in_window = [job for job in jobs if start_s <= job.arrived_s < end_s]
    within_slo = sum(job.within_slo(tpot_s) for job in in_window)
    admitted = sum(job.admitted_s is not None for job in in_window)
    return within_slo / (end_s - start_s), within_slo / max(admitted, 1)
