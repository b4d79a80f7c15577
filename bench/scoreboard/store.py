"""Finished runs, one JSON line each, under the hash of all that they depend on: a board can be stopped and resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bench.scoreboard.play import Task

_FILE: Final = "runs.jsonl"


class Store:
    """The runs in a folder. A line that was cut off by an end of the process is passed over."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / _FILE
        self._runs: dict[str, Mapping[str, Any]] = {}
        if not self._path.exists():
            return
        text = self._path.read_text()
        for line in text.splitlines():
            try:
                run = json.loads(line)
            except ValueError:
                continue
            self._runs[run["key"]] = run["figures"]
        if text and not text.endswith("\n"):
            with self._path.open("a") as lines:
                lines.write("\n")

    def get(self, key: str) -> Mapping[str, Any] | None:
        """The figures of the run; None where it was not made."""
        return self._runs.get(key)

    def put(self, key: str, code: str, task: Task, figures: Mapping[str, Any]) -> None:
        self._runs[key] = figures
        run = {"key": key, "code": code, "row": task.row.name, "plant": task.plant, "figures": figures}
        with self._path.open("a") as lines:
            lines.write(json.dumps(run) + "\n")
            lines.flush()
            os.fsync(lines.fileno())
