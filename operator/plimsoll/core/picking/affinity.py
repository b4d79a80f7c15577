"""Sending a prompt where its beginning is cached already, as far as that pays.

Problem: an engine that still holds the KV blocks of a prompt's beginning skips their prefill, but a router that only
follows the cache piles everything with one system prompt on one engine; and gateways that do not talk would each fill
another engine with the same conversation.

Idea: every choice is one sum in seconds, the work ahead of an endpoint plus the prefill that is left there, so that
load and cache are weighed by what they cost. What each endpoint holds is remembered from what was sent there, in an
LRU of the size of its cache. What other gateways sent is guessed: a conversation begins where prompts part, and the
hash of that block ranks the endpoints (rendezvous hashing, Thaler and Ravishankar 1998), alike at every gateway that
saw the same shared beginnings. The first in rank is believed, in part, to hold the whole prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise

SHARED = 4  # continuations from which on a block is a beginning that many share, such as a system prompt
MOST_BLOCKS = 512  # of a prompt that are hashed; what follows is nobody else's beginning


def block_hashes(prompt: bytes, block_bytes: int, most: int = MOST_BLOCKS) -> list[int]:
    """Chained 64-bit hashes of the prompt's whole blocks: each stands for its block and all before it.

    block_bytes: at least 1; a last block that is not full has no hash, since it is not cached as a block.
    """
    if block_bytes < 1:
        raise ValueError(f"block_bytes must be at least 1, not {block_bytes}")
    running = blake2b(digest_size=8)
    hashes = []
    for start in range(0, min(len(prompt) // block_bytes, most) * block_bytes, block_bytes):
        running.update(prompt[start : start + block_bytes])
        hashes.append(int.from_bytes(running.copy().digest()))
    return hashes


class Held:
    """What each endpoint is believed to hold: blocks by their chained hashes, the least recently used forgotten."""

    def __init__(self, capacity_blocks: int) -> None:
        """capacity_blocks: of one endpoint's cache, at least 1. Raises ValueError."""
        if capacity_blocks < 1:
            raise ValueError(f"capacity_blocks must be at least 1, not {capacity_blocks}")
        self._capacity = capacity_blocks
        self._blocks: dict[str, OrderedDict[int, None]] = {}
        self._next: OrderedDict[int, tuple[int, int]] = OrderedDict()  # block -> last continuation, times it changed

    def sent(self, address: str, blocks: Sequence[int]) -> None:
        """A prompt went there. Its beginning counts as used last, so that ends are forgotten before beginnings."""
        known = self._blocks.setdefault(address, OrderedDict())
        for block in reversed(blocks[: self._capacity]):
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._capacity:
            known.popitem(last=False)
        for block, after in pairwise(blocks):
            last, changes = self._next.get(block, (after, 1))
            self._next[block] = after, changes + (last != after)
            self._next.move_to_end(block)
        while len(self._next) > self._capacity * len(self._blocks):
            self._next.popitem(last=False)

    def own(self, blocks: Sequence[int]) -> int | None:
        """The block with which a prompt leaves what many share; None if it has no such block."""
        for block in blocks:
            if self._next.get(block, (0, 0))[1] < SHARED:
                return block
        return None

    def depth(self, address: str, blocks: Sequence[int]) -> int:
        """How many of the first blocks an endpoint holds."""
        known = self._blocks.get(address)
        if not known:
            return 0
        low, high = 0, len(blocks)
        while low < high:  # whoever holds a block holds those before it
            middle = (low + high) // 2
            if blocks[middle] in known:
                low = middle + 1
            else:
                high = middle
        return low

    def keep(self, addresses: set[str]) -> None:
        """Forget endpoints that are gone: one that comes back under the same address has an empty cache."""
        for address in self._blocks.keys() - addresses:
            del self._blocks[address]


def choose(
    held: Held,
    blocks: Sequence[int],
    ahead_s: Mapping[str, float],
    prefill_s: Callable[[int], float],
    elsewhere: float = 0.0,
) -> str:
    """The address that is expected to answer soonest.

    ahead_s: seconds of work before each endpoint; at least one. prefill_s: seconds to prefill the prompt when so many
    of its first blocks are cached. elsewhere: probability that another gateway sent the beginning of this prompt to the
    endpoint that ranks first; 0 for a gateway alone. Raises ValueError if there is no endpoint.
    """
    if not ahead_s:
        raise ValueError("ahead_s must name at least one endpoint")
    depths = {address: held.depth(address, blocks) for address in ahead_s}
    by_depth = {depth: prefill_s(depth) for depth in {*depths.values(), len(blocks)}}
    costs = {address: ahead_s[address] + by_depth[depths[address]] for address in ahead_s}
    own = held.own(blocks) if elsewhere else None
    if own is not None:
        first = max(costs, key=lambda address: _rank(own, address))
        costs[first] -= elsewhere * (by_depth[depths[first]] - by_depth[len(blocks)])
    return min(costs, key=lambda address: (costs[address], address))


def _rank(block: int, address: str) -> bytes:
    return blake2b(address.encode(), key=block.to_bytes(8), digest_size=8).digest()
