"""Whether steps beyond some number of tokens take longer than a measured law says: what a slow host does to them.

    python -m bench.hardware.edge DIR d 06.pd.chat24.900

Problem: a step's end is stamped late while the next one is launched, so that neighbours lend each other time, and a
floor of single steps shows in none of them.
Idea: the time of a step that reads prompts and of the three around it, less what the law says of the four; medians, by
the tokens of the step, over the run's judged seconds.
"""

from __future__ import annotations

import argparse
import gzip
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from bench.hardware.keep import requests
from bench.hardware.sides import WARM_S, WINDOW_S
from plimsoll.sim import profile

TOKENS: Final = ((100, 512), (512, 700), (700, 900), (900, 1500))  # above the first, up to the second
_LEAST_PROMPT: Final = 20  # tokens; fewer are the last ones of prompts that were read elsewhere
_MS: Final = 1e3


class Around(NamedTuple):
    """Steps of one range, medians in seconds: four steps above the law, the longest of the four, one by the law."""

    steps: int
    excess_s: float
    longest_s: float
    law_s: float


def said_s(steps: Any, own: profile.Profile) -> Any:
    """What the law of a hot card says of each step but the first, whose time is not known."""
    law, one = own.hot or own.coefficients, steps[1:]
    prompt, sequences = one["pretok"], one["ndec"]
    found = law.base + law.anypre * (one["npre"] > 0) + law.pretok * prompt + law.preattn * one["preattn"]
    found = found + law.dec * sequences + law.ctx * one["decctx"]
    return found + own.hinge_dec * np.maximum(0, sequences - np.maximum(0, own.hinge_sequences - prompt))


def around(steps: Any, own: profile.Profile) -> list[Around | None]:
    """For each range of tokens; None where there is no such step."""
    took, law_s, one = np.diff(steps["t_out"]), said_s(steps, own), steps[1:]
    beyond = np.convolve(took - law_s, np.ones(4), "valid")  # place k: steps k to k + 3
    longest = np.lib.stride_tricks.sliding_window_view(took, 4).max(axis=1)
    total = one["pretok"] + one["ndec"]
    found: list[Around | None] = []
    for above, most in TOKENS:
        places = np.flatnonzero((one["pretok"] > _LEAST_PROMPT) & (total > above) & (total <= most))
        places = places[(places >= 1) & (places <= beyond.size)]
        medians = (float(np.median(values)) for values in (beyond[places - 1], longest[places - 1], law_s[places]))
        found.append(Around(places.size, *medians) if places.size else None)
    return found


def judged(folder: Path, engine: str, run: str) -> Any:
    """An engine's steps in the judged seconds of a run."""
    path = next(iter(folder.glob(f"{engine}.steps.csv*")))
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        steps = np.genfromtxt(file, delimiter=",", names=True)
    begin = requests(next(iter(folder.glob(f"{run}.requests.json*"))))["start"] + WARM_S
    return steps[(steps["t_sched"] >= begin) & (steps["t_sched"] < begin + WINDOW_S)]


def _words(one: Around) -> str:
    excess, longest, law = (f"{value * _MS:.1f}" for value in one[1:])
    return f"{excess} ms; longest {longest}, law {law} ({one.steps})"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.edge", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("engine", help="whose step log: p, d, a0, ...")
    parser.add_argument("run", nargs="+", help="as the names of the requests' files begin")
    parser.add_argument("--profile", default="h200-8b")
    given = parser.parse_args(words)
    print("| run | all over the law | " + " | ".join(f"{a + 1} to {b} tokens" for a, b in TOKENS) + " |")
    print("|---|---|" + "---|" * len(TOKENS))
    own = profile.load(given.profile)
    for run in given.run:
        steps = judged(given.folder, given.engine, run)
        whole = float(np.diff(steps["t_out"]).sum() / said_s(steps, own).sum())
        cells = ["-" if one is None else _words(one) for one in around(steps, own)]
        print(f"| {run}, {given.engine} | {whole:.3f} | " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
