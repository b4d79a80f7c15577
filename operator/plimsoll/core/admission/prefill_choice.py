"""The prefill replica of a request: the one that finishes the prompt first, given what each has cached of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import attrgetter
from typing import Final, NamedTuple

from plimsoll.core.admission.cost_model import EngineCostModel
from plimsoll.core.admission.prefill_queue import PrefillQueue
from plimsoll.core.admission.prefix_tokens import prefix_tokens
from plimsoll.core.admission.request import AdmissionRequest
from plimsoll.core.routing.prefix_index import PrefixIndex

STALL_COST_FACTOR: Final = 3.0  # seconds that 1 s of prefill costs later requests; from replays, see bench.picking
_free_s: Final = attrgetter("free_s")


class PrefillChoice(NamedTuple):
    """A prefill replica for a request, with the tokens cached there and the wait in seconds until it starts."""

    address: str
    cached_tokens: int
    wait_s: float


def choose_prefill(
    queues: Mapping[str, PrefillQueue],
    prefix_index: PrefixIndex,
    cost_model: EngineCostModel,
    other_gateways_share: float,
    request: AdmissionRequest,
    now: float,
) -> PrefillChoice:
    """Returns the best prefill replica. `other_gateways_share` is the share of requests that arrive elsewhere."""
    blocks = request.block_hashes
    soonest = min(queues.values(), key=_free_s)
    if not blocks:
        return PrefillChoice(soonest.address, 0, max(0.0, soonest.free_s - now))
    max_depth = prefix_index.match_depth(blocks)
    hash_home = prefix_index.hash_home(blocks, max_depth)
    best, best_score = None, math.inf
    for address in dict.fromkeys(
        (soonest.address, prefix_index.cached_on(blocks, max_depth) if max_depth else None, hash_home)
    ):
        if address is None:
            continue
        cached = prefix_tokens(request, prefix_index.match_depth_at(address, blocks, max_depth))
        wait_s, prefill_s = max(0.0, queues[address].free_s - now), cost_model.remote_prefill_s(request, cached)
        saved_s = 0.0
        if address == hash_home:
            all_cached_s = cost_model.remote_prefill_s(request, prefix_tokens(request, len(blocks)))
            saved_s = other_gateways_share * (prefill_s - all_cached_s)
        score = wait_s + prefill_s - saved_s + STALL_COST_FACTOR * (prefill_s - saved_s)
        if score < best_score:
            best, best_score = PrefillChoice(address, cached, wait_s), score
    assert best is not None
    return best
