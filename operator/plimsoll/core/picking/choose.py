"""Filter, score, choose: the endpoint of a request, those to try next, and where its prompt is computed.

The answering endpoint comes first, by fewest requests in flight. Then a prefill endpoint, only of the same revision: KV
blocks of another one may come from other weights. So the spare endpoints of a request with remote prefill are of that
revision too; the decode engine prefills locally when it finds that it was not among those meant.

What an endpoint is changes seldom, its load with every request: `Standing` sorts out the former once and keeps the
loads in order, each of which tells of its moves. A pick takes the first ones, of however many.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from plimsoll.core.picking.endpoint import DOUBTFUL, PLACES, Endpoint, Load, Prompt, Role

BLOCK_TOKENS = 128  # `--block-size` of prefill and decode tiers: KV travels in whole blocks
SPARES = 2  # further endpoints named, for a proxy that tries three times in all

_IDLE = Load()

_NEVER: Final = 2 * DOUBTFUL


class Pick(NamedTuple):
    """Where a request goes. `spares` are tried in order if `endpoint` refuses; `prefill` None means locally."""

    endpoint: Endpoint
    spares: tuple[Endpoint, ...] = ()
    prefill: Endpoint | None = None


class _Rivals:
    """Live endpoints of one kind, in the order of their loads."""

    __slots__ = ("_loads", "_order", "endpoints", "one_revision", "place")

    def __init__(self, endpoints: Iterable[Endpoint], loads: Mapping[str, Load]) -> None:
        self.endpoints = list({e.address: e for e in endpoints if e.live}.values())
        self.place = {e.address: place for place, e in enumerate(self.endpoints)}
        self.one_revision = len({e.revision for e in self.endpoints}) <= 1
        self._loads = [loads.get(e.address) or Load() for e in self.endpoints]
        self._order: list[int] | None = None  # None: to be made anew

    def move(self, before: int, rank: int) -> None:
        """One of the loads is another one now."""
        order = self._order
        if order is not None:
            del order[bisect_left(order, before)]
            insort(order, rank)

    def lose(self) -> None:
        """One of the loads tells others of its moves from now on."""
        self._order = None

    def order(self) -> list[int]:
        """The ranks, the least first."""
        if self._order is None:
            for place, load in enumerate(self._loads):
                load.sit(self, place)
            self._order = sorted(load.rank for load in self._loads)
        return self._order

    def least(
        self, most: int, but: int | None = None, revision: str | None = None, beyond: int | None = None
    ) -> tuple[Endpoint, ...]:
        """The first of the order, as far as they are below `beyond`.

        but: the place of one that is not meant. revision: the one that is meant, None for any. beyond: None for
        doubtful ones only if all are.
        """
        taken: list[Endpoint] = []
        for rank in self.order():
            place = rank & PLACES
            endpoint = self.endpoints[place]
            if place == but or (revision is not None and endpoint.revision != revision):
                continue
            if beyond is None:
                beyond = DOUBTFUL if rank < DOUBTFUL else _NEVER
            if rank >= beyond or len(taken) == most:
                break
            taken.append(endpoint)
        return tuple(taken)

    def doubtful(self, place: int) -> bool:
        return self._loads[place].doubtful


class Standing:
    """The endpoints of one service, sorted out for many picks."""

    def __init__(self, endpoints: Sequence[Endpoint], loads: Mapping[str, Load]) -> None:
        """loads: by address, read at each pick; one that is missing here holds nothing for ever."""
        self._answering = _Rivals((e for e in endpoints if e.role is not Role.PREFILL and e.routable), loads)
        pairs = [e for e in endpoints if e.role is Role.PREFILL]
        self._prefills = {
            revision: _Rivals((e for e in pairs if e.revision == revision), loads)
            for revision in {e.revision for e in pairs if e.live}
        }

    def pick(self, prompt: Prompt) -> Pick | None:
        """The best use of the endpoints for a request; None if none can answer. Doubtful ones only if all are."""
        answering = self._answering
        if not answering.endpoints:
            return None
        best, *spares = answering.least(1 + SPARES)
        prefill = self.prefill(best, prompt)
        if prefill is None or answering.one_revision:
            return Pick(best, tuple(spares), prefill)
        place = answering.place[best.address]
        beyond = _NEVER if answering.doubtful(place) else DOUBTFUL
        return Pick(best, answering.least(SPARES, place, best.revision, beyond), prefill)

    def pick_at(self, address: str, prefill: str | None, prompt: Prompt) -> Pick | None:
        """As `pick`, for the endpoint at an address, with the prefill endpoint at another, or one that can be paired.

        prefill: None where the prompt is to be computed in place. Returns None if that endpoint cannot answer.
        """
        answering = self._answering
        place = answering.place.get(address)
        if place is None:
            return None
        best = answering.endpoints[place]
        leg = None if prefill is None else self.prefill(best, prompt, prefill)
        return Pick(best, answering.least(SPARES, place, None if leg is None else best.revision), leg)

    def prefill(self, decode: Endpoint, prompt: Prompt, wished: str | None = None) -> Endpoint | None:
        """The prefill endpoint that pays for this request, or None: less than a block has nothing to send.

        wished: the address of the one to take, where it can be.
        """
        if decode.role is not Role.DECODE or prompt.tokens < BLOCK_TOKENS or prompt.sequences != 1:
            return None
        rivals = self._prefills.get(decode.revision)
        if rivals is None:
            return None
        place = None if wished is None else rivals.place.get(wished)
        return rivals.endpoints[rivals.order()[0] & PLACES if place is None else place]


def eligible(endpoints: Iterable[Endpoint], loads: Mapping[str, Load]) -> list[Endpoint]:
    """Filter: ready, not ending, and without doubt; all live ones where every one of them is in doubt."""
    live = [e for e in endpoints if e.live]
    sure = [e for e in live if not loads.get(e.address, _IDLE).doubtful]
    return sure or live
