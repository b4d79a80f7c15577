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

from bench.trust import records, sweeps
from bench.trust.check import Check
from bench.trust.records import DATA, Seen, Sweep
from plimsoll.sim import profile
from plimsoll.sim.profile import Profile

RUNS: Final = "twin.json"
REQUESTS: Final = "twin.csv.gz"


@dataclass(frozen=True)
class Twin:
    """One run. own: the profile that its steps had, with the front end that was measured on the machine it ran on."""

    sweep: Sweep
    own: Profile


def read(folder: Path = DATA) -> list[Twin]:
    """The recorded runs of a folder."""
    document = json.loads((folder / RUNS).read_text())
    requests: dict[str, list[Seen]] = {}
    for row in records.lines(folder / REQUESTS):
        requests.setdefault(row["run"], []).append(records.request(row))
    return [_twin(document, run, requests[run["name"]]) for run in document["runs"]]


def _twin(document: Mapping[str, Any], run: Mapping[str, Any], requests: list[Seen]) -> Twin:
    own = replace(
        profile.parse(document["profile"]),
        frontend=document["frontend_s"],
        frontend_token=document["frontend_token_s"],
    )
    seconds = requests[-1].sent.at_s - requests[0].sent.at_s
    sweep = Sweep(
        name=run["name"],
        model="twin",
        budget=own.budget,
        seen_per_s=(len(requests) - 1) / seconds,
        judged=len(requests),
        patience_s=run["patience_s"],
        rho=math.nan,
        requests=tuple(requests),
    )
    return Twin(sweep, own)


def checks(runs: list[Twin]) -> list[Check]:
    """Shares of each run at ten scales, and its quantiles."""
    return [check for one in runs for check in of_run(one)]


def of_run(one: Twin) -> list[Check]:
    group = f"twin {one.sweep.name}, {one.sweep.judged} requests"
    return sweeps.compared(sweeps.replay(one.sweep, one.own), group, None)
