"""What the core makes of a warm engine's own ladder, beside the data sheet and the law that was fitted to its steps.

The steps themselves too: medians of those that only decode, by sequences, and of those with prompts, by their tokens;
how long all of them took over what the data sheet says; and the first token of prompts alone.

python -m bench.hardware.ladders DIR    (what `bench.hardware.measure` wrote)
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from bench.hardware import fit
from plimsoll.core import ladder, roofline
from plimsoll.core.latency import StepModel
from plimsoll.core.ports import Ladder

_SIZES: Final = (1, 4, 8, 16, 32, 64, 128, 192, 256)
_TOKENS: Final = (1, 256, 512, 768, 1024, 2048, 4096, 8193)
_SHORT: Final = 700.0  # tokens of context a sequence
_LEAST: Final = 20  # steps of which a median is shown


def laws(folder: Path, least: int) -> dict[str, StepModel]:
    """By source: the data sheet's prior, the ladder's, and the law fitted to steps of at least so many sequences."""
    about = json.loads((folder / "result.json").read_text())["about"]
    shape = roofline.model_shape(about["config"])
    gpu = ladder.accelerator(about["accelerator"]["name"])
    found: dict[str, StepModel] = {}
    if gpu is not None:
        found["data sheet"] = roofline.prior(shape, gpu)
    rungs = about["ladder"]
    said = Ladder(tuple(map(tuple, rungs["prefill"])), tuple(map(tuple, rungs["decode"])))
    found["ladder"] = ladder.prior(said, about["limits"]["token_budget"])
    log = next(folder.glob("engine.steps.csv*"))
    for one in fit.fitted(folder, log, least):
        law = one["law"]
        found[f"steps, {one['set']}"] = StepModel(*(law[name] for name in fit.NAMES))
    return found


def over(folder: Path, least: int, law: StepModel) -> float:
    """Seconds of all steps in blocks of at least so many sequences, over what a law says of the same steps."""
    rows, seconds, _, sequences = fit.blocks(fit.steps(next(folder.glob("engine.steps.csv*"))))
    inside = sequences >= least
    return float(seconds[inside].sum() / (rows[inside] @ np.array(list(asdict(law).values()))).sum())


def alone(folder: Path) -> list[str]:
    """Milliseconds to the first token of a prompt alone, by its tokens."""
    seen = json.loads((folder / "result.json").read_text())["alone"]
    lines = [
        "| prompt alone | " + " | ".join(str(one["prompt"]) for one in seen) + " |",
        "|" + "---|" * (len(seen) + 1),
    ]
    return [*lines, "| ms | " + " | ".join(f"{one['ttft_s'] * 1e3:.1f}" for one in seen) + " |"]


def medians(log: dict[str, fit.Floats]) -> list[str]:
    """Milliseconds of steps that follow another without a pause."""
    before = np.concatenate(([-np.inf], log["t_out"][:-1]))
    took = (log["t_out"] - np.maximum(before, log["t_sched"])) * 1e3
    busy = log["t_sched"] < before
    calm = busy & (log["npre"] == 0) & (np.concatenate(([1], log["npre"][:-1])) == 0)
    short = log["decctx"] <= _SHORT * np.maximum(log["ndec"], 1)
    decode = [(size, calm & short & (log["ndec"] == size)) for size in _SIZES]
    prompts = [((low, high), busy & (log["pretok"] >= low) & (log["pretok"] < high)) for low, high in pairwise(_TOKENS)]
    lines = []
    for head, found in (("sequences, decode only", decode), ("prompt tokens", prompts)):
        seen = [(name, float(np.median(took[which]))) for name, which in found if which.sum() >= _LEAST]
        lines.append(f"| {head} | " + " | ".join(str(name) for name, _ in seen) + " |")
        lines += ["|" + "---|" * (len(seen) + 1), "| ms | " + " | ".join(f"{ms:.1f}" for _, ms in seen) + " |", ""]
    return lines


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hardware.ladders", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--from-sequences", type=int, default=0, metavar="N")
    given = parser.parse_args(words)
    found = laws(given.folder, given.from_sequences)
    names = list(asdict(next(iter(found.values()))))
    print("| source | " + " | ".join(names) + " |\n|" + "---|" * (len(names) + 1))
    for source, law in found.items():
        print(f"| {source} | " + " | ".join(f"{value:.3g}" for value in asdict(law).values()) + " |")
    if "data sheet" in found:
        share = over(given.folder, given.from_sequences, found["data sheet"])
        print(f"\nsteps took {share:.3f} of what the data sheet says")
    print("\n" + "\n".join(alone(given.folder)))
    print("\n" + "\n".join(medians(fit.steps(next(given.folder.glob("engine.steps.csv*"))))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
