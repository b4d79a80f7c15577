"""Predictions by the core's models and its simulated engines for the runs of `measure_pd`, written before them.

    python -m bench.hardware.predict_pd --out FILE --run agg:TRACE --run pd:TRACE --run pd:TRACE:1000 ...

Problem: whether disaggregation beats two aggregated engines is a question for sizing, so sizing has to predict it.

Idea: the same run options as `measure_pd`, with the same traces, on two GPUs. *Law*: the closed forms of `plimsoll
plan`, p95 of TTFT and TPOT. If some prompts are prefilled locally it has only TPOT, with the stall of each prompt at
the engine that prefills it. *Engines*: the simulator's, with the recorded arrivals, engines taken in turn; inter-token
latencies are those between the ends of an engine's steps. Profiles and GPUs are those of the earlier machines.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

from bench.hardware import compare_pd, traces
from bench.hardware.measure_pd import PairRun
from bench.hardware.summary import ObservedRequest
from bench.trust.engine_driver import (
    RecordedRequest,
    ReplayedRequest,
    mean_plant,
    replay_one_engine,
    replay_remote_prefill,
)
from plimsoll.cli.plan import profile_machines
from plimsoll.core.capacity.slo_capacity import slo_capacity_per_s
from plimsoll.core.capacity.tier_model import build_profile
from plimsoll.core.engine_model.step_time import TierWork, decode_tier, serve_tier, tail_factor
from plimsoll.core.planning.arrangement import NVLINK_BYTES_PER_S, aggregated_tier, disaggregated_tiers
from plimsoll.core.planning.expected_latency import predict_latency
from plimsoll.core.planning.machine_model import Machine
from plimsoll.core.slo import Slo
from plimsoll.core.types import Role
from plimsoll.core.workload import Workload, from_samples
from plimsoll.sim import profile as profiles
from plimsoll.sim.engine.engine_metrics import EngineMetrics
from plimsoll.sim.engine.kv_cache import KvCache
from plimsoll.sim.engine.simulated_engine import SimulatedEngine
from plimsoll.sim.engine.step_run import StepRun
from plimsoll.sim.engine.step_timing import StepTiming
from plimsoll.sim.plant import Plant
from plimsoll.sim.profile import HardwareProfile

KV_CACHE_TOKENS, MAX_SEQUENCES, PD_BLOCK_TOKENS = (
    919_824,
    1024,
    128,
)  # of an engine alone on its card, and vLLM's own most
SLO: Final = Slo(0.95, ttft_s=0.5, tpot_s=0.05)
_MS: Final = 1e3


class TimedEngine(SimulatedEngine):
    """An engine whose steps' ends are kept; it must not leap."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps_s: list[float] = []

    def _complete(self, run: StepRun) -> None:
        super()._complete(run)
        if run.emitting:
            self.steps_s.append(run.end_s)


def pair_profile(name: str, kv_tokens: int) -> HardwareProfile:
    """A profile as the engines of `pair` are started."""
    return replace(profiles.load(name), kv_tokens=kv_tokens, max_num_seqs=MAX_SEQUENCES)


def make_engine(profile: Plant, role: Role) -> TimedEngine:
    """An engine of the plant, without spread or noise."""
    one = profile.profile_for(role)
    blocks, step_timing = KvCache(one.kv_tokens // one.block_size, one.block_size), StepTiming(one)
    return TimedEngine(
        one.max_num_seqs, one.budget, blocks, step_timing, profile.kv_link(), EngineMetrics(one.max_model_len), False
    )


def replay_pair(
    run: PairRun, requests: Sequence[RecordedRequest], profile: HardwareProfile
) -> tuple[list[ReplayedRequest], list[TimedEngine], list[int], int]:
    """What became of each request, the engines that decode, which of them each was on, and all preemptions."""
    if run.mode == "agg":
        own = mean_plant(replace(profile, budget=run.budget))
        both = [make_engine(own, Role.SERVE) for _ in range(2)]
        results: dict[int, ReplayedRequest] = {}
        for number, one in enumerate(both):
            assignments = range(number, len(requests), 2)
            results.update(
                zip(
                    assignments,
                    replay_one_engine(own, [requests[assignment] for assignment in assignments], one),
                    strict=True,
                )
            )
        engine_of = [assignment % 2 for assignment in range(len(requests))]
        return (
            [results[assignment] for assignment in range(len(requests))],
            both,
            engine_of,
            sum(one.metrics.preemptions for one in both),
        )
    own = mean_plant(replace(profile, block_size=PD_BLOCK_TOKENS))
    reader, writer = own.engine(Role.PREFILL, Random(0)), make_engine(own, Role.DECODE)
    preemptions = replay_remote_prefill(own, requests, reader, writer, run.remote_from)
    return preemptions, [writer], [0] * len(requests), writer.metrics.preemptions


def simulated(run: PairRun, requests: Sequence[traces.PlannedRequest], profile: HardwareProfile) -> dict[str, Any]:
    """Return the summary of the run for the simulated engines, with p99 of all inter-token latencies."""
    trace_requests = [RecordedRequest(request.at_s, request.prompt, request.output) for request in requests]
    results, decoding, engine_of, preempted = replay_pair(run, trace_requests, profile)
    ends = [np.asarray(request.steps_s) for request in decoding]
    observed, lengths = [], []
    for result, step_rows, number in zip(trace_requests, results, engine_of, strict=True):
        steps = ends[number]
        first, last = np.searchsorted(
            steps, (result.at_s + step_rows.first_s - 1e-9, result.at_s + step_rows.last_s + 1e-9)
        )
        between = np.diff(steps[first:last])
        gap_s = step_rows.tpot_s(result.output) if result.output > 1 else None
        longest = float(between.max()) if between.size else None
        observed.append(ObservedRequest(result.at_s, result.output, step_rows.first_s, gap_s, longest, True))
        if compare_pd.WARM_S <= result.at_s < compare_pd.WARM_S + compare_pd.WINDOW_S:
            lengths.append(between)
    figures = compare_pd.request_figures(observed)
    pooled = np.concatenate(lengths)
    return figures | {"p99_gap_ms": float(np.percentile(pooled, 99)) * _MS, "preempted": preempted}


def plan_machine(profile: HardwareProfile, budget: int) -> Machine:
    """One of the two cards, as `plimsoll plan` sees it."""
    machines = profile_machines(replace(profile, budget=budget), 1)
    return next(one for one in machines if one.limits.token_budget == budget)


def closed_form(run: PairRun, requests: Sequence[traces.PlannedRequest], each: HardwareProfile) -> dict[str, Any]:
    """The closed forms at the judged rate, ms; the line is that of the arrangement with one engine of each kind."""
    hardware_profile, workload = plan_machine(each, run.budget), _workload(requests)
    measured = [one for one in requests if compare_pd.WARM_S <= one.at_s < compare_pd.WARM_S + compare_pd.WINDOW_S]
    rate = len(measured) / compare_pd.WINDOW_S
    if run.mode == "agg":
        one = aggregated_tier(hardware_profile, workload, SLO)
        model_figures = predict_latency((one,), rate, (2,))
        return _latency_document(model_figures.p95_ttft_s, model_figures.p95_tpot_s) | {
            "line_rps": float(slo_capacity_per_s(build_profile(one), 2, admission=False)[0])
        }
    remote_mix = [one for one in requests if one.prompt >= run.remote_from]
    reader, _ = disaggregated_tiers(hardware_profile, hardware_profile, _workload(remote_mix), SLO, NVLINK_BYTES_PER_S)
    share = len(remote_mix) / len(requests)
    model_figures = predict_latency((reader,), share * rate, (1,))
    work = _mixed_workload(hardware_profile, workload, run.remote_from)
    rho = float(work.rho(rate))
    pace = float(work.base_s / (1 - rho) * max(1.0, float(tail_factor(work, rho, 0.95)))) if rho < 1 else np.inf
    document = _latency_document(model_figures.p95_ttft_s, pace) | {"decode_rho": rho}
    return document | {"line_rps": float(slo_capacity_per_s(build_profile(reader), 1, admission=False)[0]) / share}


def _mixed_workload(profile: Machine, workload: Workload, remote_from: int) -> TierWork:
    """A decode engine's work where prompts below a length are read in place."""
    remote = decode_tier(profile.decode_model(workload, SLO.tpot_s or np.inf), workload, profile.transfer)
    local_prompts = serve_tier(profile.serve_model(workload, SLO.tpot_s or np.inf), workload)
    local = workload.prompt_tokens < remote_from
    return replace(remote, stall_s=np.where(local, local_prompts.stall_s, remote.stall_s))


def _latency_document(ttft_s: float | None, tpot_s: float | None) -> dict[str, Any]:
    return {
        name: None if value is None or not np.isfinite(value) else value * _MS
        for name, value in (("p95_ttft_ms", ttft_s), ("p95_tpot_ms", tpot_s))
    }


def _workload(requests: Sequence[traces.PlannedRequest]) -> Workload:
    prompts, outputs = ([getattr(one, name) for one in requests] for name in ("prompt", "output"))
    return from_samples(prompts, [0.0] * len(requests), outputs)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.predict_pd", description=__doc__)
    parser.add_argument("--run", action="append", required=True, metavar="agg|pd:TRACE[:TOKENS]")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--profile", default="h200-8b", help="of either card")
    parser.add_argument("--kv-tokens", type=int, default=KV_CACHE_TOKENS, help="of each engine's cache")
    given = parser.parse_args(words)
    document, hardware_profile = [], pair_profile(given.profile, given.kv_tokens)
    for number, word in enumerate(given.run):
        run = PairRun.parse(number, word)
        requests = traces.read(run.trace)
        one: dict[str, Any] = {"run": run.name}
        one["sha256"] = traces.digest(run.trace)
        one["law"] = closed_form(run, requests, hardware_profile)
        one["engines"] = simulated(run, requests, hardware_profile)
        one = _rounded(one)
        document.append(one)
        print(json.dumps(one), flush=True)
    if given.out is not None:
        given.out.write_text(
            json.dumps({"profile": given.profile, "kv_tokens": given.kv_tokens, "runs": document}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
