"""The KV cache: blocks that sequences hold, and blocks that still hold what a later prompt may begin with.

Problem: how many sequences fit, and how much of a prompt need not be computed, is decided by blocks, not by tokens.
Idea: vLLM's: a block in use counts its users; one without users waits in a queue, keeping its content until its turn
comes to be used anew. The queue is a doubly linked list in two arrays, so that taking a block out of the middle (a
prefix hit) costs nothing and 50,000 blocks take two megabytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


class BlockPool:
    """`total` blocks with the numbers 1..total; a content's hash is a number other than 0."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self._users = array("I", bytes(4 * (total + 1)))
        self._content_hashes = array("q", bytes(8 * (total + 1)))
        self._block_by_content: dict[int, int] = {}
        # number 0 is the queue's both ends
        self._next = array("i", [*range(1, total + 1), 0])
        self._previous = array("i", [total, *range(total)])

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.total - self.free

    def cached_prefix(self, contents: Iterable[int]) -> list[int]:
        """The blocks that hold the longest known beginning of these contents, in order."""
        cached_blocks = []
        for content in contents:
            block = self._block_by_content.get(content)
            if block is None:
                break
            cached_blocks.append(block)
        return cached_blocks

    def count_unused(self, blocks: Iterable[int]) -> int:
        """How many of the blocks nobody holds: taking them leaves so many fewer to allocate."""
        return sum(not self._users[block] for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """One more user for each block."""
        for block in blocks:
            if not self._users[block]:
                self._unlink(block)
            self._users[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """So many blocks for one user, what they held forgotten; None if there are not as many."""
        if count > self.free:
            return None
        blocks = []
        for _ in range(count):
            block = self._next[0]
            self._unlink(block)
            self._users[block] = 1
            if content := self._content_hashes[block]:
                del self._block_by_content[content]
                self._content_hashes[block] = 0
            blocks.append(block)
        return blocks

    def register(self, block: int, content: int) -> None:
        """Says what a block holds; where another block holds the same, that one stays the known one."""
        if self._block_by_content.setdefault(content, block) == block:
            self._content_hashes[block] = content

    def release(self, blocks: Sequence[int]) -> None:
        """One user less for each block; the end of a prompt is forgotten before its beginning."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._append(block)

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self.free -= 1

    def _append(self, block: int) -> None:
        tail = self._previous[0]
        self._next[tail], self._previous[block] = block, tail
        self._next[block], self._previous[0] = 0, block
        self.free += 1
