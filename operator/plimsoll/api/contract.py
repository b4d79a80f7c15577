"""What the operator and the engine image agree on: `contract.json`, read by both sides.

Ports, paths, environment names, headers and drain times stand in one file. The launcher in the
image reads a copy, `engine-image/contract.json`, which `make generate` writes and `make verify` compares.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import orjson


@dataclass(frozen=True)
class Contract:
    """The contract as it stands in the file; times in seconds."""

    ports: dict[str, int]
    paths: dict[str, str]
    env: dict[str, str]
    headers: dict[str, str]
    drain: dict[str, int]
    leg_deadline_seconds: int
    limits: dict[str, int]
    metrics: dict[str, str]
    start_phases: tuple[str, ...]
    runtimes: tuple[str, ...]
    reserved_args: tuple[str, ...]

    def grace_seconds(self, drain_seconds: int) -> int:
        """How long a pod may take to end: until it is quiet, the time for what it still answers, and a margin."""
        return self.drain["max_unready_seconds"] + drain_seconds + self.drain["grace_margin_seconds"]


@functools.cache
def contract() -> Contract:
    """The bundled contract; fields that only the launcher reads are left out."""
    text: dict[str, Any] = orjson.loads(files("plimsoll.api").joinpath("contract.json").read_bytes())
    known = {name: text[name] for name in Contract.__dataclass_fields__}
    lists = {name: tuple(known[name]) for name in ("start_phases", "runtimes", "reserved_args")}
    return Contract(**{**known, **lists})
