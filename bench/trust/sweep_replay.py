"""Recorded runs of one H200 replayed: the same arrivals and lengths through the plant's engine.

Judged as the clients judged: the same requests, and who had not ended when the clients gave up is a miss on both sides.
Quantiles are over those that ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from bench.trust.check import SimulatorCheck
from bench.trust.engine_driver import RecordedRequest, ReplayedRequest, mean_plant, replay_one_engine
from bench.trust.recorded_runs import RequestRecord, SweepRun
from plimsoll.sim import profile
from plimsoll.sim.profile import HardwareProfile

SWEEP_TTFT_S: Final = 0.5  # the promise at scale 1
SWEEP_TPOT_S: Final = 0.05
SLO_SCALES: Final = tuple(round(0.2 * n, 1) for n in range(1, 11))
MAX_SWEEP_POINTS: Final = 2.0
CROSSING_PERCENT: Final = 95.0
MAX_CROSSING_PERCENT: Final = 3.0

_SERVERS: Final = {"8b": ("h200-8b", 919_824), "70b": ("h200-70b-capped", 191_440)}  # profile, KV tokens as logged


def server(model: str, budget: int) -> HardwareProfile:
    """The engine that was recorded: vLLM's defaults, the cache that it logged."""
    name, kv_tokens = _SERVERS[model]
    return replace(profile.load(name), kv_tokens=kv_tokens, max_num_seqs=1024, budget=budget)


@dataclass(frozen=True)
class SweepReplay:
    """A recorded run and its simulation; measured requests only."""

    sweep: SweepRun
    records: Sequence[RequestRecord]
    replayed: Sequence[ReplayedRequest]
    ended: Sequence[bool]  # of the plant's, before the clients gave up

    def quantile(self, percent: float, of_tpot: bool) -> tuple[float, float]:
        """Recorded and simulated, seconds."""
        if not of_tpot:
            recorded = [record.ttft_s for record in self.records if record.ttft_s == record.ttft_s]
            return float(np.percentile(recorded, percent)), float(
                np.percentile([replayed_request.first_s for replayed_request in self.replayed], percent)
            )
        recorded = [record.tpot_s for record in self.records if record.ok and record.request.output > 1]
        simulated = [
            got.tpot_s(record.request.output)
            for record, got, ended in zip(self.records, self.replayed, self.ended, strict=True)
            if ended and record.request.output > 1
        ]
        return float(np.percentile(recorded, percent)), float(np.percentile(simulated, percent))

    def attained(self, scale: float) -> tuple[float, float]:
        """Percent that kept the promise times `scale`, recorded and simulated."""
        recorded = sum(record.within(SWEEP_TTFT_S * scale, SWEEP_TPOT_S * scale) for record in self.records)
        simulated = sum(
            ended and within_slo(got, record.request, SWEEP_TTFT_S * scale, SWEEP_TPOT_S * scale)
            for record, got, ended in zip(self.records, self.replayed, self.ended, strict=True)
        )
        return 100.0 * recorded / len(self.records), 100.0 * simulated / len(self.records)

    def quantile_error_percent(self, percent: float, of_tpot: bool) -> float:
        """Percent by which the plant's quantile is above the recorded one."""
        recorded, simulated = self.quantile(percent, of_tpot)
        return 100.0 * (simulated / recorded - 1.0)


def within_slo(got: ReplayedRequest, request: RecordedRequest, ttft_s: float, tpot_s: float) -> bool:
    """Whether a simulated request kept a promise."""
    return got.first_s <= ttft_s and (request.output < 2 or got.tpot_s(request.output) <= tpot_s)


def replay_sweep(sweep: SweepRun, engine_settings: HardwareProfile | None = None) -> SweepReplay:
    """Replay a recorded run. engine_settings: engine to simulate, by default the one that was recorded on the GPU."""
    requests = [engine_run.request for engine_run in sweep.requests]
    replayed = replay_one_engine(mean_plant(engine_settings or server(sweep.model, sweep.budget)), requests)
    until_s = requests[-1].at_s + sweep.patience_s
    ended = [
        engine_run.at_s + replayed_request.last_s <= until_s
        for engine_run, replayed_request in zip(requests, replayed, strict=True)
    ]
    first = len(requests) - sweep.measured_requests
    return SweepReplay(sweep, sweep.requests[first:], replayed[first:], ended[first:])


def checks(records: Iterable[SweepRun]) -> list[SimulatorCheck]:
    """Of all runs whose prompts were computed; those that came from the prefix cache are `cached`."""
    results, replays = [], []
    for sweep in records:
        if sweep.name in ("earlier 2048", "earlier 8192"):
            continue
        replay_result = replay_sweep(sweep)
        replays.append(replay_result)
        results += run_checks(replay_result)
    for model, name in (("8b", "8B"), ("70b", "70B fp8")):
        rates = [
            replay_result
            for replay_result in replays
            if replay_result.sweep.model == model and replay_result.sweep.name.endswith("/s")
        ]
        results.append(
            _crossing_check(name, [replay_result for replay_result in rates if "short" not in replay_result.sweep.name])
        )
    return results


def run_checks(replay_result: SweepReplay) -> list[SimulatorCheck]:
    """Attained shares, and quantiles: TPOT's are bound as far as rho allows."""
    sweep = replay_result.sweep
    group = f"recorded {sweep.name}, rho {sweep.rho:.2f}, {sweep.measured_requests} requests"
    bound = 5.0 if sweep.rho <= 0.65 else 12.0 if sweep.rho <= 0.85 else None
    return comparison_checks(replay_result, group, bound)


def comparison_checks(replay_result: SweepReplay, group: str, tpot_bound: float | None) -> list[SimulatorCheck]:
    """The worst share of ten scales, p50 and p95 of TPOT (bound: percent) and TTFT (none)."""
    shares = {f"{scale:g}": replay_result.attained(scale) for scale in SLO_SCALES}
    worst = max((simulated - recorded for recorded, simulated in shares.values()), key=abs)
    detail = {scale: [round(recorded, 2), round(simulated, 2)] for scale, (recorded, simulated) in shares.items()}
    results = [SimulatorCheck(group, "attainment, worst of ten scales", worst, MAX_SWEEP_POINTS, "pt", detail)]
    for of_tpot, name, max_error in ((True, "TPOT", tpot_bound), (False, "TTFT", None)):
        for percent in (50.0, 95.0):
            recorded, simulated = replay_result.quantile(percent, of_tpot)
            quantiles_s = {"recorded_s": round(recorded, 5), "simulated_s": round(simulated, 5)}
            results.append(
                SimulatorCheck(
                    group,
                    f"{name} p{percent:.0f}",
                    replay_result.quantile_error_percent(percent, of_tpot),
                    max_error,
                    "%",
                    quantiles_s,
                )
            )
    return results


def crossing_rate(points: Sequence[tuple[float, float]]) -> float:
    """The rate at which the attained share falls to 95 %, on a line between neighbours; points: by rate."""
    for (rate, share), (next_rate, next_share) in itertools.pairwise(points):
        if share >= CROSSING_PERCENT > next_share:
            return rate + (next_rate - rate) * (share - CROSSING_PERCENT) / (share - next_share)
    raise ValueError("the share does not fall to 95 % in these runs")


def _crossing_check(name: str, rates: Sequence[SweepReplay]) -> SimulatorCheck:
    rates = sorted(rates, key=lambda replay_result: replay_result.sweep.seen_per_s)
    at = [(replay_result.sweep.seen_per_s, *replay_result.attained(1.0)) for replay_result in rates]
    recorded, simulated = (crossing_rate([(row[0], row[side]) for row in at]) for side in (1, 2))
    detail = {"recorded_per_s": round(recorded, 3), "simulated_per_s": round(simulated, 3)}
    return SimulatorCheck(
        "the 95 % knee of the recorded rates",
        name,
        100.0 * (simulated / recorded - 1.0),
        MAX_CROSSING_PERCENT,
        "%",
        detail,
    )


def prefix_cache_checks(records: Sequence[SweepRun]) -> list[SimulatorCheck]:
    """Two runs whose prompts were those of the run before, and still in the prefix cache."""
    runs = [engine for engine in records if engine.name.startswith("earlier")]
    profile, requests, indices = mean_plant(server("8b", 8192), 16), [], []
    for prefix_order, sweep in enumerate(runs):
        for number, engine in enumerate(sweep.requests):
            ids = tuple(range(number * 1024, number * 1024 + engine.request.prompt // 16))
            requests.append(
                RecordedRequest(
                    100.0 * prefix_order + engine.request.at_s, engine.request.prompt, engine.request.output, ids
                )
            )
            indices.append(prefix_order)
    results_of = replay_one_engine(profile, requests)
    results = []
    for prefix_order, sweep in enumerate(runs[1:], 1):
        own_requests = [request for request, index in zip(results_of, indices, strict=True) if index == prefix_order][
            -sweep.measured_requests :
        ]
        ended = [True] * len(own_requests)
        replayed = SweepReplay(sweep, sweep.requests[-sweep.measured_requests :], own_requests, ended)
        for of_tpot, name in ((False, "TTFT"), (True, "TPOT")):
            error_percent = replayed.quantile_error_percent(50.0, of_tpot)
            recorded, simulated = replayed.quantile(50.0, of_tpot)
            detail = {"recorded_s": round(recorded, 5), "simulated_s": round(simulated, 5)}
            results.append(
                SimulatorCheck(
                    "prompts from the prefix cache",
                    f"budget {sweep.budget}, {name} p50",
                    error_percent,
                    None,
                    "%",
                    detail,
                )
            )
    return results
