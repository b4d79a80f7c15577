"""What the core's laws and its simulated engines say of the runs of `pair`, written before them.

    python -m bench.hardware.foresee --out FILE --run agg:TRACE --run pd:TRACE --run pd:TRACE:1000 ...

Problem: whether a pair beats two engines that do both is a question for sizing, so sizing has to answer it first.
Idea: the same words as `pair` takes, of the same traces, two cards. *Law*: the closed forms that `plimsoll plan` uses,
p95 of the time to first token and of the pace. Where some prompts are read in place it has the pace alone, with the
stall of each prompt where it is read. *Engines*: the simulator's, driven with the recorded arrivals, engines taken in
turn; gaps are those between the ends of an engine's steps. Profiles and cards are those of the earlier machines.
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

from bench.hardware import sides, traces
from bench.hardware.pair import Load
from bench.hardware.summary import Seen
from bench.trust.drive import Got, Sent, alone, legs, plant
from plimsoll.cli.plan import measured
from plimsoll.core.knee import profile
from plimsoll.core.latency import TierWork, decode_tier, serve_tier, tail_factor
from plimsoll.core.load_line import slo_rate
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.planning.arrange import NVLINK_BYTES_PER_S, aggregated, pair
from plimsoll.core.planning.expect import expected
from plimsoll.core.planning.machine import Machine
from plimsoll.core.slo import Slo
from plimsoll.core.workload import Workload, from_samples
from plimsoll.sim import profile as profiles
from plimsoll.sim.blocks import Blocks
from plimsoll.sim.engine import Engine
from plimsoll.sim.meters import Meters
from plimsoll.sim.pace import Pace
from plimsoll.sim.plant import Plant
from plimsoll.sim.profile import Profile
from plimsoll.sim.steps import Run

KV_TOKENS, SEQUENCES, BLOCK = 919_824, 1024, 128  # of an engine alone on its card, and vLLM's own most
SLO: Final = Slo(0.95, ttft_s=0.5, tpot_s=0.05)
_MS: Final = 1e3


class Timed(Engine):
    """An engine whose steps' ends are kept; it must not leap."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps_s: list[float] = []

    def _complete(self, run: Run) -> None:
        super()._complete(run)
        if run.emits:
            self.steps_s.append(run.end_s)


def card(name: str, kv_tokens: int) -> Profile:
    """A profile as the engines of `pair` are started."""
    return replace(profiles.load(name), kv_tokens=kv_tokens, max_num_seqs=SEQUENCES)


def timed(own: Plant, role: Role) -> Timed:
    """An engine of the plant, without spread or noise."""
    one = own.of_role(role)
    blocks, pace = Blocks(one.kv_tokens // one.block_size, one.block_size), Pace(one, 0.0, Random(0))
    return Timed(one.max_num_seqs, one.budget, blocks, pace, own.wire(), Meters(one.max_model_len), False)


def engines(asked: Load, sent: Sequence[Sent], each: Profile) -> tuple[list[Got], list[Timed], list[int], int]:
    """What became of each request, the engines that decode, which of them each was on, and all preemptions."""
    if asked.mode == "agg":
        own = plant(replace(each, budget=asked.budget))
        both = [timed(own, Role.SERVE) for _ in range(2)]
        got: dict[int, Got] = {}
        for number, one in enumerate(both):
            places = range(number, len(sent), 2)
            got.update(zip(places, alone(own, [sent[place] for place in places], one), strict=True))
        on = [place % 2 for place in range(len(sent))]
        return [got[place] for place in range(len(sent))], both, on, sum(one.meters.preemptions for one in both)
    own = plant(replace(each, block_size=BLOCK))
    reader, writer = own.engine(Role.PREFILL, Random(0)), timed(own, Role.DECODE)
    found = legs(own, sent, reader, writer, asked.remote_from)
    return found, [writer], [0] * len(sent), writer.meters.preemptions


def simulated(asked: Load, requests: Sequence[traces.Request], own: Profile) -> dict[str, Any]:
    """The figures of `sides` for the simulated engines, with p99 of all gaps between tokens."""
    sent = [Sent(one.at_s, one.prompt, one.output) for one in requests]
    got, decoding, on, preempted = engines(asked, sent, own)
    ends = [np.asarray(one.steps_s) for one in decoding]
    seen, lengths = [], []
    for each, found, number in zip(sent, got, on, strict=True):
        steps = ends[number]
        first, last = np.searchsorted(steps, (each.at_s + found.first_s - 1e-9, each.at_s + found.last_s + 1e-9))
        between = np.diff(steps[first:last])
        pace = found.tpot_s(each.output) if each.output > 1 else None
        longest = float(between.max()) if between.size else None
        seen.append(Seen(each.at_s, each.output, found.first_s, pace, longest, True))
        if sides.WARM_S <= each.at_s < sides.WARM_S + sides.WINDOW_S:
            lengths.append(between)
    figures = sides.judged(seen)
    pooled = np.concatenate(lengths)
    return figures | {"p99_gap_ms": float(np.percentile(pooled, 99)) * _MS, "preempted": preempted}


def machine(each: Profile, budget: int) -> Machine:
    """One of the two cards, as `plimsoll plan` sees it."""
    found = measured(replace(each, budget=budget), 1)
    return next(one for one in found if one.limits.token_budget == budget)


def law(asked: Load, requests: Sequence[traces.Request], each: Profile) -> dict[str, Any]:
    """The closed forms at the judged rate, ms; the line is that of the arrangement with one engine of each kind."""
    own, workload = machine(each, asked.budget), _workload(requests)
    judged = [one for one in requests if sides.WARM_S <= one.at_s < sides.WARM_S + sides.WINDOW_S]
    rate = len(judged) / sides.WINDOW_S
    if asked.mode == "agg":
        one = aggregated(own, workload, SLO)
        says = expected((one,), rate, (2,))
        return _told(says.p95_ttft_s, says.p95_tpot_s) | {
            "line_rps": float(slo_rate(profile(one), 2, admission=False)[0])
        }
    away = [one for one in requests if one.prompt >= asked.remote_from]
    reader, _ = pair(own, own, _workload(away), SLO, NVLINK_BYTES_PER_S)
    share = len(away) / len(requests)
    says = expected((reader,), share * rate, (1,))
    work = _mixed(own, workload, asked.remote_from)
    rho = float(work.rho(rate))
    pace = float(work.base_s / (1 - rho) * max(1.0, float(tail_factor(work, rho, 0.95)))) if rho < 1 else np.inf
    told = _told(says.p95_ttft_s, pace) | {"decode_rho": rho}
    return told | {"line_rps": float(slo_rate(profile(reader), 1, admission=False)[0]) / share}


def _mixed(own: Machine, workload: Workload, remote_from: int) -> TierWork:
    """A decode engine's work where prompts below a length are read in place."""
    away = decode_tier(own.decoding(workload, SLO.tpot_s or np.inf), workload, own.transfer)
    near = serve_tier(own.serving(workload, SLO.tpot_s or np.inf), workload)
    local = workload.prompt_tokens < remote_from
    return replace(away, stall_s=np.where(local, near.stall_s, away.stall_s))


def _told(ttft_s: float | None, tpot_s: float | None) -> dict[str, Any]:
    return {
        name: None if value is None or not np.isfinite(value) else value * _MS
        for name, value in (("p95_ttft_ms", ttft_s), ("p95_tpot_ms", tpot_s))
    }


def _workload(requests: Sequence[traces.Request]) -> Workload:
    prompts, outputs = ([getattr(one, name) for one in requests] for name in ("prompt", "output"))
    return from_samples(prompts, [0.0] * len(requests), outputs)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.foresee", description=__doc__)
    parser.add_argument("--run", action="append", required=True, metavar="agg|pd:TRACE[:TOKENS]")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--profile", default="h200-8b", help="of either card")
    parser.add_argument("--kv-tokens", type=int, default=KV_TOKENS, help="of each engine's cache")
    given = parser.parse_args(words)
    told, own = [], card(given.profile, given.kv_tokens)
    for number, word in enumerate(given.run):
        asked = Load.parse(number, word)
        requests = traces.read(asked.trace)
        one: dict[str, Any] = {"run": asked.name}
        one["sha256"] = traces.digest(asked.trace)
        one["law"] = law(asked, requests, own)
        one["engines"] = simulated(asked, requests, own)
        one = _rounded(one)
        told.append(one)
        print(json.dumps(one), flush=True)
    if given.out is not None:
        given.out.write_text(
            json.dumps({"profile": given.profile, "kv_tokens": given.kv_tokens, "runs": told}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
