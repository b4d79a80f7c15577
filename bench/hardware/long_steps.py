"""Checks whether steps beyond some number of tokens take longer than the measured model: the effect of a slow host.

    python -m bench.hardware.long_steps DIR d 06.pd.chat24.900

Problem: the end of a step is recorded late while the next one is launched, so time shifts between neighbouring steps,
and a lower bound on single steps shows in none of them.

Idea: the time of a step that reads prompts and of the three around it, less the model's time of the four; medians, by
the tokens of the step, over the run's measured seconds.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from bench.hardware.archive import read_run
from bench.hardware.compare_pd import WARM_S, WINDOW_S
from plimsoll.sim import profile

TOKEN_RANGES: Final = ((100, 512), (512, 700), (700, 900), (900, 1500))  # above the first, up to the second
_LEAST_PROMPT: Final = 20  # tokens; fewer are the last ones of prompts that were read elsewhere
_MS: Final = 1e3


class StepExcess(NamedTuple):
    """Steps of one range, medians in seconds: four steps above the law, the longest of the four, one by the law."""

    steps: int
    excess_s: float
    longest_s: float
    model_s: float


def model_step_s(steps: Any, hardware_profile: profile.HardwareProfile) -> Any:
    """What the law of a hot card says of each step but the first, whose time is not known."""
    model, one = hardware_profile.hot or hardware_profile.coefficients, steps[1:]
    prompt, sequences = one["pretok"], one["ndec"]
    found = model.base + model.anypre * (one["npre"] > 0) + model.pretok * prompt + model.preattn * one["preattn"]
    found = found + model.dec * sequences + model.ctx * one["decctx"]
    return found + hardware_profile.hinge_dec * np.maximum(
        0, sequences - np.maximum(0, hardware_profile.hinge_sequences - prompt)
    )


def excess_by_tokens(steps: Any, hardware_profile: profile.HardwareProfile) -> list[StepExcess | None]:
    """For each range of tokens; None where there is no such step."""
    step_s, model_s, window = np.diff(steps["t_out"]), model_step_s(steps, hardware_profile), steps[1:]
    excess = np.convolve(step_s - model_s, np.ones(4), "valid")  # place k: steps k to k + 3
    longest = np.lib.stride_tricks.sliding_window_view(step_s, 4).max(axis=1)
    total = window["pretok"] + window["ndec"]
    found: list[StepExcess | None] = []
    for above, longest_index in TOKEN_RANGES:
        places = np.flatnonzero((window["pretok"] > _LEAST_PROMPT) & (total > above) & (total <= longest_index))
        places = places[(places >= 1) & (places <= excess.size)]
        medians = (float(np.median(values)) for values in (excess[places - 1], longest[places - 1], model_s[places]))
        found.append(StepExcess(places.size, *medians) if places.size else None)
    return found


def measured_steps(folder: Path, engine: str, run: str) -> Any:
    """An engine's steps in the judged seconds of a run."""
    path = next(iter(folder.glob(f"{engine}.steps.csv*")))
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        steps = np.genfromtxt(file, delimiter=",", names=True)
    begin_s = read_run(next(iter(folder.glob(f"{run}.requests.json*"))))["start"] + WARM_S
    return steps[(steps["t_sched"] >= begin_s) & (steps["t_sched"] < begin_s + WINDOW_S)]


def _format(excess_row: StepExcess) -> str:
    excess, longest, model_ms = (f"{value * _MS:.1f}" for value in excess_row[1:])
    return f"{excess} ms; longest {longest}, law {model_ms} ({excess_row.steps})"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.long_steps", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("engine", help="whose step log: p, d, a0, ...")
    parser.add_argument("run", nargs="+", help="as the names of the requests' files begin")
    parser.add_argument("--profile", default="h200-8b")
    given = parser.parse_args(words)
    print("| run | all over the law | " + " | ".join(f"{a + 1} to {b} tokens" for a, b in TOKEN_RANGES) + " |")
    print("|---|---|" + "---|" * len(TOKEN_RANGES))
    hardware_profile = profile.load(given.profile)
    for run in given.run:
        steps = measured_steps(given.folder, given.engine, run)
        all_steps = float(np.diff(steps["t_out"]).sum() / model_step_s(steps, hardware_profile).sum())
        cells = [
            "-" if excess_row is None else _format(excess_row)
            for excess_row in excess_by_tokens(steps, hardware_profile)
        ]
        print(f"| {run}, {given.engine} | {all_steps:.3f} | " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
