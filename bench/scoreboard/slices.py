"""Loads cut from real traces, carried in `traces/` with where they are from and under which licence.

A rate is raised by laying whole copies over each other, each shifted by an offset of its own (`plimsoll.sim.trace`);
time is never squeezed. Copies of prompts that share beginnings are other prompts: their blocks have other names.
"""

from __future__ import annotations

import csv
import gzip
import math
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

from plimsoll.sim import trace
from plimsoll.sim.visit import Asked

_FOLDERS: Final = (Path(__file__).parent / "traces", Path(__file__).parents[1] / "picking" / "data")
_BLOCKS: Final = 1_000_000_000  # more than any trace has


@dataclass(frozen=True)
class Slice:
    """Requests of a file, `factor` times as many in the same time. length_s: of the slice, a little over its last one.

    blocks: whether the file's column `blocks` names the 512 tokens of each prompt.
    """

    file: str
    length_s: float
    factor: float = 1.0
    blocks: bool = False

    @property
    def path(self) -> Path:
        return next(folder / self.file for folder in _FOLDERS if (folder / self.file).exists())

    def make(self, seed: int) -> list[Asked]:
        random = Random(seed)
        if not self.blocks:
            return trace.scaled(trace.read(self.path), self.factor, random)
        asked = _with_blocks(self.path)
        laid: list[Asked] = []
        for copy in range(math.ceil(self.factor)):
            shift_s = random.uniform(0.0, self.length_s) if copy else 0.0
            kept = [one for one in asked if random.random() < self.factor - copy]
            laid += [_moved(one, (one.at_s + shift_s) % self.length_s, copy * _BLOCKS) for one in kept]
        return sorted(laid, key=lambda one: one.at_s)


def _moved(one: Asked, at_s: float, by: int) -> Asked:
    return replace(one, at_s=at_s, ids=tuple(by + each for each in one.ids))


def _with_blocks(path: Path) -> list[Asked]:
    with gzip.open(path, "rt") as lines:
        return [
            Asked(
                float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["output_tokens"]), ids=_ids(row["blocks"])
            )
            for row in csv.DictReader(lines)
        ]


def _ids(runs: str) -> tuple[int, ...]:
    """Names written as runs: `3 7-9` is 3, 7, 8, 9."""
    spans = (run.partition("-") for run in runs.split())
    return tuple(number for low, _, high in spans for number in range(int(low), int(high or low) + 1))
