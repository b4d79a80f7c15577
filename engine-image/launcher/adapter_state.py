"""Loaded adapters, reported by the launcher to the middleware in one small file of the state folder.

Problem: launcher and middleware are two processes, and the middleware needs this for every request for an adapter.
Idea: the launcher replaces the file as a whole; the middleware reads it again only when its time or size has changed.
"""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

STATE_FILE = "adapters.json"


class State(StrEnum):
    """Loading state of an adapter."""

    LOADED = "loaded"
    LOADING = "loading"
    FAILED = "failed"


class AdapterState(NamedTuple):
    """One adapter: `engine_name` is its name in the engine while it is loaded; `error` is the engine's message."""

    state: State
    engine_name: str
    error: str


class AdapterStates:
    """The file in `folder`."""

    def __init__(self, folder: str | Path) -> None:
        self._path = Path(folder) / STATE_FILE
        self._written: dict[str, tuple[State, str, str]] | None = None
        self._read_of: tuple[int, int, int] | None = None
        self._known: dict[str, AdapterState] = {}

    def write(self, states: dict[str, tuple[State, str, str]]) -> None:
        """Replace the file if something has changed."""
        if states == self._written:
            return
        temporary = self._path.with_suffix(".new")
        temporary.write_text(json.dumps(states), encoding="utf-8")
        os.replace(temporary, self._path)
        self._written = dict(states)

    def reset(self) -> None:
        """Delete the file of an earlier process."""
        self._path.unlink(missing_ok=True)
        self._written = None

    def get(self, name: str) -> AdapterState | None:
        """Return the state of a desired adapter; None for any other."""
        try:
            stat = os.stat(self._path)
        except FileNotFoundError:
            return None
        version = stat.st_ino, stat.st_mtime_ns, stat.st_size
        if version != self._read_of:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            self._known = {key: AdapterState(State(value[0]), value[1], value[2]) for key, value in found.items()}
            self._read_of = version
        return self._known.get(name)
