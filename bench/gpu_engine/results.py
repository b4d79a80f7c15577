"""The list of checks: each has a name, passed or failed, and the measured values."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from plimsoll.core.ports import EngineReading

# Fields of a reading that an engine without KV transfer does not have.
_TRANSFER_FIELDS = frozenset({"post_s", "transfer_s"})


class Results:
    """The checks so far, on disk after each one, so that a run that is cut short leaves what it had."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = time.monotonic()
        self.checks: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}

    def check(self, name: str, passed: bool, **figures: Any) -> bool:
        """Records one check and prints it; returns whether it passed."""
        self.checks.append({"check": name, "passed": bool(passed), **figures})
        self._save()
        word = "pass" if passed else "FAIL"
        print(f"[{time.monotonic() - self._began:6.1f}] {word} {name} {json.dumps(figures)[:400]}", flush=True)
        return passed

    def note(self, name: str, value: Any) -> None:
        """Records a fact that nothing is judged by."""
        self.facts[name] = value
        self._save()

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [check["check"] for check in self.checks if not check["passed"]]

    def document(self) -> dict[str, Any]:
        """All of it, for JSON."""
        passed = len(self.checks) - len(self.failed)
        return {"passed": passed, "failed": self.failed, "checks": self.checks, "facts": self.facts}

    def _save(self) -> None:
        self._path.write_text(json.dumps(self.document(), indent=1) + "\n")


def missing_signals(reading: EngineReading) -> list[str]:
    """Fields of the operator's reading that the page of an engine without KV transfer did not give."""
    names = EngineReading.__dataclass_fields__
    return [name for name in names if name not in _TRANSFER_FIELDS and getattr(reading, name) in (None, "")]


def ready_before_warm(timeline: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The moments of a start at which the pod was ready although a phase of the start still ran."""
    return [moment for moment in timeline if moment["readyz"] == 200 and moment["phase"] is not None]


def missing_about(document: Mapping[str, Any]) -> list[str]:
    """Fields of /about that a warm engine on a GPU must know and this one does not."""
    missing = [name for name in ("engine_version", "config", "self_benchmark") if not document.get(name)]
    known = {name: value for name, value in document["limits"].items() if name != "token_budget"}
    missing += [f"limits.{name}" for name, value in known.items() if value is None]
    missing += [f"accelerator.{name}" for name, value in document["accelerator"].items() if value is None]
    return missing


def flag_errors(command: str, flags: Iterable[str]) -> list[str]:
    """The flags that a command line lacks."""
    words = command.split()
    return [flag for flag in flags if flag not in words]
