"""The KV cache of one engine, as counts of blocks, with the beginnings of prompts that it still holds.

Problem: how many sequences fit, and how much of a prompt need not be computed, is decided by blocks; keeping each of a
hundred thousand blocks apart would cost more than the engine's steps.

Idea: blocks of one sequence are a number. Only what a trace names (`hash_ids`, each some hundred tokens of a prompt) is
kept apart: who uses it, and, where nobody does, since when. What nobody uses goes, the oldest first, when there is no
room beside it; vLLM may forget it a little earlier, where a free block without a name is the newer one.
"""

from __future__ import annotations

from collections import OrderedDict

from plimsoll.sim.sequence import EngineSequence


class KvCache:
    """`total` blocks of `size` tokens. chunk: tokens that one name stands for, whole blocks; 0 without names."""

    def __init__(self, total: int, size: int, hash_block_tokens: int = 0) -> None:
        self.total, self.size = total, size
        self.free = total  # nobody uses them
        self._hash_block_tokens = hash_block_tokens - hash_block_tokens % size
        self._users: dict[int, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._lent_sequences: dict[int, EngineSequence] = {}

    @property
    def used_share(self) -> float:
        """Share of the cache that somebody holds."""
        return 1.0 - self.free / self.total

    @property
    def is_lending(self) -> bool:
        """Whether anything is kept for another engine."""
        return bool(self._lent_sequences)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def allocate(self, count: int) -> None:
        """So many are used from now on; there must be as many."""
        self.free -= count
        if self._evictable:
            self._evict()

    def grow(self, sequence: EngineSequence, tokens: int) -> bool:
        """Room for so many of a sequence's tokens; False if there is none."""
        missing = self.blocks_for(tokens) - sequence.shared_blocks - sequence.own_blocks
        if missing > self.free:
            return False
        if missing > 0:
            sequence.own_blocks += missing
            self.allocate(missing)
        return True

    def allocate_next(self, sequence: EngineSequence, max_tokens: int) -> bool:
        """Room for the next `most` tokens of a waiting sequence, those that are cached among them; all or none."""
        cached_names = self._cached_prefix(sequence) if not sequence.computed_tokens else 0
        cached_tokens = cached_names * self._hash_block_tokens
        until = min(
            sequence.prompt_tokens + sequence.scheduled_output, (sequence.computed_tokens or cached_tokens) + max_tokens
        )
        reused_blocks = sum(1 for name in sequence.block_ids[:cached_names] if not self._users[name]) * (
            self._hash_block_tokens // self.size
        )
        missing = self.blocks_for(until) - cached_tokens // self.size - sequence.shared_blocks - sequence.own_blocks
        if missing + reused_blocks > self.free:
            return False
        if cached_names:
            self._share_prefix(sequence, cached_names)
            sequence.computed_tokens = cached_tokens
            if not sequence.admitted:
                sequence.cached_tokens = cached_tokens
        return self.grow(sequence, until)

    def register_computed(self, sequence: EngineSequence) -> None:
        """More of a prompt is computed: whole chunks of it are named, unless another sequence's are already."""
        if not self._hash_block_tokens or not sequence.block_ids:
            return
        blocks = self._hash_block_tokens // self.size
        complete_names = min(
            len(sequence.block_ids), min(sequence.computed_tokens, sequence.prompt_tokens) // self._hash_block_tokens
        )
        first = sequence.shared_blocks // blocks
        for name in sequence.block_ids[first:complete_names]:
            if name in self._users:
                return
            self._users[name] = 1
            sequence.own_blocks -= blocks
            sequence.shared_blocks += blocks

    def release(self, sequence: EngineSequence) -> None:
        """A sequence needs its blocks no more; the end of a prompt is forgotten before its beginning."""
        self.free += sequence.own_blocks
        sequence.own_blocks = 0
        if sequence.shared_blocks:
            blocks = self._hash_block_tokens // self.size
            for name in reversed(sequence.block_ids[: sequence.shared_blocks // blocks]):
                self._users[name] -= 1
                if not self._users[name]:
                    self._evictable[name] = None
                    self.free += blocks
            sequence.shared_blocks = 0

    def lend(self, sequence: EngineSequence) -> None:
        """Its blocks are kept for another engine."""
        self._lent_sequences[sequence.id] = sequence

    def reclaim(self, sequence_id: int) -> None:
        """That engine has them, or will never ask."""
        sequence = self._lent_sequences.pop(sequence_id, None)
        if sequence is not None:
            self.release(sequence)

    def _cached_prefix(self, sequence: EngineSequence) -> int:
        """Names of the prompt's beginning that are cached; its last token is computed in any case."""
        if not self._hash_block_tokens:
            return 0
        max_names, cached_names = (sequence.prompt_tokens + sequence.scheduled_output - 1) // self._hash_block_tokens, 0
        for name in sequence.block_ids[:max_names]:
            if name not in self._users:
                break
            cached_names += 1
        return cached_names

    def _share_prefix(self, sequence: EngineSequence, cached_names: int) -> None:
        blocks = self._hash_block_tokens // self.size
        for name in sequence.block_ids[:cached_names]:
            if not self._users[name]:
                del self._evictable[name]
                self.free -= blocks
            self._users[name] += 1
        sequence.shared_blocks = cached_names * blocks

    def _evict(self) -> None:
        blocks = self._hash_block_tokens // self.size
        while self._evictable and len(self._evictable) * blocks > self.free:
            name, _ = self._evictable.popitem(last=False)
            del self._users[name]
