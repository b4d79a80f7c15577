"""Recorded runs on two H200s replayed: two engines that do all, or one that reads and one that writes.

Judged from the fourth second on, as the record was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from bench.trust.check import Check
from bench.trust.drive import Got, alone, pair, plant
from bench.trust.records import Seen
from bench.trust.sweeps import server, within
from plimsoll.sim.profile import Profile

PROMISES: Final = ((0.5, 0.05), (0.3, 0.025), (0.2, 0.015), (0.5, 0.01))
POINTS: Final = 3.0
PERCENT: Final = 10.0
_FROM_S: Final = 4.0
_SATURATED_S: Final = 1.0  # a median TTFT beyond it: a queue that grows
CARDS: Final = 0.979  # recorded steps of the sixteen aggregated engines over the law's: other cards than the sweeps'
_FRONT_S: Final = 0.0038  # more a request on that host: one at a time 6.1, 3.6 and 1.8 ms at 128, 1,024, 2,048 tokens
_KV_TOKENS: Final = 393_216  # 48 GiB of cache, for each of the engines that shared the two cards


def engines(kind: str) -> Profile:
    """agg, pd, or pd128, whose blocks are of 128 tokens."""
    own = server("8b", 8192)
    block_size = 128 if kind == "pd128" else 16
    return replace(own, kv_tokens=_KV_TOKENS, block_size=block_size, frontend=own.frontend + _FRONT_S)


def replay(kind: str, seen: Sequence[Seen]) -> list[Got]:
    own, sent = plant(engines(kind)), [one.sent for one in seen]
    if kind != "agg":
        return pair(own, sent)
    own = replace(own, scale=CARDS)
    got: dict[int, Got] = {}
    for engine in (0, 1):
        places = [place for place, one in enumerate(seen) if one.engine == engine]
        got.update(zip(places, alone(own, [sent[place] for place in places]), strict=True))
    return [got[place] for place in range(len(seen))]


def checks(records: dict[tuple[str, str, str], list[Seen]]) -> list[Check]:
    found = []
    for (kind, mix, rate), seen in sorted(
        records.items(), key=lambda item: (item[0][1], float(item[0][2]), item[0][0])
    ):
        got = replay(kind, seen)
        judged = [(one, each) for one, each in zip(seen, got, strict=True) if one.sent.at_s >= _FROM_S]
        found += _of_run(f"two H200s, {mix} {rate}/s, {kind}, {len(judged)} requests", judged)
    return found


def _of_run(group: str, judged: Sequence[tuple[Seen, Got]]) -> list[Check]:
    ttft = [(one.ttft_s, got.first_s) for one, got in judged if one.ok]
    tpot = [(one.tpot_s, got.tpot_s(one.sent.output)) for one, got in judged if one.ok and one.sent.output > 1]
    saturated = float(np.median([real for real, _ in ttft])) > _SATURATED_S
    found = []
    for name, values, bound in (("TTFT", ttft, None if saturated else PERCENT), ("TPOT", tpot, PERCENT)):
        for percent in (50, 95):
            real, ours = (float(np.percentile([row[side] for row in values], percent)) for side in (0, 1))
            told = {"recorded_s": round(real, 5), "simulated_s": round(ours, 5)}
            found.append(Check(group, f"{name} p{percent}", 100.0 * (ours / real - 1.0), bound, "%", told))
    shares = {}
    for ttft_s, tpot_s in PROMISES:
        kept = [(one.within(ttft_s, tpot_s), within(got, one.sent, ttft_s, tpot_s)) for one, got in judged]
        real, ours = (100.0 * sum(row[side] for row in kept) / len(kept) for side in (0, 1))
        shares[f"{ttft_s * 1e3:.0f}/{tpot_s * 1e3:.0f} ms"] = (round(real, 2), round(ours, 2))
    worst = max((ours - real for real, ours in shares.values()), key=abs)
    bound = None if saturated else POINTS
    return [*found, Check(group, "attainment, worst of four promises", worst, bound, "pt", dict(shares))]
