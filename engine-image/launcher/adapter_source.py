"""Resolves an adapter's source to a directory with its files.

Problem: the engine reads the files at this path. A volume claim may contain links that lead out of it. Idea: the path
is resolved first, links included. It must stay in its root and have the file that every adapter has. Remote files are
downloaded by a separate process, which may fail or hang alone.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
DOWNLOAD_SECONDS = 1800.0
FORBIDDEN_ROOTS = ("/proc", "/sys", "/dev", "/run", "/var/run")
_DOWNLOAD = (
    "import sys; from huggingface_hub import snapshot_download; "
    "print(snapshot_download(sys.argv[1], revision=sys.argv[2] or None))"
)


class SourceError(Exception):
    """The adapter's files are not available; the message says why."""


async def resolve_source(
    scheme: str, location: str, revision: str, claims: Path, environment: Mapping[str, str]
) -> str:
    """Return the directory of an adapter; raises SourceError. `claims` has the mounted claims by name."""
    if scheme == "hf":
        return str(adapter_directory(Path(await _download(location, revision, environment)), None))
    if scheme == "pvc":
        claim, _, path = location.partition("/")
        return str(adapter_directory(claims / claim / path, claims / claim))
    if scheme == "file":
        return str(adapter_directory(Path(location), None))
    raise SourceError(f"this engine image cannot read {scheme}:// adapters")


def adapter_directory(path: Path, root: Path | None) -> Path:
    """Return the path without links. Raises SourceError if it leaves `root`, or is no adapter."""
    try:
        found = path.resolve(strict=True)
    except (OSError, RuntimeError):
        raise SourceError(f"{path} does not exist in the engine pod") from None
    if root is not None and not found.is_relative_to(root.resolve()):
        raise SourceError(f"{path} leads out of its claim")
    if not found.is_dir():
        raise SourceError(f"{path} is no directory")
    if root is not None and not all(one.resolve().is_relative_to(root.resolve()) for one in found.iterdir()):
        raise SourceError(f"{path} has a link that leads out of its claim")
    if any(found.is_relative_to(forbidden) for forbidden in FORBIDDEN_ROOTS):
        raise SourceError(f"{path} is not a place for adapters")
    if not (found / CONFIG_FILE).is_file():
        raise SourceError(f"{path} has no {CONFIG_FILE}, so it is no LoRA adapter")
    return found


def check_rank(directory: Path, max_rank: int) -> None:
    """Raises SourceError for an adapter of a higher rank. What has no rank that can be read is left to the engine."""
    with (directory / CONFIG_FILE).open("rb") as opened:
        text = opened.read(MAX_CONFIG_BYTES)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        return
    rank = config.get("r") if isinstance(config, dict) else None
    if isinstance(rank, int) and rank > max_rank:
        limit = f"{max_rank} of spec.engine.lora.maxLoraRank"
        raise SourceError(f"its rank in {CONFIG_FILE} is {rank}, above the {limit}: raise that field")


async def _download(repository: str, revision: str, environment: Mapping[str, str]) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _DOWNLOAD,
        repository,
        revision,
        env=dict(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DOWNLOAD_SECONDS):
            out, err = await process.communicate()
    except TimeoutError:
        raise SourceError(f"the download of {repository} takes longer than {DOWNLOAD_SECONDS:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = out.decode("utf-8", "replace").splitlines()
    if process.returncode or not lines:
        errors = err.decode("utf-8", "replace").strip().splitlines()
        raise SourceError(f"{repository} cannot be downloaded: {errors[-1] if errors else 'no reason'}")
    return lines[-1]
