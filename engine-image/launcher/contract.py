"""The contract between the operator, the gateway and the engine image, as Python values.

Problem: three programs in two images share ports, paths, environment names, headers and limits. Idea: one JSON file,
`contract.json`, is copied into each image and read here; nothing of it is repeated in code. It is next to this package.
PLIMSOLL_CONTRACT names another file: two engines on one machine then use other ports.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.self_benchmark import BenchmarkSettings

IMAGE_ROOT = Path(__file__).resolve().parent.parent
CONTRACT_PATH_VARIABLE = "PLIMSOLL_CONTRACT"


@dataclass(frozen=True)
class Drain:
    """Parameters of an engine's drain, all but the share in seconds; see `launcher.drain`.

    `handover_share` of the drain timeout is the longest time that a leaving engine takes requests. An engine that gets
    requests until then rejects them for `max_rejecting_seconds` at most.
    """

    min_handover_seconds: float
    quiet_seconds: float
    handover_share: float
    max_rejecting_seconds: float
    shutdown_timeout_seconds: int
    grace_margin_seconds: float


@dataclass(frozen=True)
class ProgressLimits:
    """When an engine without progress becomes unready, and when it is restarted; see `launcher.progress`.

    poll_seconds: interval of the probes of the engine core; answer_seconds: how long the middleware waits for a
    response.
    """

    poll_seconds: float
    answer_seconds: float
    unready_seconds: float
    restart_seconds: float
    step_multiple: float
    max_stretch: float


@dataclass(frozen=True)
class Warmup:
    """Requests of the warm-up: prompt lengths in tokens, then sizes of concurrent batches."""

    prompt_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    completion_tokens: int
    timeout_seconds: float


@dataclass(frozen=True)
class Contract:
    """The contract; see contract.json for the meaning of the names."""

    ports: Mapping[str, int]
    paths: Mapping[str, str]
    env: Mapping[str, str]
    headers: Mapping[str, str]
    metrics: Mapping[str, str]
    limits: Mapping[str, int]
    drain: Drain
    progress: ProgressLimits
    warmup: Warmup
    self_benchmark: BenchmarkSettings
    remote_prefill_deadline_seconds: float
    startup_phases: tuple[str, ...]
    remote_prefill_outcomes: tuple[str, ...]
    stream_error_reasons: tuple[str, ...]
    runtimes: tuple[str, ...]
    roles: tuple[str, ...]
    tasks: tuple[str, ...]


def parse(document: Mapping[str, Any]) -> Contract:
    """Build the contract from the JSON document; KeyError or TypeError for a missing or unknown part."""
    warmup = document["warmup"]
    return Contract(
        ports=document["ports"],
        paths=document["paths"],
        env=document["env"],
        headers=document["headers"],
        metrics=document["metrics"],
        limits=document["limits"],
        startup_phases=tuple(document["startup_phases"]),
        remote_prefill_outcomes=tuple(document["remote_prefill_outcomes"]),
        stream_error_reasons=tuple(document["stream_error_reasons"]),
        runtimes=tuple(document["runtimes"]),
        roles=tuple(document["roles"]),
        tasks=tuple(document["tasks"]),
        drain=Drain(**document["drain"]),
        progress=ProgressLimits(**document["progress"]),
        warmup=Warmup(
            tuple(warmup["prompt_tokens"]),
            tuple(warmup["batches"]),
            warmup["completion_tokens"],
            warmup["timeout_seconds"],
        ),
        self_benchmark=BenchmarkSettings(**document["self_benchmark"]),
        remote_prefill_deadline_seconds=document["remote_prefill_deadline_seconds"],
    )


def load(environment: Mapping[str, str] = os.environ) -> Contract:
    """Reads the contract file of this image, or the one that PLIMSOLL_CONTRACT names."""
    path = Path(environment.get(CONTRACT_PATH_VARIABLE) or IMAGE_ROOT / "contract.json")
    return parse(json.loads(path.read_text(encoding="utf-8")))
