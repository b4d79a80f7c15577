"""Contract between the operator and the engine image: `contract.json`, which both sides read.

The file holds ports, paths, names of environment variables, headers and drain times. The launcher in the image reads a
copy, `engine-image/contract.json`, which `make generate` writes and `make verify` compares.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import orjson


@dataclass(frozen=True)
class EngineContract:
    """Contents of the contract file; times in seconds."""

    ports: dict[str, int]
    paths: dict[str, str]
    env: dict[str, str]
    headers: dict[str, str]
    drain: dict[str, float]
    remote_prefill_deadline_seconds: int
    limits: dict[str, int]
    metrics: dict[str, str]
    startup_phases: tuple[str, ...]
    runtimes: tuple[str, ...]

    def termination_grace_seconds(self, drain_seconds: int) -> int:
        """Return the termination grace period of a pod: time until quiet, drain timeout, and a margin; seconds."""
        return int(self.drain["max_rejecting_seconds"] + drain_seconds + self.drain["grace_margin_seconds"])


def engine_tls_name(namespace: str) -> str:
    """Return the DNS name that the certificate of every engine of a namespace has."""
    return f"plimsoll-engine.{namespace}.svc"


def internal_tls_name(namespace: str) -> str:
    """Return the DNS name in the certificate of operator and gateways, by the namespace of their release."""
    return f"plimsoll-internal.{namespace}.svc"


@functools.cache
def engine_contract() -> EngineContract:
    """Return the bundled contract without the fields that only the launcher reads."""
    document: dict[str, Any] = orjson.loads(files("plimsoll.api").joinpath("contract.json").read_bytes())
    fields = {name: document[name] for name in EngineContract.__dataclass_fields__}
    tuples = {name: tuple(fields[name]) for name in ("startup_phases", "runtimes")}
    return EngineContract(**{**fields, **tuples})
