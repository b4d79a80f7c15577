"""What each endpoint is believed to hold of the prompts that were sent there, and where a new conversation is at home.

Problem: an engine that still holds the KV blocks of a prompt's beginning skips their prefill, but nobody tells a
gateway which blocks an engine holds, and gateways that do not talk would each fill another engine with the same
conversation.

Idea: what was sent to an endpoint is remembered in an LRU of the size of its cache; a block's hash stands for all
blocks before it, so that a lookup is a binary search. What other gateways sent is guessed: a conversation begins where
prompts part, and a ring of hashes (consistent hashing, Karger et al. 1997) gives the hash of that block an endpoint,
alike at every gateway that saw the same shared beginnings. What cache and load weigh is decided where both are known,
in `admission.fleet`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

SHARED: Final = 4  # continuations from which on a block is a beginning that many share, such as a system prompt
_POINTS: Final = 64  # of each endpoint on the ring
_SPARE: Final = 64  # chains that may be carried in vain before they are swept


@dataclass(slots=True, eq=False)
class Chain:
    """A prompt that was sent to an address. left: how many of its first blocks are still in memory."""

    address: str
    blocks: Sequence[int]
    left: int


class Recent:
    """Blocks of prompts, the least recently used forgotten, of one prompt its end before its beginning."""

    def __init__(self, capacity: int) -> None:
        """capacity: blocks, at least 1. Raises ValueError."""
        self._chains: deque[Chain] = deque()  # the one used last at the end
        self._live = 0  # how many chains were left by the last sweep
        self._of: dict[int, Chain] = {}  # the last chain that has the block
        self.resize(capacity)

    def __len__(self) -> int:
        return len(self._of)

    def resize(self, capacity: int) -> None:
        """From now on so many blocks, at least 1. Raises ValueError."""
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self._capacity = capacity
        self._forget()

    def use(self, address: str, blocks: Sequence[int]) -> None:
        """These were used: 64-bit hashes, each of its block and all before it; what exceeds the capacity is cut off.

        They are kept, not copied: not to be changed.
        """
        if len(blocks) > self._capacity:
            blocks = blocks[: self._capacity]
        chain = Chain(address, blocks, len(blocks))
        known = self._of
        for block in blocks:
            known[block] = chain
        self._chains.append(chain)
        if len(known) > self._capacity:
            self._forget()
        if len(self._chains) > 2 * self._live + _SPARE:
            self._chains = deque(c for c in self._chains if c.left and known.get(c.blocks[c.left - 1]) is c)
            self._live = len(self._chains)

    def depth(self, blocks: Sequence[int], most: int) -> int:
        """How many of the first `most` blocks are known."""
        known = self._of
        if not most or blocks[0] not in known:
            return 0
        if blocks[most - 1] in known:
            return most
        low, high = 1, most - 1
        while low < high:  # who has a block has those before it
            middle = (low + high) // 2
            if blocks[middle] in known:
                low = middle + 1
            else:
                high = middle
        return low

    def knows(self, blocks: Sequence[int], most: int) -> bool:
        """Whether all of the first `most` blocks are known."""
        return not most or blocks[most - 1] in self._of

    def last(self, block: int) -> str:
        """Where a known block was used last. Raises KeyError for an unknown one."""
        return self._of[block].address

    def _forget(self) -> None:
        """The oldest first. Where only the newest is left, all else is: what has no chain any more, of hashes that
        collided, goes with it."""
        known, chains, over = self._of, self._chains, len(self._of) - self._capacity
        while over > 0 and len(chains) > 1:
            chain = chains[0]
            while over > 0 and chain.left and known.get(chain.blocks[chain.left - 1]) is chain:
                chain.left -= 1  # its end first, and no more than are over
                del known[chain.blocks[chain.left]]
                over -= 1
            if over:  # nothing is left of it but what was used since
                chains.popleft()
        if over > 0:
            known.clear()
            for chain in chains:
                chain.left = min(chain.left, self._capacity)
                known.update(dict.fromkeys(chain.blocks[: chain.left], chain))


class Held:
    """What all endpoints of one kind are believed to hold."""

    def __init__(self) -> None:
        self._at: dict[str, Recent] = {}
        self._anywhere = Recent(1)
        self._shared = Recent(1)  # beginnings after which many prompts part
        self._parted: dict[int, int] = {}  # block -> continuations seen, the one changed last at the end
        self._ring: list[tuple[int, str]] = []
        self._places: list[int] = []  # of the ring, alone: numbers are found faster than pairs
        self._asked: Sequence[int] = ()  # whose depth was asked for last
        self._depth = 0  # of that, while nothing has changed

    def set_endpoints(self, capacities: Mapping[str, int]) -> None:
        """Those that are there, with the blocks that each holds of what is sent from here, at least 1 each.

        What is gone is forgotten: one that comes back under the same address has an empty cache. Raises ValueError.
        """
        self._asked, self._depth = (), 0
        if self._at.keys() != capacities.keys():
            kept = [point for point in self._ring if point[1] in capacities]
            self._ring = sorted(kept + [p for a in capacities if a not in self._at for p in _points(a)])
            self._places = [place for place, _ in self._ring]
            for address in self._at.keys() - capacities.keys():
                del self._at[address]
        for address, capacity in capacities.items():
            if address in self._at:
                self._at[address].resize(capacity)
            else:
                self._at[address] = Recent(capacity)
        for recent in (self._anywhere, self._shared):
            recent.resize(max(1, sum(capacities.values())))

    def sent(self, address: str, blocks: Sequence[int]) -> None:
        """A prompt went there. Raises KeyError for an unknown address, and nothing has changed."""
        there, depth = self._at[address], self.depth(blocks)
        if 0 < depth < len(blocks):
            self._part(address, blocks[:depth])
        there.use(address, blocks)
        self._anywhere.use(address, blocks)
        self._asked, self._depth = (), 0

    def depth(self, blocks: Sequence[int]) -> int:
        """How many of the first blocks some endpoint was sent lately."""
        if blocks is not self._asked:
            self._asked, self._depth = blocks, self._anywhere.depth(blocks, len(blocks))
        return self._depth

    def depth_at(self, address: str, blocks: Sequence[int], most: int) -> int:
        """How many of the first `most` blocks an endpoint holds. Raises KeyError for an unknown address."""
        return self._at[address].depth(blocks, most)

    def holder(self, blocks: Sequence[int], depth: int) -> str | None:
        """Who was sent the first `depth` blocks last, as `depth` gave it; None if that endpoint is gone."""
        address = self._anywhere.last(blocks[depth - 1])
        return address if address in self._at else None

    def home(self, blocks: Sequence[int], depth: int) -> str | None:
        """Where other gateways send a conversation that is new here; None if it is known, or no conversation's own.

        depth: as `depth` gave it.
        """
        if depth == len(blocks) or not self._ring or not self._shared.knows(blocks, depth):
            return None
        return self._ring[bisect_left(self._places, blocks[depth]) % len(self._ring)][1]

    def _part(self, address: str, beginning: Sequence[int]) -> None:
        """A prompt leaves what is known after this beginning."""
        count = self._parted.pop(beginning[-1], 1) + 1  # the first continuation was no parting
        self._parted[beginning[-1]] = count
        if count >= SHARED:
            self._shared.use(address, beginning)
        if len(self._parted) > max(len(self._anywhere), _SPARE):
            del self._parted[next(iter(self._parted))]


def _points(address: str) -> list[tuple[int, str]]:
    """An endpoint's places on the ring."""
    digests = (blake2b(b"%d %b" % (k, address.encode()), digest_size=8).digest() for k in range(_POINTS))
    return [(int.from_bytes(digest), address) for digest in digests]
