"""The KV cache of one engine, as counts of blocks, with the beginnings of prompts that it still holds.

Problem: how many sequences fit, and how much of a prompt need not be computed, is decided by blocks; keeping each of a
hundred thousand blocks apart would cost more than the engine's steps.

Idea: blocks of one sequence are a number. Only chunks with a name are kept apart: how many use each, and, where none
does, in which order they were left. What is unused goes, the oldest first, when there is no room beside it. vLLM may
forget it a little earlier, where a free block without a name is the newer one.

A name stands for a chunk's content with all that comes before it. A trace names chunks of some hundred tokens of a
prompt (`hash_ids`). The HTTP engine simulator names single blocks by a hash of their tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from plimsoll.sim.engine.sequence import EngineSequence


class KvCache:
    """`total` blocks of `size` tokens. hash_block_tokens: tokens that one name stands for, whole blocks; 0: no names.

    vLLM names every full block; a trace's names allow less, so both are off by default. names_answers: what was
    generated has names too, when its sequence leaves. names_after_duplicate: a chunk of which another sequence holds a
    copy has no second name, but what follows it has one.
    """

    def __init__(
        self,
        total: int,
        size: int,
        hash_block_tokens: int = 0,
        *,
        names_answers: bool = False,
        names_after_duplicate: bool = False,
    ) -> None:
        self.total, self.size = total, size
        self._names_answers, self._names_after_duplicate = names_answers, names_after_duplicate
        self.free = total  # nobody uses them
        self._hash_block_tokens = hash_block_tokens - hash_block_tokens % size
        self._users: dict[int, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._lent_sequences: dict[int, EngineSequence] = {}

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.total - self.free

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
        """Room for at most `max_tokens` more tokens of a waiting sequence, cached ones among them; all or none."""
        cached = self._cached_prefix(sequence) if not sequence.computed_tokens else ()
        cached_tokens = len(cached) * self._hash_block_tokens
        until = min(
            sequence.prompt_tokens + sequence.scheduled_output, (sequence.computed_tokens or cached_tokens) + max_tokens
        )
        reused_blocks = sum(1 for name in cached if not self._users[name]) * (self._hash_block_tokens // self.size)
        missing = self.blocks_for(until) - cached_tokens // self.size - sequence.shared_blocks - sequence.own_blocks
        if missing + reused_blocks > self.free:
            return False
        if cached:
            self._share_prefix(sequence, cached)
            sequence.computed_tokens = cached_tokens
            if not sequence.admitted:
                sequence.cached_tokens = cached_tokens
        return self.grow(sequence, until)

    def register_computed(self, sequence: EngineSequence) -> None:
        """More of a prompt is computed: whole chunks of it are named, unless another sequence's are already."""
        if self._hash_block_tokens:
            self._register(sequence, min(sequence.computed_tokens, sequence.prompt_tokens))

    def release(self, sequence: EngineSequence) -> None:
        """A sequence needs its blocks no more; the end of a prompt is forgotten before its beginning."""
        if self._names_answers and self._hash_block_tokens:
            self._register(sequence, sequence.computed_tokens)
        self.free += sequence.own_blocks
        sequence.own_blocks = 0
        if sequence.shared_blocks:
            blocks = self._hash_block_tokens // self.size
            for name in reversed(sequence.held_names):
                self._users[name] -= 1
                if not self._users[name]:
                    self._evictable[name] = None
                    self.free += blocks
            sequence.held_names.clear()
            sequence.shared_blocks = 0

    def lend(self, sequence: EngineSequence) -> None:
        """Its blocks are kept for another engine."""
        self._lent_sequences[sequence.id] = sequence

    def reclaim(self, sequence_id: int) -> None:
        """That engine has them, or will never ask."""
        sequence = self._lent_sequences.pop(sequence_id, None)
        if sequence is not None:
            self.release(sequence)

    def _register(self, sequence: EngineSequence, tokens: int) -> None:
        """Names the whole chunks in a sequence's first `tokens` tokens."""
        blocks = self._hash_block_tokens // self.size
        names = sequence.block_names(tokens, self._hash_block_tokens)
        for name in names[len(sequence.held_names) :]:
            if name in self._users:
                if self._names_after_duplicate:
                    continue
                return
            self._users[name] = 1
            sequence.held_names.append(name)
            sequence.own_blocks -= blocks
            sequence.shared_blocks += blocks

    def _cached_prefix(self, sequence: EngineSequence) -> Sequence[int]:
        """Names of the prompt's beginning that are cached; its last token is computed in any case."""
        if not self._hash_block_tokens:
            return ()
        tokens, count = sequence.prompt_tokens + sequence.scheduled_output - 1, 0
        names = sequence.block_names(tokens, self._hash_block_tokens)
        for name in names:
            if name not in self._users:
                break
            count += 1
        return names[:count]

    def _share_prefix(self, sequence: EngineSequence, names: Sequence[int]) -> None:
        blocks = self._hash_block_tokens // self.size
        for name in names:
            if not self._users[name]:
                del self._evictable[name]
                self.free -= blocks
            self._users[name] += 1
        sequence.held_names = [*names]
        sequence.shared_blocks = len(names) * blocks

    def _evict(self) -> None:
        blocks = self._hash_block_tokens // self.size
        while self._evictable and len(self._evictable) * blocks > self.free:
            name, _ = self._evictable.popitem(last=False)
            del self._users[name]
