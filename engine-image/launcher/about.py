"""What the engine is, in one JSON document: the source of the operator's first guess at its speed and its start.

Problem: how many sequences an engine takes, how much cache it has, on what it runs and how far its start has come are
known in its pod alone, each from another place, and each place may have nothing to say.
Idea: facts are gathered beside the start and kept; the document is made of what is there. What is not known is null.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from launcher import command, modelconfig, warmup
from launcher.client import Response
from launcher.contract import Contract
from launcher.health import Status
from launcher.ladder import Ladder
from launcher.phases import Phases
from launcher.settings import Settings

VERSION = 1
ENGINE_VERSION = "/version"
SIMULATED = "simulated"
SMI = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
SMI_SECONDS = 30.0
SMI_FAILED = re.compile("NVIDIA-SMI|No devices|^Fail|^Unable|error", re.IGNORECASE)
CACHE = re.compile(rb"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
LABEL = re.compile(rb'(\w+)="([^"\\]*)"')

Get = Callable[[str], Awaitable[Response]]


@dataclass
class Facts:
    """What is known of one engine so far; None until it is. Filled in place, from threads too."""

    engine: str
    engine_version: str | None
    accelerator: str | None
    accelerators: int | None
    max_sequences: int | None
    token_budget: int | None
    kv_tokens: int | None = None
    block_tokens: int | None = None
    max_model_len: int | None = None
    config: dict[str, Any] | None = None
    ladder: Ladder | None = None


def told(settings: Settings, vllm_version: str) -> Facts:
    """What the orders say; `vllm_version` is the installed one's, empty where it is not known."""
    simulated = settings.runtime == SIMULATED
    arguments = (*settings.default_args, *settings.args)
    return Facts(
        engine=settings.runtime,
        engine_version=SIMULATED if simulated else vllm_version or None,
        accelerator=SIMULATED if simulated else None,
        accelerators=(command.count_of(arguments, command.TENSOR) or 1) if simulated else None,
        max_sequences=command.count_of(arguments, command.MAX_SEQUENCES),
        token_budget=command.count_of(arguments, command.TOKEN_BUDGET),
    )


def look(facts: Facts, smi: tuple[str, ...] = SMI) -> None:
    """Finds the accelerators of a real engine, all of the pod; may take seconds, never fails."""
    if facts.engine == SIMULATED:
        return
    names = _gpus(smi)
    if names:
        facts.accelerator, facts.accelerators = names[0], len(names)
    elif command.cpu_platform(facts.engine_version or ""):
        facts.accelerator, facts.accelerators = "cpu", 0


def _gpus(smi: tuple[str, ...]) -> list[str]:
    """One name a GPU; nvidia-smi says its failures on the same stream, and its code may be process 1's already."""
    try:
        done = subprocess.run(smi, stdin=subprocess.DEVNULL, capture_output=True, timeout=SMI_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line.strip() for line in done.stdout.decode("utf-8", "replace").splitlines()]
    return [line for line in lines if line] if not any(SMI_FAILED.search(line) for line in lines) else []


async def learn(facts: Facts, contract: Contract, get: Get) -> None:
    """Asks the running engine for what is not known yet; never fails."""
    if facts.kv_tokens is None or facts.block_tokens is None:
        facts.kv_tokens, facts.block_tokens = cache(await _body(get, contract.paths["metrics"]))
    if facts.max_model_len is None:
        try:
            facts.max_model_len = warmup.max_model_len(await _body(get, warmup.MODELS))
        except ValueError:
            pass
    if facts.engine_version is None or facts.accelerator == SIMULATED:
        _version(facts, await _body(get, ENGINE_VERSION))


async def _body(get: Get, path: str) -> bytes:
    try:
        answer = await get(path)
    except (OSError, TimeoutError, ValueError):
        return b""
    return answer.body if answer.status == 200 else b""


def cache(metrics: bytes) -> tuple[int | None, int | None]:
    """Tokens that the KV cache holds, and tokens of a block, from vLLM's metrics (of its first engine core).

    vLLM's own total comes first: it knows of layers that share blocks, where blocks times size is too much.
    """
    found = CACHE.search(metrics)
    labels = dict(LABEL.findall(found[1])) if found else {}
    whole = {name: int(text) for name, text in labels.items() if re.fullmatch(rb"[0-9]{1,15}", text) and int(text)}
    block, blocks = whole.get(b"block_size"), whole.get(b"num_gpu_blocks")
    tokens = blocks * block if blocks and block else None
    return whole.get(b"kv_cache_size_tokens", tokens), block


def _version(facts: Facts, body: bytes) -> None:
    """The engine's own version; a simulated one may say besides whose speed it has."""
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return
    if not isinstance(said, dict):
        return
    if facts.engine_version is None and isinstance(said.get("version"), str):
        facts.engine_version = said["version"] or None
    if facts.engine == SIMULATED and isinstance(said.get("accelerator"), str):
        facts.accelerator = said["accelerator"] or SIMULATED


def find_config(facts: Facts, settings: Settings, environment: dict[str, str]) -> None:
    """Reads the model's configuration; a slow disk may take seconds, never fails."""
    facts.config = modelconfig.read(settings.model, settings.revision, environment)


def document(facts: Facts, role: str, status: Status, phases: Phases, now: float) -> bytes:
    """The document of /about; `now` on the clock of the phases."""
    phase, seconds = phases.current(now) or (None, None)
    said = {
        "version": VERSION,
        "engine": facts.engine,
        "engine_version": facts.engine_version,
        "role": role,
        "phase": phase,
        "phase_seconds": seconds,
        "phases": list(phases.seconds().items()),
        "ready": status.ready,
        "draining": status.draining,
        "accelerator": {"name": facts.accelerator, "count": facts.accelerators},
        "limits": {
            name: getattr(facts, name)
            for name in ("max_sequences", "kv_tokens", "token_budget", "block_tokens", "max_model_len")
        },
        "config": facts.config,
        "ladder": asdict(facts.ladder) if facts.ladder else None,
    }
    return json.dumps(said, separators=(",", ":")).encode()
