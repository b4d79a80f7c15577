"""Recorded runs on two H200s replayed: two engines that do all, or one that reads and one that writes.

Judged from the fourth second on, as the record was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from bench.trust.check import SimulatorCheck
from bench.trust.engine_driver import ReplayedRequest, mean_plant, replay_one_engine, replay_pair
from bench.trust.recorded_runs import RequestRecord
from bench.trust.sweep_replay import server, within_slo
from plimsoll.sim.profile import HardwareProfile

SLO_PAIRS: Final = ((0.5, 0.05), (0.3, 0.025), (0.2, 0.015), (0.5, 0.01))
MAX_POINTS: Final = 3.0
MAX_PERCENT: Final = 10.0
_FROM_S: Final = 4.0
_SATURATED_S: Final = 1.0  # a median TTFT beyond it: a queue that grows
CARD_SPEED: Final = (
    0.979  # recorded steps of the sixteen aggregated engines over the law's: other cards than the sweeps'
)
_FRONTEND_S: Final = (
    0.0038  # more a request on that host: one at a time 6.1, 3.6 and 1.8 ms at 128, 1,024, 2,048 tokens
)
_KV_TOKENS: Final = 393_216  # 48 GiB of cache, for each of the engines that shared the two cards


def make_engines(kind: str) -> HardwareProfile:
    """agg, pd, or pd128, whose blocks are of 128 tokens."""
    profile = server("8b", 8192)
    block_size = 128 if kind == "pd128" else 16
    return replace(profile, kv_tokens=_KV_TOKENS, block_size=block_size, frontend=profile.frontend + _FRONTEND_S)


def replay(kind: str, records: Sequence[RequestRecord]) -> list[ReplayedRequest]:
    engines_made, requests = mean_plant(make_engines(kind)), [profile.request for profile in records]
    if kind != "agg":
        return replay_pair(engines_made, requests)
    engines_made = replace(engines_made, scale=CARD_SPEED)
    replayed: dict[int, ReplayedRequest] = {}
    for engine in (0, 1):
        indices = [index for index, profile in enumerate(records) if profile.engine == engine]
        replayed.update(
            zip(indices, replay_one_engine(engines_made, [requests[index] for index in indices]), strict=True)
        )
    return [replayed[index] for index in range(len(records))]


def checks(records: dict[tuple[str, str, str], list[RequestRecord]]) -> list[SimulatorCheck]:
    results = []
    for (kind, mix, rate), run_records in sorted(
        records.items(), key=lambda item: (item[0][1], float(item[0][2]), item[0][0])
    ):
        replayed = replay(kind, run_records)
        measured = [
            (record, replayed_request)
            for record, replayed_request in zip(run_records, replayed, strict=True)
            if record.request.at_s >= _FROM_S
        ]
        results += _run_checks(f"two H200s, {mix} {rate}/s, {kind}, {len(measured)} requests", measured)
    return results


def _run_checks(group: str, measured: Sequence[tuple[RequestRecord, ReplayedRequest]]) -> list[SimulatorCheck]:
    ttft = [(record.ttft_s, replayed_request.first_s) for record, replayed_request in measured if record.ok]
    tpot = [
        (record.tpot_s, replayed_request.tpot_s(record.request.output))
        for record, replayed_request in measured
        if record.ok and record.request.output > 1
    ]
    saturated = float(np.median([recorded_values for recorded_values, _ in ttft])) > _SATURATED_S
    results = []
    for name, values, bound in (("TTFT", ttft, None if saturated else MAX_PERCENT), ("TPOT", tpot, MAX_PERCENT)):
        for percent in (50, 95):
            recorded_values, simulated_values = (
                float(np.percentile([row[side] for row in values], percent)) for side in (0, 1)
            )
            detail = {"recorded_s": round(recorded_values, 5), "simulated_s": round(simulated_values, 5)}
            results.append(
                SimulatorCheck(
                    group, f"{name} p{percent}", 100.0 * (simulated_values / recorded_values - 1.0), bound, "%", detail
                )
            )
    shares = {}
    for ttft_s, tpot_s in SLO_PAIRS:
        shares_within = [
            (record.within(ttft_s, tpot_s), within_slo(replayed_request, record.request, ttft_s, tpot_s))
            for record, replayed_request in measured
        ]
        recorded_values, simulated_values = (
            100.0 * sum(row[side] for row in shares_within) / len(shares_within) for side in (0, 1)
        )
        shares[f"{ttft_s * 1e3:.0f}/{tpot_s * 1e3:.0f} ms"] = (round(recorded_values, 2), round(simulated_values, 2))
    worst = max((simulated_values - recorded_values for recorded_values, simulated_values in shares.values()), key=abs)
    bound = None if saturated else MAX_POINTS
    return [*results, SimulatorCheck(group, "attainment, worst of four promises", worst, bound, "pt", dict(shares))]
