"""`python -m bench foreign`: rows of the scoreboard on the replay engine of NVIDIA Dynamo, which others wrote.

    python -m bench foreign --rows step-60 ramp-120 --policies plimsoll static:3 dynamo-load:latency --seeds 3

Prints a line for each row and policy, and writes every run to `--out`. `--beside` plays all but Dynamo's in Plimsoll's
own simulator too, with the same law and requests. Their replay has no admission: it judges sizing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from bench.foreign.judge import Run, judged
from bench.foreign.law import Law
from bench.foreign.pilots import Following, Nobody, Plimsoll, planner
from bench.foreign.replay import ROUTERS, load, play
from bench.scoreboard.play import ground
from bench.scoreboard.rows import ROWS, Row
from plimsoll.api.v1alpha1 import parse
from plimsoll.core.picking.endpoint import Role
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


def main(words: Sequence[str]) -> int:
    """Play and print; 2 without the package, or for a row that cannot be played. No figure passes or fails."""
    arguments = _parser().parse_args(words)
    try:
        _board(arguments, load())
    except BadInput as error:
        print(f"left out: {error}; docs/scoreboard.md tells how this is run", file=sys.stderr)
        return 2
    return 0


_PLAIN: Final[Mapping[str, Any]] = {
    "frontend": 0.0, "frontend_token": 0.0, "hot": None, "hinge_sequences": 0, "producer_factor": 1.0,
    "consumer_factor": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A row with one seed's requests, the first at 0, on engines that both simulators can have: all alike, never hot,
    without noise or front end, each start as long as the mean of the row's, seconds."""

    row: Row
    scene: Scene
    asked: Sequence[Asked]
    start_s: float

    @classmethod
    def of(cls, row: Row, seed: int) -> Place:
        """Raises BadInput for a row that their replay, or the pilot that shows it to Plimsoll, cannot hold."""
        if not all(row.initial) or row.clients != "none":
            raise BadInput(f"{row.name}: tiers that are never empty, and clients that do not come back, are played")
        asked = row.load.make(seed)
        if asked[0].ids:
            raise BadInput(f"{row.name}: prompts that share beginnings are not played")
        asked = [replace(one, at_s=one.at_s - asked[0].at_s) for one in asked]
        known = ground(row, 1.0, asked).scene
        start_s = known.plant.start.mean_s
        own = replace(known.plant.profile, **_PLAIN)
        start = replace(known.plant.start, low_s=start_s, high_s=start_s, listed_s=())
        plant = replace(known.plant, profile=own, start=start, spread=0.0, noise=0.0)
        return cls(row, replace(known, plant=plant), asked, start_s)

    @property
    def initial(self) -> dict[Role, int]:
        """Replicas of each tier at first."""
        return dict(zip(self.scene.bounds, self.row.initial, strict=True))

    def judged(self, run: Run) -> dict[str, Any]:
        """A run's figures."""
        return judged(run, self.scene, self.row.load.length_s)


def _board(arguments: argparse.Namespace, package: SimpleNamespace) -> None:
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("a") as out:
        for name in arguments.rows:
            for policy in arguments.policies:
                runs = []
                for found in _runs(policy, ROWS[name], arguments, package):
                    out.write(json.dumps(found) + "\n")
                    runs.append(found)
                print(line(name, policy, runs), flush=True)


def _runs(policy: str, row: Row, arguments: argparse.Namespace, package: SimpleNamespace) -> Iterator[dict[str, Any]]:
    for seed in range(1, arguments.seeds + 1):
        about = {"row": row.name, "policy": policy, "seed": seed, "router": arguments.router}
        began_s = time.monotonic()
        place = Place.of(row, seed)
        run = theirs(policy, place, arguments.router, package)
        yield {**about, **place.judged(run), "wanted": run.wanted, "wall_s": round(time.monotonic() - began_s, 1)}
        if arguments.beside and not policy.startswith("dynamo"):
            for router in ("own", "own, no gate") if policy == "plimsoll" else ("own",):
                yield {**about, "router": router, **place.judged(ours(policy, place, gate=router == "own"))}


def theirs(policy: str, place: Place, router: str, package: SimpleNamespace) -> Run:
    """The policy on their simulator. Raises BadInput for one that cannot be there."""
    scene, asked, workers = place.scene, place.asked, place.initial
    law = Law.of(scene.plant.profile, asked)
    name, _, word = policy.partition(":")

    def run(pilot: Any, workers: dict[Role, int] = workers) -> Run:
        return play(asked, law, pilot, workers, place.start_s, place.row.load.length_s, router)

    if name == "static":
        return run(Nobody(), dict(registry.parse(policy, scene).initial or workers))
    if name == "follower":
        return run(Following(registry.parse(policy, scene), asked, workers))
    if name == "plimsoll":
        phases = scene.plant.start.draw(Random(0))
        return run(Plimsoll(parse(place.row.manifest()), scene.plant, phases, asked, workers))
    modes = {"dynamo-throughput": "slow", "dynamo-load": word}
    if name not in modes:
        raise BadInput(f"no policy {policy!r}: there are {', '.join(POLICIES)}, and followers")
    benchmark = {role: law.benchmark(scene.plant, role) for role in workers}
    with planner(modes[name], scene, benchmark, package) as pilot:
        return run(pilot)


class Ungated(Operator):
    """Sizes, and tells gateways nothing, which then let everybody in."""

    @property
    def told(self) -> None:
        return None


def ours(policy: str, place: Place, gate: bool) -> Run:
    """The same in Plimsoll's own simulator. gate: whether `plimsoll` has its own; others have what their words say."""
    service, scene, end_s = parse(place.row.manifest()), place.scene, place.row.load.length_s
    made = registry.parse(policy, scene)
    setting = Setting(made.initial or place.initial, end_s)
    seen: list[Visit] = []
    world = World(service, scene.plant, made, setting, seen.append)
    if not gate and world.operator is not None:
        world.operator = Ungated(service)
    world.run(place.asked)
    there: dict[Role, list[tuple[float, int]]] = {role: [] for role in setting.initial}
    wanted: dict[Role, list[tuple[float, int]]] = {role: [] for role in setting.initial}
    for at_s, role, desired, *counts in world.log.replicas:
        there[role].append((at_s, sum(counts)))
        wanted[role].append((at_s, desired))
    return Run(seen, {role: tier.paid_s(end_s) for role, tier in world.tiers.items()}, there, wanted)


def line(row: str, policy: str, runs: Sequence[dict[str, Any]]) -> str:
    """Means over the seeds, apart for each simulator."""
    found = []
    for router in dict.fromkeys(run["router"] for run in runs):
        some = [run for run in runs if run["router"] == router]
        mean = {key: np.mean([run[key] for run in some], axis=0) for key in _SHOWN if some[0][key] is not None}
        shares = " ".join(f"{100 * run['attainment']:.1f}" for run in some)
        times = " ".join(f"{key[:-2]} {1000 * mean[key]:.1f} ms" for key in _SHOWN[-4:])
        peak, turns, later = ("/".join(f"{one:.4g}" for one in mean.get(key, ())) for key in _SHOWN[2:5])
        found.append(
            f"{row} {policy} {router}: {100 * mean['attainment']:.1f} % ({shares}), {mean['gpu_hours']:.3f} GPU-hours, "
            f"at most {peak}{f', {later} after an hour' if later else ''}, turned {turns} times, "
            f"{mean['passed']:g} of {mean['windows']:g} windows; {times}"
        )
    return "\n".join(found)


_SHOWN: Final = (
    "attainment", "gpu_hours", "peak", "turns", "later", "passed", "windows",
    "ttft_p50_s", "ttft_p95_s", "tpot_p50_s", "tpot_p95_s",
)  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench foreign", description=__doc__)
    parser.add_argument("--rows", nargs="+", default=["step-60"], choices=ROWS, metavar="ROW")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--router", choices=ROUTERS, default=ROUTERS[0])
    parser.add_argument("--beside", action="store_true", help="all but Dynamo's in Plimsoll's simulator too")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser
