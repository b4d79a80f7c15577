"""Stages with their seconds, and the report that is made of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class DemoFailed(Exception):
    """Something that the demo promises did not happen; the message says what."""


class StageReport:
    """What the demo did: seconds of each stage, findings, and whether all of it happened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = time.monotonic()
        self.stages: dict[str, float] = {}
        self.findings: dict[str, Any] = {}
        self.failures: list[str] = []  # what was to be reached and was not

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Prints the title, and the seconds when the block has ended."""
        print(f"\n== {title}", flush=True)
        start = time.monotonic()
        try:
            yield
        finally:
            self.stages[title] = round(time.monotonic() - start, 1)
        print(f"   {self.stages[title]:.0f} s", flush=True)

    def check(self, holds: bool, what: str) -> None:
        """Raises Failed unless it holds."""
        if not holds:
            raise DemoFailed(what)
        print(f"   ok: {what}", flush=True)

    def check_later(self, holds: bool, what: str) -> None:
        """Says whether it holds; what does not is kept in `broken`, and the demo goes on."""
        print(f"   {'ok' if holds else 'FAILS'}: {what}", flush=True)
        if not holds:
            self.failures.append(what)

    def write(self, error: str | None) -> None:
        """The report as JSON: `ok`, `error`, `seconds`, `stages`, and the findings."""
        whole = round(time.monotonic() - self._start, 1)
        body = {"ok": error is None, "error": error, "seconds": whole, "stages": self.stages, **self.findings}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(body, indent=2) + "\n")
