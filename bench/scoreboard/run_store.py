"""Finished runs, one JSON line each, under the hash of all their inputs: a board can be stopped and resumed.

The runs of the committed board are beside it, so that another machine can continue from there and anyone can inspect or
repeat one of them.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

COMMITTED_RUNS: Final = Path(__file__).parent / "runs.jsonl.gz"
_FILE: Final = "runs.jsonl"


class StoredRun(NamedTuple):
    """A kept run. key: of all that it depends on; row: the row's name."""

    key: str
    row: str
    plant: float
    figures: Mapping[str, Any]


class RunStore:
    """The runs in a folder, and those that are committed. A line that was cut off by an end of the process is passed
    over."""

    def __init__(self, folder: Path, committed: Path = COMMITTED_RUNS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / _FILE
        self._runs: dict[str, StoredRun] = {}
        if committed.exists():
            self._load_line(gzip.decompress(committed.read_bytes()).decode())
        if not self._path.exists():
            return
        self._load_line(text := self._path.read_text())
        if text and not text.endswith("\n"):
            with self._path.open("a") as lines:
                lines.write("\n")

    def _load_line(self, text: str) -> None:
        for line in text.splitlines():
            try:
                run = StoredRun(**json.loads(line))
            except ValueError:
                continue
            self._runs[run.key] = run

    def __iter__(self) -> Iterator[StoredRun]:
        return iter(self._runs.values())

    def get(self, key: str) -> Mapping[str, Any] | None:
        """The figures of the run; None where it was not made."""
        run = self._runs.get(key)
        return None if run is None else run.figures

    def put(self, run: StoredRun) -> None:
        self._runs[run.key] = run
        with self._path.open("a") as lines:
            lines.write(_to_line(run))
            lines.flush()
            os.fsync(lines.fileno())


def write_committed(runs: Iterable[StoredRun], path: Path = COMMITTED_RUNS) -> None:
    """Writes these in place of what was committed; the same runs, the same bytes."""
    ordered = sorted(runs, key=lambda run: (run.row, run.plant, run.figures["policy"], run.figures["seed"], run.key))
    path.write_bytes(gzip.compress("".join(map(_to_line, ordered)).encode(), mtime=0))


def _to_line(run: StoredRun) -> str:
    return json.dumps(run._asdict()) + "\n"
