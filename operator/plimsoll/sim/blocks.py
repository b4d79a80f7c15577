"""The KV cache of one engine, as counts of blocks, with the beginnings of prompts that it still holds.

Problem: how many sequences fit, and how much of a prompt need not be computed, is decided by blocks; keeping each of a
hundred thousand blocks apart would cost more than the engine's steps.

Idea: blocks of one sequence are a number. Only what a trace names (`hash_ids`, each some hundred tokens of a prompt) is
kept apart: who uses it, and, where nobody does, since when. What nobody uses goes, the oldest first, when there is no
room beside it; vLLM may forget it a little earlier, where a free block without a name is the newer one.
"""

from __future__ import annotations

from collections import OrderedDict

from plimsoll.sim.job import Job


class Blocks:
    """`total` blocks of `size` tokens. chunk: tokens that one name stands for, whole blocks; 0 without names."""

    def __init__(self, total: int, size: int, chunk: int = 0) -> None:
        self.total, self.size = total, size
        self.free = total  # nobody uses them
        self._chunk = chunk - chunk % size
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._lent: dict[int, Job] = {}

    @property
    def used(self) -> float:
        """Share of the cache that somebody holds."""
        return 1.0 - self.free / self.total

    @property
    def lent(self) -> bool:
        """Whether anything is kept for another engine."""
        return bool(self._lent)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def take(self, count: int) -> None:
        """So many are used from now on; there must be as many."""
        self.free -= count
        if self._idle:
            self._forget()

    def grow(self, job: Job, tokens: int) -> bool:
        """Room for so many of a sequence's tokens; False if there is none."""
        missing = self.needed(tokens) - job.shared - job.blocks
        if missing > self.free:
            return False
        if missing > 0:
            job.blocks += missing
            self.take(missing)
        return True

    def place(self, job: Job, most: int) -> bool:
        """Room for the next `most` tokens of a waiting sequence, those that are cached among them; all or none."""
        known = self._known(job) if not job.computed else 0
        held = known * self._chunk
        until = min(job.prompt + job.made, (job.computed or held) + most)
        waking = sum(1 for name in job.ids[:known] if not self._users[name]) * (self._chunk // self.size)
        missing = self.needed(until) - held // self.size - job.shared - job.blocks
        if missing + waking > self.free:
            return False
        if known:
            self._share(job, known)
            job.computed = held
            if not job.admitted:
                job.cached = held
        return self.grow(job, until)

    def computed(self, job: Job) -> None:
        """More of a prompt is computed: whole chunks of it are named, unless another sequence's are already."""
        if not self._chunk or not job.ids:
            return
        blocks = self._chunk // self.size
        whole = min(len(job.ids), min(job.computed, job.prompt) // self._chunk)
        first = job.shared // blocks
        for name in job.ids[first:whole]:
            if name in self._users:
                return
            self._users[name] = 1
            job.blocks -= blocks
            job.shared += blocks

    def release(self, job: Job) -> None:
        """A sequence needs its blocks no more; the end of a prompt is forgotten before its beginning."""
        self.free += job.blocks
        job.blocks = 0
        if job.shared:
            blocks = self._chunk // self.size
            for name in reversed(job.ids[: job.shared // blocks]):
                self._users[name] -= 1
                if not self._users[name]:
                    self._idle[name] = None
                    self.free += blocks
            job.shared = 0

    def lend(self, job: Job) -> None:
        """Its blocks are kept for another engine."""
        self._lent[job.name] = job

    def returned(self, name: int) -> None:
        """That engine has them, or will never ask."""
        job = self._lent.pop(name, None)
        if job is not None:
            self.release(job)

    def _known(self, job: Job) -> int:
        """Names of the prompt's beginning that are cached; its last token is computed in any case."""
        if not self._chunk:
            return 0
        most, known = (job.prompt + job.made - 1) // self._chunk, 0
        for name in job.ids[:most]:
            if name not in self._users:
                break
            known += 1
        return known

    def _share(self, job: Job, known: int) -> None:
        blocks = self._chunk // self.size
        for name in job.ids[:known]:
            if not self._users[name]:
                del self._idle[name]
                self.free -= blocks
            self._users[name] += 1
        job.shared = known * blocks

    def _forget(self) -> None:
        blocks = self._chunk // self.size
        while self._idle and len(self._idle) * blocks > self.free:
            name, _ = self._idle.popitem(last=False)
            del self._users[name]
