"""Inter-token latency: recorded on H200s, simulated, and modelled (`plimsoll.core.engine_model.inter_token`).

`python -m bench.trust.itl` prints a table. Recorded percentiles cover all gaps between tokens in a run's measured
window, as clients saw them. The simulated engine replays the same arrivals. The model has their lengths and their rate,
and the step times of a card at the temperature that this rate causes. No accuracy bound was set in advance.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from bench.trust import pd_replay as two
from bench.trust import recorded_runs
from bench.trust.engine_driver import RecordedRequest, mean_plant, replay_one_engine, replay_remote_prefill
from bench.trust.recorded_runs import RequestRecord
from bench.trust.sweep_replay import server
from plimsoll.core.engine_model.inter_token import ITL_SHARE, InterTokenLatency, itl_quantile_s
from plimsoll.core.engine_model.step_time import KvTransfer, StepModel, decode_tier, serve_tier
from plimsoll.core.types import Role
from plimsoll.core.workload import Workload, from_samples
from plimsoll.sim.engine.quantile_sketch import QuantileSketch
from plimsoll.sim.engine.step_timing import MAX_HEAT
from plimsoll.sim.profile import HardwareProfile, StepCoefficients

_MEASURED_RUNS = ("earlier 2048", "earlier 8192")  # their prompts were cached


@dataclass(frozen=True)
class ItlComparison:
    """The 99th percentile of a run's gaps, s."""

    run: str
    rho: float
    recorded_s: float
    simulated_s: float
    model_s: float


def main() -> None:
    print("| run | rho | recorded p99, ms | simulated | by the law |", "|---|---|---|---|---|", sep="\n")
    for row in rows():
        is_mean = [
            f"{1e3 * comparisons:.0f} ({100 * (comparisons / row.recorded_s - 1):+.0f} %)"
            for comparisons in _recorded_itl(row)
        ]
        print(f"| {row.run} | {row.rho:.2f} | {1e3 * row.recorded_s:.0f} | {is_mean[0]} | {is_mean[1]} |")


def rows() -> list[ItlComparison]:
    """All runs of which gaps were recorded."""
    recorded_itl = _load_recorded()
    comparisons = []
    for sweep in recorded_runs.load_sweeps():
        if sweep.name not in _MEASURED_RUNS:
            profile = server(sweep.model, sweep.budget)
            times = _simulated_times(profile, [engine_run.request for engine_run in sweep.requests])
            comparisons.append(
                _row(
                    sweep.name,
                    recorded_itl,
                    times,
                    profile,
                    sweep.requests[-sweep.measured_requests :],
                    sweep.seen_per_s,
                )
            )
    for (kind, mix, rate), run_records in sorted(
        recorded_runs.load_pairs().items(), key=lambda engine_run: (engine_run[0][1], float(engine_run[0][2]))
    ):
        profile, requests = two.make_engines(kind), [engine_run.request for engine_run in run_records]
        per_s = (len(run_records) - 1) / (requests[-1].at_s - requests[0].at_s)
        if kind == "agg":
            profile, per_s, times = profile.scaled(two.CARD_SPEED), per_s / 2, QuantileSketch()
            for engine in (0, 1):
                times.merge(
                    _simulated_times(
                        profile, [engine_run.request for engine_run in run_records if engine_run.engine == engine]
                    )
                )
        else:
            machine = mean_plant(profile)
            prefill_engine, decode_engine = (machine.engine(role, Random(0)) for role in (Role.PREFILL, Role.DECODE))
            replay_remote_prefill(machine, requests, prefill_engine, decode_engine)
            times = decode_engine.metrics.itl
        comparisons.append(_row(f"{kind} {mix} {float(rate):g}", recorded_itl, times, profile, run_records, per_s))
    return comparisons


def _row(
    run: str,
    recorded: dict[str, float],
    times: QuantileSketch,
    profile: HardwareProfile,
    records: Sequence[RequestRecord],
    per_s: float,
) -> ItlComparison:
    prompts, outputs = ([float(getattr(one.request, name)) for one in records] for name in ("prompt", "output"))
    mix = from_samples(prompts, np.zeros(len(records)), outputs)
    itl = _law(profile, mix, per_s, receives=run.startswith("pd"))
    rho = float(itl.work.rho(per_s))
    return ItlComparison(run, rho, recorded[run], times.quantile_s(ITL_SHARE) or 0.0, itl_quantile_s(itl, per_s))


def _law(own: HardwareProfile, mix: Workload, per_s: float, receives: bool) -> InterTokenLatency:
    cool = _step_model(own.coefficients)
    if receives:
        transfer = KvTransfer(own.layers, own.block_size, step_factor=own.consumer_factor)
        return InterTokenLatency(decode_tier(cool, mix, transfer), None)
    products_s = mix.mean(cool.prefill_work_s(mix.uncached_tokens, mix.cached_tokens))
    share = per_s * (products_s + cool.sequence_s * mix.mean(mix.output_tokens))
    heat = min(MAX_HEAT, max(0.0, (share - own.cool_share) / (own.hot_share - own.cool_share)))
    hot = own.coefficients if own.hot is None else own.coefficients.interpolate(own.hot, heat)
    return InterTokenLatency(serve_tier(_step_model(hot), mix), own.budget)


def _step_model(c: StepCoefficients) -> StepModel:
    return StepModel(c.base, c.anypre, c.pretok, c.preattn, c.dec, c.ctx)


def _simulated_times(profile: HardwareProfile, requests: Sequence[RecordedRequest]) -> QuantileSketch:
    machine = mean_plant(profile)
    engine = machine.engine(Role.SERVE, Random(0))
    replay_one_engine(machine, requests, engine)
    return engine.metrics.itl


def _recorded_itl(row: ItlComparison) -> tuple[float, float]:
    return row.simulated_s, row.model_s


def _load_recorded() -> dict[str, float]:
    with (recorded_runs.DATA / "gaps.csv").open() as stream:
        return {row["run"]: float(row["itl_p99_ms"]) / 1e3 for row in csv.DictReader(stream)}


if __name__ == "__main__":
    main()
