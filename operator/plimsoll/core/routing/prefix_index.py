"""The estimated prefix cache of each endpoint, and the hash home of new conversations.

Problem: an engine that holds the KV blocks of a prompt's prefix skips their prefill. But no engine reports its blocks
to a gateway, and independent gateways would send the same conversation to different engines.

Idea: an LRU of the size of the engine's cache records the prompts sent to each endpoint. A block's hash identifies all
blocks before it, so a lookup is a binary search. A gateway estimates what others sent: a conversation begins where
prompts diverge from a shared prefix. A hash ring (consistent hashing, Karger et al. 1997) maps that block's hash to an
endpoint. Every gateway that saw the same shared prefixes gets the same endpoint. `admission.placement` weighs cached
prefixes against load.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

MIN_SHARED_CONTINUATIONS: Final = 4  # continuations that make a block a shared prefix, such as a system prompt
_RING_POINTS: Final = 64  # points of each endpoint on the ring
_STALE_CHAINS_ALLOWED: Final = 64  # stale chains to keep before a sweep


@dataclass(slots=True, eq=False)
class PromptChain:
    """A prompt sent to an address. `remaining` counts its first blocks that are not evicted."""

    address: str
    block_hashes: Sequence[int]
    remaining: int


class RecentPrefixes:
    """An LRU of prompt blocks. It evicts the last blocks of a prompt before its first."""

    def __init__(self, capacity: int) -> None:
        """`capacity` is in blocks. Raises ValueError if it is below 1."""
        self._chains: deque[PromptChain] = deque()  # the most recently used last
        self._swept_chains = 0  # chains left after the last sweep
        self._chain_of: dict[int, PromptChain] = {}  # the last chain with the block
        self.resize(capacity)

    def __len__(self) -> int:
        return len(self._chain_of)

    def resize(self, capacity: int) -> None:
        """Set the capacity in blocks. Raises ValueError if it is below 1."""
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self._capacity = capacity
        self._evict()

    def use(self, address: str, block_hashes: Sequence[int]) -> None:
        """Record the use of a prompt's blocks, truncated to the capacity.

        Each 64-bit hash identifies its block and all blocks before it. The sequence is not copied: do not modify it.
        """
        if len(block_hashes) > self._capacity:
            block_hashes = block_hashes[: self._capacity]
        chain = PromptChain(address, block_hashes, len(block_hashes))
        chain_of = self._chain_of
        for block in block_hashes:
            chain_of[block] = chain
        self._chains.append(chain)
        if len(chain_of) > self._capacity:
            self._evict()
        if len(self._chains) > 2 * self._swept_chains + _STALE_CHAINS_ALLOWED:
            self._chains = deque(
                c for c in self._chains if c.remaining and chain_of.get(c.block_hashes[c.remaining - 1]) is c
            )
            self._swept_chains = len(self._chains)

    def match_depth(self, block_hashes: Sequence[int], max_depth: int) -> int:
        """Returns how many of the first `max_depth` blocks are known."""
        chain_of = self._chain_of
        if not max_depth or block_hashes[0] not in chain_of:
            return 0
        if block_hashes[max_depth - 1] in chain_of:
            return max_depth
        low, high = 1, max_depth - 1
        while low < high:  # a known block implies all blocks before it
            middle = (low + high) // 2
            if block_hashes[middle] in chain_of:
                low = middle + 1
            else:
                high = middle
        return low

    def contains(self, block_hashes: Sequence[int], max_depth: int) -> bool:
        """Whether all of the first `max_depth` blocks are known."""
        return not max_depth or block_hashes[max_depth - 1] in self._chain_of

    def last_address(self, block: int) -> str:
        """Returns the last address of a known block. Raises KeyError for an unknown block."""
        return self._chain_of[block].address

    def _evict(self) -> None:
        """Evict blocks of the oldest chains first.

        If only the newest chain is left and there are still too many blocks, drop all others: blocks of collided hashes
        without a chain.
        """
        chain_of, chains, excess = self._chain_of, self._chains, len(self._chain_of) - self._capacity
        while excess > 0 and len(chains) > 1:
            chain = chains[0]
            blocks = chain.block_hashes[max(0, chain.remaining - excess) : chain.remaining]
            for block in reversed(blocks):  # last blocks first, and no more than necessary
                owner = chain_of.pop(block, None)
                if owner is not chain:
                    if owner is not None:
                        chain_of[block] = owner
                    break
                chain.remaining -= 1
                excess -= 1
            if excess:  # its other blocks belong to newer chains
                chains.popleft()
        if excess > 0:
            chain_of.clear()
            for chain in chains:
                chain.remaining = min(chain.remaining, self._capacity)
                chain_of.update(dict.fromkeys(chain.block_hashes[: chain.remaining], chain))


class PrefixIndex:
    """The estimated prefix caches of all endpoints of one kind."""

    def __init__(self) -> None:
        self._by_endpoint: dict[str, RecentPrefixes] = {}
        self._all_endpoints = RecentPrefixes(1)
        self._shared_prefixes = RecentPrefixes(1)  # prefixes after which many prompts diverge
        self._continuations: dict[int, int] = {}  # block -> continuations seen, the last changed last
        self._ring: list[tuple[int, str]] = []
        self._ring_positions: list[int] = []  # positions of `_ring` alone, for a faster bisect
        self._memo_hashes: Sequence[int] = ()  # the hashes of the last `match_depth`
        self._memo_depth = 0  # its result, reset by each change

    def set_endpoints(self, capacities: Mapping[str, int]) -> None:
        """Set the endpoints with the cache capacity, in blocks, for prompts from this gateway.

        The cache of a removed endpoint is dropped. Raises ValueError for a capacity below 1.
        """
        self._memo_hashes, self._memo_depth = (), 0
        if self._by_endpoint.keys() != capacities.keys():
            points = [point for point in self._ring if point[1] in capacities]
            self._ring = sorted(points + [p for a in capacities if a not in self._by_endpoint for p in _ring_points(a)])
            self._ring_positions = [position for position, _ in self._ring]
            for address in self._by_endpoint.keys() - capacities.keys():
                del self._by_endpoint[address]
        for address, capacity in capacities.items():
            if address in self._by_endpoint:
                self._by_endpoint[address].resize(capacity)
            else:
                self._by_endpoint[address] = RecentPrefixes(capacity)
        for cache in (self._all_endpoints, self._shared_prefixes):
            cache.resize(max(1, sum(capacities.values())))

    def record(self, address: str, block_hashes: Sequence[int]) -> None:
        """Record a prompt sent to an address. Raises KeyError for an unknown address, without a change."""
        cache, depth = self._by_endpoint[address], self.match_depth(block_hashes)
        if 0 < depth < len(block_hashes):
            self._count_continuation(address, block_hashes[:depth])
        cache.use(address, block_hashes)
        self._all_endpoints.use(address, block_hashes)
        self._memo_hashes, self._memo_depth = (), 0

    def match_depth(self, block_hashes: Sequence[int]) -> int:
        """Returns how many of the first blocks some endpoint recently received."""
        if block_hashes is not self._memo_hashes:
            self._memo_hashes, self._memo_depth = (
                block_hashes,
                self._all_endpoints.match_depth(block_hashes, len(block_hashes)),
            )
        return self._memo_depth

    def match_depth_at(self, address: str, block_hashes: Sequence[int], max_depth: int) -> int:
        """Returns how many of the first `max_depth` blocks an endpoint holds. Raises KeyError for an unknown one."""
        return self._by_endpoint[address].match_depth(block_hashes, max_depth)

    def cached_on(self, block_hashes: Sequence[int], depth: int) -> str | None:
        """Returns the endpoint that last received the first `depth` blocks, or None if it is removed.

        `depth` is the result of `match_depth` and above 0.
        """
        address = self._all_endpoints.last_address(block_hashes[depth - 1])
        return address if address in self._by_endpoint else None

    def hash_home(self, block_hashes: Sequence[int], depth: int) -> str | None:
        """Returns the endpoint to which other gateways send a conversation that is new here.

        `depth` is the result of `match_depth`. Returns None if the prompt is known or its known part is not a shared
        prefix.
        """
        if depth == len(block_hashes) or not self._ring or not self._shared_prefixes.contains(block_hashes, depth):
            return None
        return self._ring[bisect_left(self._ring_positions, block_hashes[depth]) % len(self._ring)][1]

    def _count_continuation(self, address: str, prefix: Sequence[int]) -> None:
        """Count a prompt that diverges from the known ones after this prefix."""
        count = self._continuations.pop(prefix[-1], 1) + 1  # the first continuation did not diverge
        self._continuations[prefix[-1]] = count
        if count >= MIN_SHARED_CONTINUATIONS:
            self._shared_prefixes.use(address, prefix)
        if len(self._continuations) > max(len(self._all_endpoints), _STALE_CHAINS_ALLOWED):
            del self._continuations[next(iter(self._continuations))]


def _ring_points(address: str) -> list[tuple[int, str]]:
    """Returns an endpoint's points on the ring."""
    digests = (blake2b(b"%d %b" % (k, address.encode()), digest_size=8).digest() for k in range(_RING_POINTS))
    return [(int.from_bytes(digest), address) for digest in digests]
