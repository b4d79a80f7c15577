"""The simulator against its twin: real vLLM whose steps sleep for the time that the simulator's plant takes.

Problem: a record of a GPU differs from the simulation in the schedule and in the time of a step, and one error may hide
the other.
Idea: here both sides have the same law of the step. What differs is the schedule, vLLM's front end, and how late the
machine that ran the twin was. `python -m bench.twin` makes the record; this replays its arrivals as they were. Times
are the accelerator's: what the clock of a slowed-down twin showed, divided by the scale.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench.trust import recorded_runs, sweep_replay
from bench.trust.check import SimulatorCheck
from bench.trust.recorded_runs import DATA, RequestRecord, SweepRun
from plimsoll.sim import profile
from plimsoll.sim.profile import HardwareProfile

RUNS_FILE: Final = "twin.json"
REQUESTS_FILE: Final = "twin.csv.gz"


@dataclass(frozen=True)
class TwinRun:
    """One run. profile: its step profile, with the front-end times measured on its machine."""

    sweep: SweepRun
    profile: HardwareProfile


def read_runs(folder: Path = DATA) -> list[TwinRun]:
    """The recorded runs of a folder."""
    document = json.loads((folder / RUNS_FILE).read_text())
    requests: dict[str, list[RequestRecord]] = {}
    for row in recorded_runs.lines(folder / REQUESTS_FILE):
        requests.setdefault(row["run"], []).append(recorded_runs.parse_record(row))
    return [_to_run(document, run, requests[run["name"]]) for run in document["runs"]]


def _to_run(document: Mapping[str, Any], run: Mapping[str, Any], requests: list[RequestRecord]) -> TwinRun:
    profile_used = replace(
        profile.parse(document["profile"]),
        frontend=document["frontend_s"],
        frontend_token=document["frontend_token_s"],
    )
    seconds = requests[-1].request.at_s - requests[0].request.at_s
    sweep = SweepRun(
        name=run["name"],
        model="twin",
        budget=profile_used.budget,
        seen_per_s=(len(requests) - 1) / seconds,
        measured_requests=len(requests),
        patience_s=run["patience_s"],
        rho=math.nan,
        requests=tuple(requests),
    )
    return TwinRun(sweep, profile_used)


def checks(runs: list[TwinRun]) -> list[SimulatorCheck]:
    """Shares of each run at ten scales, and its quantiles."""
    return [check for twin_run in runs for check in run_checks(twin_run)]


def run_checks(twin_run: TwinRun) -> list[SimulatorCheck]:
    group = f"twin {twin_run.sweep.name}, {twin_run.sweep.measured_requests} requests"
    return sweep_replay.comparison_checks(sweep_replay.replay_sweep(twin_run.sweep, twin_run.profile), group, None)
