"""Engines of the admission simulator, and the requests that they serve.

Engines schedule as vLLM does: decodes first, then prompts in order of arrival within the token budget, one step
composed while another runs, the newest preempted and computed again where KV runs out. Their step model is the plant's.
They can keep the blocks of prompts, the least recently used of which go when KV is needed.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from plimsoll.core.admission.request import AdmissionOutcome
from plimsoll.core.capacity.tier_model import HTTP_OVERHEAD_PER_TOKEN_S, HTTP_OVERHEAD_S
from plimsoll.core.engine_model.step_time import EngineLimits, StepModel
from plimsoll.core.types import KV_BLOCK_TOKENS


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
        self.noise: list[float] = []  # factors of the next steps' times, the last one first
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
            self.cache.use(job.blocks, (self.limits.kv_tokens - answers) // KV_BLOCK_TOKENS)

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
        tokens, pairs = self._prefill(step, self.limits.token_budget - n) if self.waiting else (0, 0.0)
        if not n and not tokens:
            return None
        m = self.model
        seconds = m.base_s + (m.any_prefill_s if tokens else 0.0) + m.prefill_token_s * tokens
        seconds += m.prefill_pair_s * pairs + m.sequence_s * n + m.cached_token_s * self.cached
        step.seconds = seconds * self._noise()
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

    def _noise(self) -> float:
        """A factor of one step's time. Drawn in blocks: a call of NumPy costs more than the rest of a step."""
        if self.rng is None:
            return 1.0
        if not self.noise:
            self.noise = np.exp(0.03 * self.rng.standard_normal(256)).tolist()[::-1]
        return self.noise.pop()

    def _prefill(self, step: _Step, budget: int) -> tuple[int, float]:
        tokens, pairs, room = 0, 0.0, self.limits.kv_tokens - self.cached
        slots = self.limits.max_sequences - len(self.running)
        while self.waiting and budget > 0 and slots > 0:
            job = self.waiting[0]
            if job.context + 1 > room:
                break
            if self.cache is not None and not self.partial:
                self.partial = min(KV_BLOCK_TOKENS * self.cache.hits(job.blocks), job.context - 1)
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
