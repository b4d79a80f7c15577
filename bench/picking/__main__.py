"""`python -m bench.picking`: Mooncake's requests, and a made trace of tools, few-shot prompts and chats, through gates
that are told prompts' beginnings, and that are not.

Prints tokens taken from caches over the ideal (one endless cache for all), and TTFT. Targets: one gateway takes 90 % of
the ideal, with a p95 no later than by least work alone. Some minutes; with `mixed` the made trace alone, in two.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from bench.picking.mixed_trace import mixed_trace
from bench.picking.prefix_replay import PrefixRequest, ideal_cached_tokens, load_trace, replay
from plimsoll.core.types import KV_BLOCK_TOKENS


@dataclass(frozen=True)
class PickingCase:
    """A trace, played so many times as fast, on engines that each hold so many tokens. speed of `mixed`: sessions/s."""

    trace: str
    speed: float
    engines: int
    kv_tokens: int


CASES = (
    PickingCase("synthetic", 1.0, 6, 2_870_000),  # HBM and as much again twice over on the host
    PickingCase("synthetic", 1.0, 6, 919_824),  # HBM alone
    PickingCase("synthetic", 2.0, 8, 2_870_000),
    PickingCase("arxiv", 1.0, 6, 919_824),
    PickingCase("arxiv", 1.5, 4, 919_824),
)


MIXED = PickingCase("mixed", 14.0, 6, 919_824)  # sessions/s
MIXED_S = 120.0


def print_case(case: PickingCase, requests: list[PrefixRequest]) -> None:
    """One case, by gateways."""
    ideal_tokens = sum(ideal_cached_tokens(requests))
    pooled_share = sum(ideal_cached_tokens(requests, math.floor(case.engines * case.kv_tokens / KV_BLOCK_TOKENS)))
    print(
        f"\n{case.trace}, {len(requests):,} requests, speed {case.speed:g}, "
        f"{case.engines} engines of {case.kv_tokens:,} tokens: "
        f"{ideal_tokens / sum(request.prompt for request in requests):.0%} of all tokens could be hits; "
        f"one cache of all engines' size would take {pooled_share / ideal_tokens:.0%} of them"
    )
    print(f"{'gateways':>8} {'':<12}{'of ideal':>9}{'p50 s':>8}{'p95 s':>8}{'shed':>6}")
    for gateways in (1, 2, 3):
        for name, prefix_aware in (("least work", False), ("affinity", True)):
            row = replay(requests, case.engines, case.kv_tokens, gateways, prefix_aware)
            print(
                f"{gateways:>8} {name:<12}{row.hits:9.1%}{row.p50_s:8.3f}{row.p95_s:8.3f}{row.unfinished:6}  "
                + ", ".join(f"{kind} {hits:.1%}" for kind, hits in row.hits_by_kind.items() if kind),
                flush=True,
            )


if __name__ == "__main__":
    print_case(MIXED, mixed_trace(MIXED_S, MIXED.speed))
    for each in () if "mixed" in sys.argv else CASES:
        print_case(each, load_trace(each.trace, speed=each.speed))
