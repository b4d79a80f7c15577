"""Engines that do not answer the operator, as a store of metrics tells of them that scrapes them.

Problem: where a policy or a mesh lets nobody but Prometheus at the engines' ports, their work is known, but not here,
and nothing is given back.

Idea: the store is asked for those engines alone that are ready and have not answered twice, for all of a namespace at
once and no sooner than after the last answer. What it says is a reading like any other, as old as its scrape. Who
answers again is heard directly.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from plimsoll.controllers.store import Key
from plimsoll.core.errors import Unavailable
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.ports import EngineReading

log = logging.getLogger(__name__)

ASK_S: Final = 3.0  # between an answer and the next question: a scrape every five seconds is found within eight


class Told(Protocol):
    """A store that scrapes engines. Blocks."""

    def engines(self, namespace: str, pods: Sequence[str]) -> Sequence[EngineReading]:
        """Those it knows of, each dated by its scrape. Raises Unavailable."""
        ...


class SecondHand:
    """Asks a store for engines that are not heard."""

    def __init__(
        self,
        told: Told | None,
        unheard: Callable[[], Mapping[str, tuple[Key, Role]]],
        take: Callable[[EngineReading], None],
    ) -> None:
        """told: None where there is none, and nobody is asked. unheard: service and tier of engines that do not answer,
        by their pods' names. take: given each reading."""
        self._told = told
        self._unheard = unheard
        self._take = take
        self._tiers: dict[Key, tuple[str, ...]] = {}
        self._known = True  # whether the store has answered last

    def tiers(self, service: Key) -> tuple[str, ...]:
        """Tiers of which some engine is known in this way alone, by name."""
        return self._tiers.get(service, ())

    async def run(self) -> None:
        """Ask until cancelled."""
        while self._told is not None:
            await self.ask()
            await asyncio.sleep(ASK_S)

    async def ask(self) -> None:
        """Ask for all who are not heard now."""
        unheard = self._unheard()
        namespaces: defaultdict[str, list[str]] = defaultdict(list)
        for pod, ((namespace, _), _role) in sorted(unheard.items()):
            namespaces[namespace].append(pod)
        found: defaultdict[Key, set[str]] = defaultdict(set)
        for namespace, pods in namespaces.items():
            for reading in await self._ask(namespace, pods):
                if reading.pod in unheard:
                    key, role = unheard[reading.pod]
                    found[key].add(role)
                    self._take(reading)
        self._tiers = {key: tuple(sorted(tiers)) for key, tiers in found.items()}

    async def _ask(self, namespace: str, pods: Sequence[str]) -> Sequence[EngineReading]:
        assert self._told is not None
        try:
            found = await asyncio.to_thread(self._told.engines, namespace, pods)
        except Unavailable as error:
            if self._known:  # told once, and again when it has answered meanwhile
                log.warning("engines that do not answer are not known", extra={"error": str(error)})
            self._known = False
            return ()
        self._known = True
        return found
