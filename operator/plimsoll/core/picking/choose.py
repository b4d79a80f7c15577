"""Filter, score, choose: the endpoint of a request, those to try next, and where its prompt is computed.

The answering endpoint comes first, by fewest requests in flight. Then a prefill endpoint, only of the same revision: KV
blocks of another one may come from other weights. So the spare endpoints of a request with remote prefill are of that
revision too; the decode engine prefills locally when it finds that it was not among those meant.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from plimsoll.core.picking.endpoint import Endpoint, Load, Prompt, Role

BLOCK_TOKENS = 128  # `--block-size` of prefill and decode tiers: KV travels in whole blocks
SPARES = 2  # further endpoints named, for a proxy that tries three times in all

_IDLE = Load()


@dataclass(frozen=True, slots=True)
class Pick:
    """Where a request goes. `spares` are tried in order if `endpoint` refuses; `prefill` None means locally."""

    endpoint: Endpoint
    spares: tuple[Endpoint, ...] = ()
    prefill: Endpoint | None = None


def pick(endpoints: Sequence[Endpoint], loads: Mapping[str, Load], prompt: Prompt) -> Pick | None:
    """The best use of one service's endpoints for a request; None if none can answer.

    loads: by address; one that is missing holds nothing.
    """
    candidates = eligible((e for e in endpoints if e.role is not Role.PREFILL and e.routable), loads)
    ranked = heapq.nsmallest(1 + SPARES, candidates, key=lambda e: score(e, loads))
    if not ranked:
        return None
    best = ranked[0]
    prefill = choose_prefill(best, endpoints, loads, prompt)
    if prefill is None:
        return Pick(best, tuple(ranked[1:]))
    of_revision = [e for e in candidates if e.revision == best.revision and e is not best]
    spares = heapq.nsmallest(SPARES, of_revision, key=lambda e: score(e, loads))
    return Pick(best, tuple(spares), prefill)


def choose_prefill(
    decode: Endpoint, endpoints: Iterable[Endpoint], loads: Mapping[str, Load], prompt: Prompt
) -> Endpoint | None:
    """The prefill endpoint that pays for this request, or None: less than a block has nothing to send."""
    if decode.role is not Role.DECODE or prompt.tokens < BLOCK_TOKENS or prompt.sequences != 1:
        return None
    pairs = (e for e in endpoints if e.role is Role.PREFILL and e.revision == decode.revision)
    return min(eligible(pairs, loads), key=lambda e: score(e, loads), default=None)


def eligible(endpoints: Iterable[Endpoint], loads: Mapping[str, Load]) -> list[Endpoint]:
    """Filter: ready, not ending, and without doubt; all live ones where every one of them is in doubt."""
    live = [e for e in endpoints if e.live]
    sure = [e for e in live if not loads.get(e.address, _IDLE).doubtful]
    return sure or live


def score(endpoint: Endpoint, loads: Mapping[str, Load]) -> tuple[int, int]:
    """Less is better: requests in flight, then whose last turn is longest ago."""
    load = loads.get(endpoint.address, _IDLE)
    return load.inflight, load.turn
