"""The KV cache of one engine, as counts of blocks, with the cached prefixes of prompts.

Problem: blocks decide how many sequences fit, and how much of a prompt need not be computed. Representing each of a
hundred thousand blocks would cost more than the engine's steps.

Idea: the blocks of a sequence are a number. Only hashed chunks are represented: how many sequences use each, and the
order in which unused ones were released. Unused chunks are evicted, the oldest first, when there is no free block. vLLM
may evict one slightly earlier, if a free block without a hash is the newer one.

A hash identifies a chunk's content with everything before it. A trace has hashes for chunks of some hundred tokens of a
prompt (`hash_ids`). The HTTP engine simulator hashes single blocks by their tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from plimsoll.sim.engine.sequence import EngineSequence


class KvCache:
    """`total` blocks of `size` tokens. hash_block_tokens: tokens of a hashed chunk, whole blocks; 0: no hashes.

    vLLM hashes every full block; a trace has fewer hashes, so both options are off by default. names_answers: generated
    tokens are hashed too, when their sequence ends. names_after_duplicate: a chunk that another sequence holds as a
    copy gets no second hash, but the chunks after it do.
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
        self.free = total  # unused
        self._hash_block_tokens = hash_block_tokens - hash_block_tokens % size
        self._users: dict[int, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._lent_sequences: dict[int, EngineSequence] = {}

    @property
    def used(self) -> int:
        """Blocks in use."""
        return self.total - self.free

    @property
    def used_share(self) -> float:
        """Share of the cache in use."""
        return 1.0 - self.free / self.total

    @property
    def is_lending(self) -> bool:
        """Whether blocks are held for another engine."""
        return bool(self._lent_sequences)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def allocate(self, count: int) -> None:
        """Allocate `count` blocks, which must be available."""
        self.free -= count
        if self._evictable:
            self._evict()

    def grow(self, sequence: EngineSequence, tokens: int) -> bool:
        """Allocate blocks for `tokens` tokens of a sequence. Returns False if there are too few."""
        missing = self.blocks_for(tokens) - sequence.shared_blocks - sequence.own_blocks
        if missing > self.free:
            return False
        if missing > 0:
            sequence.own_blocks += missing
            self.allocate(missing)
        return True

    def allocate_next(self, sequence: EngineSequence, max_tokens: int) -> bool:
        """Allocate blocks for at most `max_tokens` more tokens of a waiting sequence, cached ones included; all or
        none.
        """
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
        """Hash the whole computed chunks of a prompt, unless another sequence has done so."""
        if self._hash_block_tokens:
            self._register(sequence, min(sequence.computed_tokens, sequence.prompt_tokens))

    def release(self, sequence: EngineSequence) -> None:
        """Release the blocks of a sequence; the end of a prompt is evicted before its beginning."""
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
        """Hold the blocks of a sequence for another engine."""
        self._lent_sequences[sequence.id] = sequence

    def reclaim(self, sequence_id: int) -> None:
        """Release blocks that the other engine has fetched, or will never fetch."""
        sequence = self._lent_sequences.pop(sequence_id, None)
        if sequence is not None:
            self.release(sequence)

    def _register(self, sequence: EngineSequence, tokens: int) -> None:
        """Hash the whole chunks in a sequence's first `tokens` tokens."""
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
        """Return the hashes of the cached prefix of the prompt; its last token is computed in any case."""
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
