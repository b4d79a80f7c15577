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

from bench.dynamo_replay.controllers import ConstantReplicas, PlimsollController, ReactiveController, planner
from bench.dynamo_replay.figures import ReplayRun, run_figures
from bench.dynamo_replay.replay import ROUTERS, load_package, play
from bench.dynamo_replay.step_tables import StepLaw
from bench.scoreboard.rows import BOARD_ROWS, BoardRow
from bench.scoreboard.simulate_run import search_space
from plimsoll.api.v1alpha1 import parse
from plimsoll.core.types import Role
from plimsoll.sim.attempt import Attempt, TraceRequest
from plimsoll.sim.errors import BadInput
from plimsoll.sim.operator import SimulatedOperator
from plimsoll.sim.policies import registry
from plimsoll.sim.policies.base import PolicyContext
from plimsoll.sim.run_config import RunConfig
from plimsoll.sim.simulator import Simulator

OUT: Final = Path("build/bench/foreign.jsonl")
POLICIES: Final = (
    "plimsoll", "static:3", "static:4", "dynamo-throughput", "dynamo-load:throughput", "dynamo-load:latency",
    "dynamo-load:sla",
)  # fmt: skip


def main(words: Sequence[str]) -> int:
    """Play and print; 2 without the package, or for a row that cannot be played. No figure passes or fails."""
    arguments = _parser().parse_args(words)
    try:
        _print_board(arguments, load_package())
    except BadInput as error:
        print(f"left out: {error}; docs/evaluation/scoreboard.md tells how this is run", file=sys.stderr)
        return 2
    return 0


_IDEAL_PROFILE: Final[Mapping[str, Any]] = {
    "frontend": 0.0, "frontend_token": 0.0, "hot": None, "hinge_sequences": 0, "producer_factor": 1.0,
    "consumer_factor": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class ReplayCase:
    """A row with one seed's requests, the first at 0, on engines that both simulators can have: all alike, never hot,
    without noise or front end, each start as long as the mean of the row's, seconds."""

    row: BoardRow
    scene: PolicyContext
    requests: Sequence[TraceRequest]
    start_s: float

    @classmethod
    def of(cls, row: BoardRow, seed: int) -> ReplayCase:
        """Raises BadInput for a row that their replay, or the pilot that shows it to Plimsoll, cannot hold."""
        if not all(row.initial) or row.clients != "none":
            raise BadInput(f"{row.name}: tiers that are never empty, and clients that do not come back, are played")
        requests = row.load.make(seed)
        if requests[0].block_ids:
            raise BadInput(f"{row.name}: prompts that share beginnings are not played")
        requests = [replace(request, at_s=request.at_s - requests[0].at_s) for request in requests]
        platform = search_space(row, 1.0, requests).context
        start_s = platform.plant.startup.mean_s
        profile = replace(platform.plant.profile, **_IDEAL_PROFILE)
        start = replace(platform.plant.startup, uniform_min_s=start_s, uniform_max_s=start_s, samples_s=())
        plant = replace(platform.plant, profile=profile, startup=start, spread=0.0, noise=0.0)
        return cls(row, replace(platform, plant=plant), requests, start_s)

    @property
    def initial(self) -> dict[Role, int]:
        """Replicas of each tier at first."""
        return dict(zip(self.scene.bounds, self.row.initial, strict=True))

    def figures(self, run: ReplayRun) -> dict[str, Any]:
        """A run's figures."""
        return run_figures(run, self.scene, self.row.load.length_s)


def _print_board(arguments: argparse.Namespace, package: SimpleNamespace) -> None:
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("a") as out:
        for name in arguments.rows:
            for policy in arguments.policies:
                runs = []
                for runs_by_policy in _runs(policy, BOARD_ROWS[name], arguments, package):
                    out.write(json.dumps(runs_by_policy) + "\n")
                    runs.append(runs_by_policy)
                print(print_line(name, policy, runs), flush=True)


def _runs(
    policy: str, row: BoardRow, arguments: argparse.Namespace, package: SimpleNamespace
) -> Iterator[dict[str, Any]]:
    for seed in range(1, arguments.seeds + 1):
        label = {"row": row.name, "policy": policy, "seed": seed, "router": arguments.router}
        began_s = time.monotonic()
        case = ReplayCase.of(row, seed)
        run = play_dynamo(policy, case, arguments.router, package)
        yield {
            **label,
            **case.figures(run),
            "wanted": run.desired_counts,
            "wall_s": round(time.monotonic() - began_s, 1),
        }
        if arguments.beside and not policy.startswith("dynamo"):
            for router in ("own", "own, no gate") if policy == "plimsoll" else ("own",):
                yield {
                    **label,
                    "router": router,
                    **case.figures(play_plimsoll(policy, case, admission=router == "own")),
                }


def play_dynamo(policy: str, case: ReplayCase, router: str, package: SimpleNamespace) -> ReplayRun:
    """The policy on their simulator. Raises BadInput for one that cannot be there."""
    scene, requests, workers = case.scene, case.requests, case.initial
    step_law = StepLaw.of(scene.plant.profile, requests)
    name, _, option = policy.partition(":")

    def run(controller: Any, workers: dict[Role, int] = workers) -> ReplayRun:
        return play(requests, step_law, controller, workers, case.start_s, case.row.load.length_s, router)

    if name == "static":
        return run(ConstantReplicas(), dict(registry.parse(policy, scene).initial_replicas or workers))
    if name == "follower":
        return run(ReactiveController(registry.parse(policy, scene), requests, workers))
    if name == "plimsoll":
        phases = scene.plant.startup.sample(Random(0))
        return run(PlimsollController(parse(case.row.manifest()), scene.plant, phases, requests, workers))
    modes = {"dynamo-throughput": "slow", "dynamo-load": option}
    if name not in modes:
        raise BadInput(f"no policy {policy!r}: there are {', '.join(POLICIES)}, and followers")
    benchmark = {role: step_law.benchmark(scene.plant, role) for role in workers}
    with planner(modes[name], scene, benchmark, package) as controller:
        return run(controller)


class UngatedOperator(SimulatedOperator):
    """Sizes, and tells gateways nothing, which then let everybody in."""

    @property
    def published(self) -> None:
        return None


def play_plimsoll(policy: str, case: ReplayCase, admission: bool) -> ReplayRun:
    """Run the case in Plimsoll's own simulator. admission: whether `plimsoll` uses its own admission control; other
    policies use what their options say.
    """
    service, scene, end_s = parse(case.row.manifest()), case.scene, case.row.load.length_s
    policy_object = registry.parse(policy, scene)
    setting = RunConfig(policy_object.initial_replicas or case.initial, end_s)
    attempts: list[Attempt] = []
    world = Simulator(service, scene.plant, policy_object, setting, attempts.append)
    if not admission and world.operator is not None:
        world.operator = UngatedOperator(service)
    world.run(case.requests)
    ready_counts: dict[Role, list[tuple[float, int]]] = {role: [] for role in setting.initial}
    desired_counts: dict[Role, list[tuple[float, int]]] = {role: [] for role in setting.initial}
    for at_s, role, desired, *counts in world.log.replicas:
        ready_counts[role].append((at_s, sum(counts)))
        desired_counts[role].append((at_s, desired))
    return ReplayRun(
        attempts,
        {role: tier.replica_seconds(end_s) for role, tier in world.tiers.items()},
        ready_counts,
        desired_counts,
    )


def print_line(row: str, policy: str, runs: Sequence[dict[str, Any]]) -> str:
    """Means over the seeds, apart for each simulator."""
    lines = []
    for router in dict.fromkeys(simulator["router"] for simulator in runs):
        simulator_runs = [simulator for simulator in runs if simulator["router"] == router]
        mean = {
            key: np.mean([simulator[key] for simulator in simulator_runs], axis=0)
            for key in _COLUMNS
            if simulator_runs[0][key] is not None
        }
        shares = " ".join(f"{100 * simulator['attainment']:.1f}" for simulator in simulator_runs)
        times = " ".join(f"{key[:-2]} {1000 * mean[key]:.1f} ms" for key in _COLUMNS[-4:])
        peak, turns, later = (
            "/".join(f"{figures_of_run:.4g}" for figures_of_run in mean.get(key, ())) for key in _COLUMNS[2:5]
        )
        lines.append(
            f"{row} {policy} {router}: {100 * mean['attainment']:.1f} % ({shares}), {mean['gpu_hours']:.3f} GPU-hours, "
            f"at most {peak}{f', {later} after an hour' if later else ''}, turned {turns} times, "
            f"{mean['passed']:g} of {mean['windows']:g} windows; {times}"
        )
    return "\n".join(lines)


_COLUMNS: Final = (
    "attainment", "gpu_hours", "peak", "turns", "later", "passed", "windows",
    "ttft_p50_s", "ttft_p95_s", "tpot_p50_s", "tpot_p95_s",
)  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench foreign", description=__doc__)
    parser.add_argument("--rows", nargs="+", default=["step-60"], choices=BOARD_ROWS, metavar="ROW")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--router", choices=ROUTERS, default=ROUTERS[0])
    parser.add_argument("--beside", action="store_true", help="all but Dynamo's in Plimsoll's simulator too")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser
