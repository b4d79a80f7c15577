"""Filter, score, choose: the endpoint of a request, those to try next, and where its prompt is computed.

The answering endpoint comes first, by fewest requests in flight. Then a prefill endpoint, only of the same revision: KV
blocks of another one may come from other weights. So the spare endpoints of a request with remote prefill are of that
revision too; the decode engine prefills locally when it finds that it was not among those meant.

What an endpoint is changes seldom, its load with every request: `Standing` sorts out the former once, so that a pick
reads one number of each load and takes the least. At 128 endpoints that is less than a tenth of what sorting them took.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from plimsoll.core.picking.endpoint import DOUBTFUL, Endpoint, Load, Prompt, Role

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
    """Live endpoints of one kind, with their loads."""

    __slots__ = ("endpoints", "loads", "one_revision", "place")

    def __init__(self, endpoints: Iterable[Endpoint], loads: Mapping[str, Load]) -> None:
        self.endpoints = [e for e in endpoints if e.live]
        self.loads = [loads.get(e.address, _IDLE) for e in self.endpoints]
        self.place = {e.address: place for place, e in enumerate(self.endpoints)}
        self.one_revision = len({e.revision for e in self.endpoints}) <= 1

    def keys(self) -> list[int]:
        """What the loads come to now, in order."""
        return [load.rank for load in self.loads]

    def only(self, revision: str, keys: list[int]) -> list[int]:
        """The same, those of other revisions left out."""
        if self.one_revision:
            return keys
        return [key if e.revision == revision else _NEVER for e, key in zip(self.endpoints, keys, strict=True)]

    def take(self, keys: list[int], most: int, beyond: int | None = None) -> tuple[Endpoint, ...]:
        """The least, in order, as far as they are below `beyond`; they are taken out of the keys.

        beyond: None for doubtful ones only if all are.
        """
        taken: list[Endpoint] = []
        while len(taken) < most:
            least = min(keys)
            if beyond is None:
                beyond = DOUBTFUL if least < DOUBTFUL else _NEVER
            if least >= beyond:
                break
            place = keys.index(least)
            keys[place] = _NEVER
            taken.append(self.endpoints[place])
        return tuple(taken)


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
        best, *spares = answering.take(answering.keys(), 1 + SPARES)
        prefill = self.prefill(best, prompt)
        if prefill is None or answering.one_revision:
            return Pick(best, tuple(spares), prefill)
        place = answering.place[best.address]
        others = answering.only(best.revision, answering.keys())
        others[place] = _NEVER
        beyond = DOUBTFUL if answering.loads[place].rank < DOUBTFUL else _NEVER
        return Pick(best, answering.take(others, SPARES, beyond), prefill)

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
        keys = answering.keys()
        if leg is not None:
            keys = answering.only(best.revision, keys)
        keys[place] = _NEVER
        return Pick(best, answering.take(keys, SPARES), leg)

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
        if place is None:
            keys = rivals.keys()
            place = keys.index(min(keys))
        return rivals.endpoints[place]


def pick(endpoints: Sequence[Endpoint], loads: Mapping[str, Load], prompt: Prompt) -> Pick | None:
    """One pick of `Standing`."""
    return Standing(endpoints, loads).pick(prompt)


def eligible(endpoints: Iterable[Endpoint], loads: Mapping[str, Load]) -> list[Endpoint]:
    """Filter: ready, not ending, and without doubt; all live ones where every one of them is in doubt."""
    live = [e for e in endpoints if e.live]
    sure = [e for e in live if not loads.get(e.address, _IDLE).doubtful]
    return sure or live
