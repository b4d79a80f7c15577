"""Finished runs, one JSON line each, under the hash of all that they depend on: a board can be stopped and resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.scoreboard.play import Task

_FILE: Final = "runs.jsonl"


class Run(NamedTuple):
    """A kept run. code: hash of the program that made it; row: the row's name."""

    key: str
    code: str
    row: str
    plant: float
    figures: Mapping[str, Any]


class Store:
    """The runs in a folder. A line that was cut off by an end of the process is passed over."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / _FILE
        self._runs: dict[str, Run] = {}
        if not self._path.exists():
            return
        text = self._path.read_text()
        for line in text.splitlines():
            try:
                run = Run(**json.loads(line))
            except ValueError:
                continue
            self._runs[run.key] = run
        if text and not text.endswith("\n"):
            with self._path.open("a") as lines:
                lines.write("\n")

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs.values())

    def get(self, key: str) -> Mapping[str, Any] | None:
        """The figures of the run; None where it was not made."""
        run = self._runs.get(key)
        return None if run is None else run.figures

    def put(self, key: str, code: str, task: Task, figures: Mapping[str, Any]) -> None:
        run = self._runs[key] = Run(key, code, task.row.name, task.plant, figures)
        with self._path.open("a") as lines:
            lines.write(json.dumps(run._asdict()) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
