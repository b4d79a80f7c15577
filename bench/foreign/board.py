"""`python -m bench foreign`: the scoreboard's step on the replay engine of NVIDIA Dynamo, which others wrote.

    python -m bench foreign --start-up 60 --policies plimsoll static:3 dynamo-load:latency --seeds 3

Prints a line for each policy and start-up time, and writes every run to `--out`. `--beside` plays Plimsoll and constant
fleets in Plimsoll's own simulator too, with the same law and requests. Their replay has no admission: it judges sizing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from bench.foreign.law import Law
from bench.foreign.pilots import Nobody, Plimsoll, planner
from bench.foreign.replay import ROUTERS, Run, Seen, load, play
from bench.scoreboard.play import HOUR_S, ground
from bench.scoreboard.rows import ROWS
from plimsoll.api.v1alpha1 import parse
from plimsoll.core.picking.endpoint import Role
from plimsoll.core.slo import Slo
from plimsoll.sim.errors import BadInput
from plimsoll.sim.operator import Operator
from plimsoll.sim.policies import registry
from plimsoll.sim.policies.base import Scene
from plimsoll.sim.setting import Setting
from plimsoll.sim.visit import Asked, Visit
from plimsoll.sim.world import World

OUT: Final = Path("build/bench/foreign.jsonl")
POLICIES: Final = (
    "plimsoll", "static:3", "static:4", "dynamo-throughput", "dynamo-load:throughput", "dynamo-load:latency",
    "dynamo-load:sla",
)  # fmt: skip
_ROW: Final = "step-60"


def main(words: Sequence[str]) -> int:
    """Play and print; 2 without the package. No figure passes or fails."""
    arguments = _parser().parse_args(words)
    try:
        _board(arguments, load())
    except BadInput as error:
        print(f"left out: {error}; docs/scoreboard.md tells how this is run", file=sys.stderr)
        return 2
    return 0


def _board(arguments: argparse.Namespace, package: SimpleNamespace) -> None:
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("a") as out:
        for start_s in arguments.start_up:
            for policy in arguments.policies:
                runs = []
                for found in _runs(policy, start_s, arguments, package):
                    out.write(json.dumps(found) + "\n")
                    runs.append(found)
                print(line(policy, start_s, runs), flush=True)


def _runs(
    policy: str, start_s: float, arguments: argparse.Namespace, package: SimpleNamespace
) -> Iterator[dict[str, Any]]:
    for seed in range(1, arguments.seeds + 1):
        about = {"policy": policy, "start_up_s": start_s, "seed": seed, "router": arguments.router}
        began_s = time.monotonic()
        scene, asked, end_s = scenery(start_s, seed)
        assert scene.slo is not None
        run = _theirs(policy, scene, asked, (start_s, end_s, arguments.router), package)
        figures = judged(run, len(asked), scene.slo)
        yield {**about, **figures, "orders": run.orders, "wall_s": round(time.monotonic() - began_s, 1)}
        if arguments.beside and not policy.startswith("dynamo"):
            for router in ("own", "own, no gate") if policy == "plimsoll" else ("own",):
                ours = _ours(policy, scene, asked, end_s, gate=router == "own")
                yield {**about, "router": router, **judged(ours, len(asked), scene.slo)}


def scenery(start_s: float, seed: int) -> tuple[Scene, list[Asked], float]:
    """The row's machine, mean, without noise or front end, its requests, and its length."""
    row = replace(ROWS[_ROW], start_up=f"{start_s:g}")
    asked = row.load.make(seed)
    known = ground(row, 1.0, asked)
    own = replace(known.scene.plant.profile, frontend=0.0, frontend_token=0.0)
    plant = replace(known.scene.plant, profile=own, spread=0.0, noise=0.0)
    return replace(known.scene, plant=plant), asked, row.load.length_s


def _theirs(
    policy: str, scene: Scene, asked: Sequence[Asked], how: tuple[float, float, str], package: SimpleNamespace
) -> Run:
    plant, row = scene.plant, ROWS[_ROW]
    law = Law.of(plant.profile, asked)
    name, _, word = policy.partition(":")

    def run(pilot: Any, workers: int) -> Run:
        return play(asked, law, pilot, workers, *how)

    if name == "static":
        return run(Nobody(), int(word))
    if name == "plimsoll":
        phases = plant.start.draw(Random(0))
        return run(Plimsoll(parse(row.manifest()), plant, phases, asked, row.initial[0]), row.initial[0])
    modes = {"dynamo-throughput": "slow", "dynamo-load": word}
    if name not in modes:
        raise BadInput(f"no policy {policy!r}: there are {', '.join(POLICIES)}")
    with planner(modes[name], scene, law.benchmark(plant), package) as pilot:
        return run(pilot, row.initial[0])


class Ungated(Operator):
    """Sizes, and tells gateways nothing, which then let everybody in."""

    @property
    def told(self) -> None:
        return None


def _ours(policy: str, scene: Scene, asked: Sequence[Asked], end_s: float, gate: bool) -> Run:
    """The same in Plimsoll's own simulator. gate: whether `plimsoll` has its own; no other policy has one."""
    row, made = ROWS[_ROW], registry.parse(policy, scene)
    setting = Setting(made.initial or {Role.SERVE: row.initial[0]}, end_s)
    seen: list[Seen] = []

    def take(visit: Visit) -> None:
        if visit.ttft_s is not None:
            seen.append(Seen(visit.ttft_s, visit.tpot_s or 0.0))

    world = World(parse(row.manifest()), scene.plant, made, setting, take)
    if not gate and world.operator is not None:
        world.operator = Ungated(parse(row.manifest()))
    world.run(asked)
    peak = max(sum(counts[3:]) for counts in world.log.replicas)
    return Run(tuple(seen), world.tiers[Role.SERVE].paid_s(end_s), peak)


def judged(run: Run, offered: int, slo: Slo) -> dict[str, Any]:
    """A run's figures; requests that did not end are missed."""
    first = np.array([one.ttft_s for one in run.requests])
    token = np.array([one.tpot_s for one in run.requests])
    met = (first <= (slo.ttft_s or np.inf)) & (token <= (slo.tpot_s or np.inf))
    shown = {"ttft": first, "tpot": token} if len(first) else {}
    return {
        "offered": offered,
        "attainment": float(met.sum()) / offered,
        "gpu_hours": run.gpu_s / HOUR_S,
        "peak": run.peak,
        **{f"{name}_p{q}_s": float(np.percentile(times, q)) for name, times in shown.items() for q in (50, 95)},
    }


def line(policy: str, start_s: float, runs: Sequence[dict[str, Any]]) -> str:
    """Means over the seeds, apart for each simulator."""
    found = []
    for router in dict.fromkeys(run["router"] for run in runs):
        some = [run for run in runs if run["router"] == router]
        mean = {key: float(np.mean([run[key] for run in some])) for key, value in some[0].items() if key in _SHOWN}
        shares = " ".join(f"{100 * run['attainment']:.1f}" for run in some)
        times = " ".join(f"{key[:-2]} {1000 * mean[key]:.1f} ms" for key in _SHOWN[3:])
        found.append(
            f"{start_s:g} s {policy} {router}: {100 * mean['attainment']:.1f} % ({shares}), "
            f"{mean['gpu_hours']:.3f} GPU-hours, at most {mean['peak']:g}; {times}"
        )
    return "\n".join(found)


_SHOWN: Final = ("attainment", "gpu_hours", "peak", "ttft_p50_s", "ttft_p95_s", "tpot_p50_s", "tpot_p95_s")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench foreign", description=__doc__)
    parser.add_argument("--start-up", nargs="+", type=float, default=[60.0], metavar="S")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--router", choices=ROUTERS, default=ROUTERS[0])
    parser.add_argument("--beside", action="store_true", help="all but Dynamo's in Plimsoll's simulator too")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser
