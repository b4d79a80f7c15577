"""Loads cut from real traces, stored in `traces/` with their source and licence.

A rate is raised by superposing whole copies, each shifted by its own offset (`plimsoll.sim.trace`); time is never
compressed. Copies of prompts with common prefixes are other prompts: their blocks have other hashes.
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
from plimsoll.sim.attempt import TraceRequest

_FOLDERS: Final = (Path(__file__).parent / "traces", Path(__file__).parents[1] / "picking" / "data")
_BLOCK_ID_OFFSET: Final = 1_000_000_000  # more than any trace has


@dataclass(frozen=True)
class TraceSlice:
    """Requests of a file, `factor` times as many in the same time. length_s: of the slice, slightly after its last
    request.

    with_blocks: whether the file's column `blocks` names the 512-token blocks of each prompt.
    """

    file: str
    length_s: float
    factor: float = 1.0
    with_blocks: bool = False

    @property
    def path(self) -> Path:
        return next(folder / self.file for folder in _FOLDERS if (folder / self.file).exists())

    def make(self, seed: int) -> list[TraceRequest]:
        random = Random(seed)
        if not self.with_blocks:
            return trace.scale_rate(trace.read(self.path), self.factor, random)
        requests = _with_blocks(self.path)
        merged: list[TraceRequest] = []
        for copy in range(math.ceil(self.factor)):
            shift_s = random.uniform(0.0, self.length_s) if copy else 0.0
            selected = [request for request in requests if random.random() < self.factor - copy]
            merged += [
                _shift(request, (request.at_s + shift_s) % self.length_s, copy * _BLOCK_ID_OFFSET)
                for request in selected
            ]
        return sorted(merged, key=lambda request: request.at_s)


def _shift(request: TraceRequest, at_s: float, by: int) -> TraceRequest:
    return replace(request, at_s=at_s, block_ids=tuple(by + block_id for block_id in request.block_ids))


def _with_blocks(path: Path) -> list[TraceRequest]:
    with gzip.open(path, "rt") as lines:
        return [
            TraceRequest(
                float(row["arrival_s"]),
                int(row["prompt_tokens"]),
                int(row["output_tokens"]),
                block_ids=_ids(row["blocks"]),
            )
            for row in csv.DictReader(lines)
        ]


def _ids(runs: str) -> tuple[int, ...]:
    """Names written as runs: `3 7-9` is 3, 7, 8, 9."""
    spans = (run.partition("-") for run in runs.split())
    return tuple(number for low, _, high in spans for number in range(int(low), int(high or low) + 1))
