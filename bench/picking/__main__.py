"""`python -m bench.picking`: Mooncake's requests through gates that are told prompts' beginnings, and that are not.

Prints tokens taken from caches over the ideal (one endless cache for all), and TTFT. Targets: one gateway takes 90 % of
the ideal, with a p95 no later than by least work alone. Some minutes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.picking.replay import Asked, ideal, replay, trace
from plimsoll.core.admission.fleet import BLOCK_TOKENS


@dataclass(frozen=True)
class Case:
    """A trace, played so many times as fast, on engines that each hold so many tokens."""

    trace: str
    speed: float
    engines: int
    kv_tokens: int


CASES = (
    Case("synthetic", 1.0, 6, 2_870_000),  # HBM and as much again twice over on the host
    Case("synthetic", 1.0, 6, 919_824),  # HBM alone
    Case("synthetic", 2.0, 8, 2_870_000),
    Case("arxiv", 1.0, 6, 919_824),
    Case("arxiv", 1.5, 4, 919_824),
)


def print_case(case: Case) -> None:
    """One case, by gateways."""
    asked: list[Asked] = trace(case.trace, speed=case.speed)
    endless = sum(ideal(asked))
    pooled = sum(ideal(asked, math.floor(case.engines * case.kv_tokens / BLOCK_TOKENS)))
    print(
        f"\n{case.trace}, {case.speed:g} times as fast, {case.engines} engines of {case.kv_tokens:,} tokens: "
        f"{endless / sum(a.prompt for a in asked):.0%} of all tokens could be hits; "
        f"one cache of all engines' size would take {pooled / endless:.0%} of them"
    )
    print(f"{'gateways':>8} {'':<12}{'of ideal':>9}{'p50 s':>8}{'p95 s':>8}{'shed':>6}")
    for gateways in (1, 2, 3):
        for name, told in (("least work", False), ("affinity", True)):
            row = replay(asked, case.engines, case.kv_tokens, gateways, told)
            print(f"{gateways:>8} {name:<12}{row.hits:9.1%}{row.p50_s:8.3f}{row.p95_s:8.3f}{row.lost:6}", flush=True)


if __name__ == "__main__":
    for each in CASES:
        print_case(each)
