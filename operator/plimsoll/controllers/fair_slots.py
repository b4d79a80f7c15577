"""Slots for concurrent work that are shared fairly between namespaces, and between nodes.

Problem: a poll of an engine that accepts and never answers takes its slot for seconds. With one queue for all, hundreds
of such engines of one team, or of a lost zone, would delay the polls of every other service until its signals expire.

Idea: a free slot goes to the waiting poll whose namespace has the fewest slots, then to that whose node has the fewest.
Equal ones take turns: otherwise, of many that always wait, those that came first would get every slot.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple, TypeAlias

_Waiting: TypeAlias = "deque[asyncio.Future[None]]"


class Group(NamedTuple):
    """Who uses a slot."""

    namespace: str
    node: str


class FairSlots:
    """At most `size` holders at once."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._by_namespace: Counter[str] = Counter()
        self._by_node: Counter[str] = Counter()
        # By namespace and node. Whoever has just got a slot is the last.
        self._waiting: dict[str, dict[str, _Waiting]] = {}

    @property
    def waiting(self) -> int:
        """How many wait for a slot."""
        return sum(len(queue) for nodes in self._waiting.values() for queue in nodes.values())

    @asynccontextmanager
    async def of(self, group: Group) -> AsyncIterator[None]:
        """Hold a slot for the group."""
        await self._acquire(group)
        try:
            yield
        finally:
            self._release(group)

    async def _acquire(self, group: Group) -> None:
        if self._free > 0:  # then nobody waits
            self._free -= 1
            self._count(group, 1)
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(group.namespace, {}).setdefault(group.node, deque()).append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():  # it was granted in the same instant
                self._release(group)
            raise

    def _release(self, group: Group) -> None:
        self._count(group, -1)
        while self._waiting:
            following, granted = self._take_next()
            if not granted.done():  # else its holder was cancelled
                self._count(following, 1)
                granted.set_result(None)
                return
        self._free += 1

    def _take_next(self) -> tuple[Group, asyncio.Future[None]]:
        """Remove who is next, and let its namespace and node wait behind the others."""
        namespace = min(self._waiting, key=lambda one: (self._by_namespace[one], self._fewest(self._waiting[one])))
        nodes = self._waiting.pop(namespace)
        node = min(nodes, key=self._by_node.__getitem__)
        queue = nodes.pop(node)
        granted = queue.popleft()
        if queue:
            nodes[node] = queue
        if nodes:
            self._waiting[namespace] = nodes
        return Group(namespace, node), granted

    def _fewest(self, nodes: Iterable[str]) -> int:
        return min(map(self._by_node.__getitem__, nodes))

    def _count(self, group: Group, change: int) -> None:
        for counts, name in ((self._by_namespace, group.namespace), (self._by_node, group.node)):
            counts[name] += change
            if not counts[name]:
                del counts[name]


class GroupBound:
    """At most so many members of each group at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._members: Counter[Group] = Counter()

    def enter(self, group: Group) -> Callable[[], None] | None:
        """Add a member. Returns what takes it away again, None if the group is full."""
        if self._members[group] >= self._most:
            return None
        self._members[group] += 1
        return partial(self._leave, group)

    def _leave(self, group: Group) -> None:
        self._members[group] -= 1
        if not self._members[group]:
            del self._members[group]
