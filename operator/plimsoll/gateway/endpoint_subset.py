"""The engines that a gateway of another product allows for a request: its subset hint of the endpoint-picker protocol.

Admission control places requests among all engines of a service. Where its choice lies outside the subset, the least
loaded engine inside takes the request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from plimsoll.core.routing.endpoint import Endpoint
from plimsoll.core.routing.picker import FALLBACKS, Pick
from plimsoll.core.types import Role


def within_subset(
    pick: Pick, subset: Collection[str], endpoints: Sequence[Endpoint], rank: Callable[[Endpoint], int]
) -> Pick | None:
    """Returns the pick with engines of the subset only, None if none of these can serve.

    `rank` orders endpoints, lowest first. The prefill engine stays if the engine has its revision.
    """
    chosen = [e for e in (pick.endpoint, *pick.fallbacks) if e.address in subset]
    if not chosen:
        chosen = sorted((e for e in endpoints if is_usable(e) and e.address in subset), key=rank)[: 1 + FALLBACKS]
    if not chosen:
        return None
    best, *fallbacks = chosen
    prefill = pick.prefill if pick.prefill is not None and pick.prefill.revision == best.revision else None
    return Pick(best, tuple(e for e in fallbacks if prefill is None or e.revision == best.revision), prefill)


def is_unusable(subset: Collection[str] | None, endpoints: Sequence[Endpoint]) -> bool:
    """Whether no engine of the subset can serve. False without a subset."""
    return subset is not None and not any(is_usable(e) and e.address in subset for e in endpoints)


def is_partial(subset: Collection[str] | None, endpoints: Sequence[Endpoint]) -> bool:
    """Whether the subset leaves out an engine that can serve. False without a subset."""
    return subset is not None and any(is_usable(e) and e.address not in subset for e in endpoints)


def is_usable(endpoint: Endpoint) -> bool:
    """Whether clients' requests may go to the endpoint."""
    return endpoint.available and endpoint.routable and endpoint.role is not Role.PREFILL
