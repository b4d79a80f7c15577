"""A small discrete-event simulator for admission: engines that step, clients that return, gates and plain caps."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

import numpy as np

from plimsoll.core.admission.controller import AdmissionController
from plimsoll.core.admission.request import AdmissionDecision, AdmissionOutcome, AdmissionRequest
from plimsoll.core.capacity.tier_model import HTTP_OVERHEAD_S
from plimsoll.core.engine_model.step_time import StepModel
from tests.core.admission_engine import ClientRequest, StepEngine


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

    def __init__(self, policy: Policy, engines: list[StepEngine], retry: Retry, until_s: float) -> None:
        self.policy, self.engines, self.retry, self.until_s = policy, engines, retry, until_s
        self.events: list[tuple[float, int, str, int, ClientRequest | None]] = []
        self.number = 0
        self.undecided: list[ClientRequest] = []
        self.woken = float("inf")

    def push(self, at: float, kind: str, index: int = 0, job: ClientRequest | None = None) -> None:
        self.number += 1
        heapq.heappush(self.events, (at, self.number, kind, index, job))

    def run(self) -> None:
        while self.events and self.events[0][0] <= self.until_s:
            now, _, kind, index, job = heapq.heappop(self.events)
            getattr(self, kind)(now, index, job)
            if self.undecided:
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
        next_s = min(self.events[0][0], self.until_s)  # the ticks go on, so there is a next event
        while not done and engine.ends_at is not None and engine.ends_at < next_s:
            now = engine.ends_at
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
    simulation = _Simulation(policy, engines, retry, until_s)
    for k, at in enumerate(sorted(ready_s or [0.0] * len(engines)), start=1):
        simulation.push(at, "ready", k)
    for job in jobs:
        simulation.push(job.arrived_s, "offer", job=job)
    simulation.push(0.0, "tick")
    simulation.run()


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
