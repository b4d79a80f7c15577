"""Gaps between tokens: recorded on H200s, simulated, and by the law that sizes (`plimsoll.core.gaps`).

`python -m bench.trust.gaps` prints a table. Recorded percentiles are over all gaps of a run's measured window, as
clients saw them; the plant replays the same arrivals, and the law has their lengths and their rate, with the steps of a
card that is as hot as that rate makes it. No bound was promised for them.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from bench.trust import pairs as two
from bench.trust import records
from bench.trust.drive import Sent, alone, legs, plant
from bench.trust.records import Seen
from bench.trust.sweeps import server
from plimsoll.core.gaps import SHARE, Gaps, gap_s
from plimsoll.core.latency import KvTransfer, StepModel, decode_tier, serve_tier
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.workload import Workload, from_samples
from plimsoll.sim.pace import HOTTEST
from plimsoll.sim.profile import Coefficients, Profile
from plimsoll.sim.times import Times

_FRESH = ("earlier 2048", "earlier 8192")  # their prompts were cached


@dataclass(frozen=True)
class Row:
    """The 99th percentile of a run's gaps, s."""

    run: str
    rho: float
    recorded_s: float
    simulated_s: float
    law_s: float


def main() -> None:
    print("| run | rho | recorded p99, ms | simulated | by the law |", "|---|---|---|---|---|", sep="\n")
    for row in rows():
        ours = [f"{1e3 * found:.0f} ({100 * (found / row.recorded_s - 1):+.0f} %)" for found in _found(row)]
        print(f"| {row.run} | {row.rho:.2f} | {1e3 * row.recorded_s:.0f} | {ours[0]} | {ours[1]} |")


def rows() -> list[Row]:
    """All runs of which gaps were recorded."""
    recorded = _recorded()
    found = []
    for sweep in records.sweeps():
        if sweep.name not in _FRESH:
            own = server(sweep.model, sweep.budget)
            times = _alone(own, [one.sent for one in sweep.requests])
            found.append(_row(sweep.name, recorded, times, own, sweep.requests[-sweep.judged :], sweep.seen_per_s))
    for (kind, mix, rate), seen in sorted(records.pairs().items(), key=lambda one: (one[0][1], float(one[0][2]))):
        own, sent = two.engines(kind), [one.sent for one in seen]
        per_s = (len(seen) - 1) / (sent[-1].at_s - sent[0].at_s)
        if kind == "agg":
            own, per_s, times = own.scaled(two.CARDS), per_s / 2, Times()
            for engine in (0, 1):
                times.add(_alone(own, [one.sent for one in seen if one.engine == engine]))
        else:
            machine = plant(own)
            reader, writer = (machine.engine(role, Random(0)) for role in (Role.PREFILL, Role.DECODE))
            legs(machine, sent, reader, writer)
            times = writer.meters.gaps
        found.append(_row(f"{kind} {mix} {float(rate):g}", recorded, times, own, seen, per_s))
    return found


def _row(run: str, recorded: dict[str, float], times: Times, own: Profile, seen: Sequence[Seen], per_s: float) -> Row:
    prompts, outputs = ([float(getattr(one.sent, name)) for one in seen] for name in ("prompt", "output"))
    mix = from_samples(prompts, np.zeros(len(seen)), outputs)
    gaps = _law(own, mix, per_s, receives=run.startswith("pd"))
    rho = float(gaps.work.rho(per_s))
    return Row(run, rho, recorded[run], times.quantile_s(SHARE) or 0.0, gap_s(gaps, per_s))


def _law(own: Profile, mix: Workload, per_s: float, receives: bool) -> Gaps:
    cool = _steps(own.coefficients)
    if receives:
        transfer = KvTransfer(own.layers, own.block_size, step_factor=own.consumer_factor)
        return Gaps(decode_tier(cool, mix, transfer), None)
    products_s = mix.mean(cool.prefill_work_s(mix.uncached_tokens, mix.cached_tokens))
    share = per_s * (products_s + cool.sequence_s * mix.mean(mix.output_tokens))
    heat = min(HOTTEST, max(0.0, (share - own.cool_share) / (own.hot_share - own.cool_share)))
    hot = own.coefficients if own.hot is None else own.coefficients.towards(own.hot, heat)
    return Gaps(serve_tier(_steps(hot), mix), own.budget)


def _steps(c: Coefficients) -> StepModel:
    return StepModel(c.base, c.anypre, c.pretok, c.preattn, c.dec, c.ctx)


def _alone(own: Profile, sent: Sequence[Sent]) -> Times:
    machine = plant(own)
    engine = machine.engine(Role.SERVE, Random(0))
    alone(machine, sent, engine)
    return engine.meters.gaps


def _found(row: Row) -> tuple[float, float]:
    return row.simulated_s, row.law_s


def _recorded() -> dict[str, float]:
    with (records.DATA / "gaps.csv").open() as stream:
        return {row["run"]: float(row["itl_p99_ms"]) / 1e3 for row in csv.DictReader(stream)}


if __name__ == "__main__":
    main()
