"""`python -m bench`: every measurement in turn, printed and written to build/bench/report.json; `scoreboard`: policies;
`trust`: the simulator against theory, laws and records; `plan`: the planner beside others and recorded runs; `foreign`:
Plimsoll's sizing on a simulator that others wrote; `mismatch`: engines that differ from what they announce;
`ablation`: the law without one of its mechanisms at a time; `endpoint-picker`: its cost behind another gateway;
`figures`: the size of code and docs.

Nothing here passes or fails but `trust`, which exits 1 where a bound is not met: a figure is for a person to judge. The
targets stand beside the figures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

from bench import figures as code_figures
from bench.ablation import command as ablation
from bench.controlplane import apply_latency, code_rollout, decision_latency, idle_footprint, pod_startup
from bench.dynamo_replay import command as foreign
from bench.gateway import endpoint_picker, request_cost
from bench.mismatch import command as mismatch
from bench.planning import command as planning
from bench.scoreboard import command
from bench.trust import command as trust
from e2e.cluster.settings import ROOT
from e2e.lib import stack
from e2e.lib.kube import Cluster

REPORT = ROOT / "build" / "bench" / "report.json"

MEASUREMENTS: dict[str, Callable[[Cluster], dict[str, object]]] = {
    "added latency of the gateway at 50 requests/s (target: p50 2 ms)": lambda _: request_cost.figures(50.0, 20.0),
    "added latency of the gateway at 500 requests/s (target: p99 2 ms)": lambda _: request_cost.figures(500.0, 20.0),
    "manifest to objects (target: 2 s)": apply_latency.measure,
    "request to the first decision that knows of it (target: 2 s)": decision_latency.measure,
    "operator at rest with 10 services (target: 120 MB, 1 % of a core)": idle_footprint.measure,
    "engine pod start (target: vLLM's own time + 3 s)": pod_startup.measure,
    "edit of operator code to running (target: 40 s)": code_rollout.measure,
}


def main(titles: list[str]) -> int:
    """Run the measurements whose title has one of the words, all of them without words."""
    report: dict[str, object] = {}
    with stack.connect_cluster() as cluster:
        stack.install(cluster)
        for title, measure in MEASUREMENTS.items():
            if titles and not any(word in title for word in titles):
                continue
            print(f"== {title}", flush=True)
            report[title] = figures = measure(cluster)
            for name, value in figures.items():
                print(f"   {name}: {value}", flush=True)
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    boards = {
        "scoreboard": command.main,
        "trust": trust.main,
        "plan": planning.main,
        "foreign": foreign.main,
        "mismatch": mismatch.main,
        "ablation": ablation.main,
        "endpoint-picker": endpoint_picker.main,
        "figures": code_figures.main,
    }
    sys.exit(boards.get(sys.argv[1] if len(sys.argv) > 1 else "", lambda _: main(sys.argv[1:]))(sys.argv[2:]))
