"""Choose the endpoint of a request, its fallbacks, and its prefill endpoint.

The serving endpoint is the one with the fewest requests in flight. The prefill endpoint must have the same revision,
because KV blocks of another revision may come from other weights. So the fallbacks of a request with remote prefill
have that revision too. A decode engine that was not among the chosen ones prefills locally.

Endpoints change rarely, loads with every request. `EndpointIndex` filters endpoints once and keeps them sorted by load,
because each load reports its changes. A pick takes the first entries, whatever the number of endpoints.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from plimsoll.core.routing.endpoint import POSITION_MASK, SUSPECT_RANK, Endpoint, EndpointLoad, Prompt
from plimsoll.core.types import KV_BLOCK_TOKENS, Role

FALLBACKS = 2  # further endpoints: Envoy makes three attempts in total

_IDLE_LOAD = EndpointLoad()

_MAX_RANK: Final = 2 * SUSPECT_RANK


class Pick(NamedTuple):
    """The target of a request. Envoy tries `fallbacks` in order if `endpoint` refuses. No `prefill` means local."""

    endpoint: Endpoint
    fallbacks: tuple[Endpoint, ...] = ()
    prefill: Endpoint | None = None


class _LoadOrder:
    """Available endpoints of one kind, sorted by load."""

    __slots__ = ("_loads", "_ranks", "endpoints", "position", "same_revision")

    def __init__(self, endpoints: Iterable[Endpoint], loads: Mapping[str, EndpointLoad]) -> None:
        self.endpoints = list({e.address: e for e in endpoints if e.available}.values())
        self.position = {e.address: position for position, e in enumerate(self.endpoints)}
        self.same_revision = len({e.revision for e in self.endpoints}) <= 1
        self._loads = [loads.get(e.address) or EndpointLoad() for e in self.endpoints]
        self._ranks: list[int] | None = None  # None: must be rebuilt

    def on_rank_change(self, old_rank: int, rank: int) -> None:
        """Move one load to its new rank."""
        ranks = self._ranks
        if ranks is not None:
            del ranks[bisect_left(ranks, old_rank)]
            insort(ranks, rank)

    def on_detach(self) -> None:
        """Invalidate the order: one load now reports its changes to another observer."""
        self._ranks = None

    def ranks(self) -> list[int]:
        """Returns the ranks, lowest first."""
        if self._ranks is None:
            for position, load in enumerate(self._loads):
                load.attach(self, position)
            self._ranks = sorted(load.rank for load in self._loads)
        return self._ranks

    def least_loaded(
        self, limit: int, excluded: int | None = None, revision: str | None = None, max_rank: int | None = None
    ) -> tuple[Endpoint, ...]:
        """Returns up to `limit` endpoints with the lowest ranks below `max_rank`.

        `excluded` is the position of an endpoint to skip. `revision` None means any revision. `max_rank` None includes
        suspect endpoints only if all are suspect.
        """
        chosen: list[Endpoint] = []
        for rank in self.ranks():
            position = rank & POSITION_MASK
            endpoint = self.endpoints[position]
            if position == excluded or (revision is not None and endpoint.revision != revision):
                continue
            if max_rank is None:
                max_rank = SUSPECT_RANK if rank < SUSPECT_RANK else _MAX_RANK
            if rank >= max_rank or len(chosen) == limit:
                break
            chosen.append(endpoint)
        return tuple(chosen)

    def is_suspect(self, position: int) -> bool:
        return self._loads[position].suspect


class EndpointIndex:
    """The endpoints of one service, prepared for many picks."""

    def __init__(self, endpoints: Sequence[Endpoint], loads: Mapping[str, EndpointLoad]) -> None:
        """`loads` are by address. An endpoint without a load counts as idle."""
        self._serving = _LoadOrder((e for e in endpoints if e.role is not Role.PREFILL and e.routable), loads)
        prefill_endpoints = [e for e in endpoints if e.role is Role.PREFILL]
        self._prefills = {
            revision: _LoadOrder((e for e in prefill_endpoints if e.revision == revision), loads)
            for revision in {e.revision for e in prefill_endpoints if e.available}
        }

    def pick(self, prompt: Prompt) -> Pick | None:
        """Returns the least loaded pick, or None if no endpoint can serve. Picks suspect ones only if all are."""
        serving = self._serving
        if not serving.endpoints:
            return None
        best, *fallbacks = serving.least_loaded(1 + FALLBACKS)
        prefill = self.pick_prefill(best, prompt)
        if prefill is None or serving.same_revision:
            return Pick(best, tuple(fallbacks), prefill)
        position = serving.position[best.address]
        max_rank = _MAX_RANK if serving.is_suspect(position) else SUSPECT_RANK
        return Pick(best, serving.least_loaded(FALLBACKS, position, best.revision, max_rank), prefill)

    def pick_at(self, address: str, prefill: str | None, prompt: Prompt) -> Pick | None:
        """Returns a pick of the endpoint at `address`, or None if that endpoint cannot serve.

        `prefill` is the address of the preferred prefill endpoint, None for local prefill. If it cannot be paired, the
        pick uses another prefill endpoint.
        """
        serving = self._serving
        position = serving.position.get(address)
        if position is None:
            return None
        best = serving.endpoints[position]
        paired = None if prefill is None else self.pick_prefill(best, prompt, prefill)
        return Pick(best, serving.least_loaded(FALLBACKS, position, None if paired is None else best.revision), paired)

    def pick_paired(self, prompt: Prompt) -> Pick | None:
        """Returns the least loaded pick with a prefill endpoint, or None if no decode endpoint has one."""
        serving = self._serving
        for best in serving.least_loaded(len(serving.endpoints)):
            prefill = self.pick_prefill(best, prompt)
            if prefill is not None:
                position = serving.position[best.address]
                return Pick(best, serving.least_loaded(FALLBACKS, position, best.revision), prefill)
        return None

    def pick_prefill(self, decode: Endpoint, prompt: Prompt, preferred: str | None = None) -> Endpoint | None:
        """Returns a prefill endpoint for this request, or None for local prefill.

        A prompt shorter than one KV block has nothing to transfer. `preferred` is the address to use if available.
        """
        if decode.role is not Role.DECODE or prompt.tokens < KV_BLOCK_TOKENS or prompt.sequences != 1:
            return None
        candidates = self._prefills.get(decode.revision)
        if candidates is None:
            return None
        position = None if preferred is None else candidates.position.get(preferred)
        return candidates.endpoints[candidates.ranks()[0] & POSITION_MASK if position is None else position]


def eligible(endpoints: Iterable[Endpoint], loads: Mapping[str, EndpointLoad]) -> list[Endpoint]:
    """Returns the available endpoints that are not suspect, or all available ones if every one is suspect."""
    available = [e for e in endpoints if e.available]
    healthy = [e for e in available if not loads.get(e.address, _IDLE_LOAD).suspect]
    return healthy or available
