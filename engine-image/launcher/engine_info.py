"""Engine information in one JSON document, from which the operator gets its prior for speed and start-up time.

Problem: slots, cache, accelerator and start-up progress of an engine are known only in its pod, each from another
source, and each source may be missing. Idea: facts are collected during the start and stored; the document contains the
available ones. An unknown one is null.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from launcher import command, model_config, vllm, warmup
from launcher.client import Response
from launcher.contract import Contract
from launcher.health import EngineStatus
from launcher.self_benchmark import SelfBenchmark
from launcher.settings import Settings
from launcher.startup_phases import StartupPhases

DOCUMENT_VERSION = 1
VERSION_PATH = "/version"
SIMULATED = "simulated"
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
NVIDIA_SMI_SECONDS = 30.0
NVIDIA_SMI_ERRORS = re.compile("NVIDIA-SMI|No devices|^Fail|^Unable|error", re.IGNORECASE)
CACHE_INFO_PATTERN = re.compile(rb"^%s\{(.*)\}" % vllm.Metric.CACHE_CONFIG.encode(), re.MULTILINE)
LABEL_PATTERN = re.compile(rb'(\w+)="([^"\\]*)"')

Fetch = Callable[[str], Awaitable[Response]]


@dataclass
class EngineInfo:
    """Facts about one engine; None while unknown. Filled in place, also from threads."""

    engine: str
    engine_version: str | None
    accelerator: str | None
    accelerators: int | None
    max_sequences: int | None
    token_budget: int | None
    kv_tokens: int | None = None
    block_tokens: int | None = None
    max_model_len: int | None = None
    nodes: int = 1
    config: dict[str, Any] | None = None
    model_revision: str | None = None
    self_benchmark: SelfBenchmark | None = None


def from_settings(settings: Settings, vllm_version: str) -> EngineInfo:
    """Return the facts in the settings; `vllm_version` is the installed one, empty if unknown."""
    simulated = settings.runtime == SIMULATED
    arguments = (*settings.default_args, *settings.args)
    nodes = 1 if settings.group is None else settings.group.size
    return EngineInfo(
        engine=settings.runtime,
        engine_version=SIMULATED if simulated else vllm_version or None,
        accelerator=SIMULATED if simulated else None,
        accelerators=nodes * (vllm.flag_count(arguments, vllm.TENSOR_PARALLEL_SIZE) or 1) if simulated else None,
        max_sequences=vllm.flag_count(arguments, vllm.MAX_NUM_SEQS),
        token_budget=vllm.flag_count(arguments, vllm.MAX_NUM_BATCHED_TOKENS),
        nodes=nodes,
    )


def detect_accelerators(info: EngineInfo, smi: tuple[str, ...] = NVIDIA_SMI) -> None:
    """Detect all accelerators of a real engine, whose pods have equally many; may take seconds, never fails."""
    if info.engine == SIMULATED:
        return
    names = _gpu_names(smi)
    if names:
        info.accelerator, info.accelerators = names[0], info.nodes * len(names)
    elif command.is_cpu_build(info.engine_version or ""):
        info.accelerator, info.accelerators = "cpu", 0


def _gpu_names(smi: tuple[str, ...]) -> list[str]:
    """Return one name per GPU; nvidia-smi prints errors to the same stream, and PID 1 may have reaped its exit code."""
    try:
        completed = subprocess.run(
            smi, stdin=subprocess.DEVNULL, capture_output=True, timeout=NVIDIA_SMI_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line.strip() for line in completed.stdout.decode("utf-8", "replace").splitlines()]
    return [line for line in lines if line] if not any(NVIDIA_SMI_ERRORS.search(line) for line in lines) else []


async def query_engine(info: EngineInfo, contract: Contract, fetch: Fetch) -> None:
    """Query the running engine for unknown facts; never fails."""
    if info.kv_tokens is None or info.block_tokens is None:
        info.kv_tokens, info.block_tokens = parse_cache_config(await _fetch_body(fetch, contract.paths["metrics"]))
    if info.max_model_len is None:
        try:
            info.max_model_len = warmup.parse_max_model_len(await _fetch_body(fetch, warmup.MODELS_PATH))
        except ValueError:
            pass
    if info.engine_version is None or info.accelerator == SIMULATED:
        _read_version(info, await _fetch_body(fetch, VERSION_PATH))


async def _fetch_body(fetch: Fetch, path: str) -> bytes:
    try:
        response = await fetch(path)
    except (OSError, TimeoutError, ValueError):
        return b""
    return response.body if response.status == 200 else b""


def parse_cache_config(metrics: bytes) -> tuple[int | None, int | None]:
    """Return the tokens of the KV cache, and of a block, from vLLM's metrics (of its first engine core).

    vLLM's own total is preferred: it accounts for layers that share blocks, for which blocks times size is too much.
    """
    match = CACHE_INFO_PATTERN.search(metrics)
    labels = dict(LABEL_PATTERN.findall(match[1])) if match else {}
    counts = {name: int(text) for name, text in labels.items() if re.fullmatch(rb"[0-9]{1,15}", text) and int(text)}
    block, blocks = counts.get(b"block_size"), counts.get(b"num_gpu_blocks")
    tokens = blocks * block if blocks and block else None
    return counts.get(b"kv_cache_size_tokens", tokens), block


def _read_version(info: EngineInfo, body: bytes) -> None:
    """Read the engine's version; a simulated engine also reports its hardware profile."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return
    if not isinstance(document, dict):
        return
    if info.engine_version is None and isinstance(document.get("version"), str):
        info.engine_version = document["version"] or None
    if info.engine == SIMULATED and isinstance(document.get("accelerator"), str):
        info.accelerator = document["accelerator"] or SIMULATED


def find_config(info: EngineInfo, settings: Settings, environment: dict[str, str]) -> None:
    """Read the model's configuration; a slow disk may take seconds, never fails."""
    info.config = model_config.read(settings.model, settings.revision, environment)
    info.model_revision = model_config.revision(settings.model, settings.revision, environment)


def to_json(
    info: EngineInfo,
    role: str,
    status: EngineStatus,
    phases: StartupPhases,
    now: float,
    adapters: list[dict[str, Any]] | None = None,
) -> bytes:
    """Return the document of /about; `now` on the clock of the phases. `adapters` is None without LoRA."""
    phase, seconds = phases.current(now) or (None, None)
    fields = {
        "version": DOCUMENT_VERSION,
        "engine": info.engine,
        "engine_version": info.engine_version,
        "role": role,
        "phase": phase,
        "phase_seconds": seconds,
        "phases": list(phases.seconds().items()),
        "ready": status.ready,
        "draining": status.leaving,
        "accelerator": {"name": info.accelerator, "count": info.accelerators},
        "limits": {
            name: getattr(info, name)
            for name in ("max_sequences", "kv_tokens", "token_budget", "block_tokens", "max_model_len")
        },
        "adapters": adapters,
        "config": info.config,
        "model_revision": info.model_revision,
        "self_benchmark": asdict(info.self_benchmark) if info.self_benchmark else None,
    }
    return json.dumps(fields, separators=(",", ":")).encode()
