"""LoRA adapters: brings the engine to the desired set, and keeps it there.

Problem: adapters come and go while the engine runs, and a restarted engine has none. A load may take minutes or fail,
and must delay neither the model nor other adapters. Idea: a file, which the kubelet keeps up to date, has the desired
adapters. A loop compares it with the loaded adapters; each difference is one call of the engine's API. In the engine an
adapter has a name with a hash of its source: a new source is loaded next to the old one, and cached prompts of the old
one do not match. The middleware reads the loaded adapters from a file of the state folder.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher import desired_adapters, vllm
from launcher.adapter_source import SourceError, check_rank, resolve_source
from launcher.adapter_state import AdapterStates, State
from launcher.client import Response
from launcher.contract import Contract
from launcher.desired_adapters import Adapter
from launcher.errors import to_openai_error
from launcher.redaction import redact

LOAD_PATH, UNLOAD_PATH = vllm.LOAD_LORA_PATH, vllm.UNLOAD_LORA_PATH
POLL_SECONDS = 1.0
LOAD_SECONDS = 600.0
CONCURRENT_LOADS = 4  # so that one slow download delays no other adapter
PINNED_SECONDS = 900.0  # limit for pinned adapters, after which the engine is ready without them
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 5.0, 300.0
MAX_ERROR_CHARS = 256
MAX_DESIRED_BYTES = 1 << 20
UNLOADED_STATUSES = {200, 404}
ALREADY_LOADED = "has already been loaded"

log = logging.getLogger(__name__)

# (path, JSON body, seconds) -> answer
Send = Callable[[str, bytes, float], Awaitable[Response]]
Resolve = Callable[[Adapter], Awaitable[str]]


@dataclass
class _Entry:
    """State of one adapter. `loaded` is its name in the engine, "" while it is not loaded."""

    loaded: str = ""
    failed: str = ""  # the engine name whose load failed
    error: str = ""
    retry_at: float = 0.0
    retry_seconds: float = field(default=FIRST_RETRY_SECONDS)


class AdapterLoader:
    """Loads and unloads the adapters of one engine. Times are monotonic seconds."""

    def __init__(
        self,
        folder: str | Path,
        states: AdapterStates,
        send: Send,
        resolve: Resolve,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = Path(folder) / desired_adapters.FILE
        self._states = states
        self._send = send
        self._resolve = resolve
        self._now = now
        self._desired: dict[str, Adapter] = {}
        self._entries: dict[str, _Entry] = {}
        self._unwanted: dict[str, float] = {}  # names in the engine to unload, and when to try
        self._last_text = b""
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(CONCURRENT_LOADS)

    @property
    def document(self) -> list[dict[str, Any]]:
        """Return each desired adapter with its state, for /about."""
        return [
            {
                "name": name,
                "loaded": self._state_of(adapter) is State.LOADED,
                "error": self._entries[name].error or None,
            }
            for name, adapter in self._desired.items()
        ]

    async def load_pinned(self) -> None:
        """Try to load each pinned adapter once, before the engine is ready."""
        self._read_desired()
        self._publish()
        loads = [self._start_load(adapter) for adapter in self._desired.values() if adapter.pinned]
        if loads and (await asyncio.wait(loads, timeout=PINNED_SECONDS))[1]:
            log.warning("pinned adapters are not loaded after %d s; the engine becomes ready", PINNED_SECONDS)

    async def follow(self) -> None:
        """Keep the engine at the desired set until cancelled."""
        try:
            while True:
                try:
                    await self.step()
                except Exception:  # an uncaught error would end the loop, and adapters would no longer change
                    log.exception("the desired adapters cannot be compared with the loaded ones; trying again")
                await asyncio.sleep(POLL_SECONDS)
        finally:
            for load in self._loads.values():
                load.cancel()

    async def step(self) -> None:
        """Compare once: load missing adapters, and unload those that are not desired."""
        self._read_desired()
        self._publish()
        for adapter in self._desired.values():
            entry = self._entries[adapter.name]
            is_due = entry.failed != adapter.engine_name or self._now() >= entry.retry_at
            if entry.loaded != adapter.engine_name and is_due and adapter.name not in self._loads:
                self._start_load(adapter)
        # A name that is desired again is about to be loaded; a concurrent unload could come last.
        desired_names = {adapter.engine_name for adapter in self._desired.values()}
        due = [name for name, at in self._unwanted.items() if name not in desired_names and self._now() >= at]
        for engine_name in due:
            await self._unload(engine_name)

    def _start_load(self, adapter: Adapter) -> asyncio.Task[None]:
        load = self._loads[adapter.name] = asyncio.create_task(self._load(adapter))
        load.add_done_callback(lambda _: self._loads.pop(adapter.name, None))
        return load

    def _read_desired(self) -> None:
        """Read the file; an unreadable or invalid one changes nothing."""
        try:
            with self._file.open("rb") as opened:
                text = opened.read(MAX_DESIRED_BYTES)
            if text == self._last_text:
                return
            self._last_text = text
            desired = desired_adapters.parse(text)
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            log.warning("the desired adapters cannot be read: %s", error)
            return
        for name in self._entries.keys() - desired.keys():
            self._discard(self._entries.pop(name).loaded)
        for name in desired:
            self._entries.setdefault(name, _Entry())
        self._desired = desired

    def _discard(self, engine_name: str) -> None:
        if engine_name:
            self._unwanted[engine_name] = self._now()

    async def _load(self, adapter: Adapter) -> None:
        """Load one adapter; a failure is stored in its entry."""
        entry, engine_name = self._entries[adapter.name], adapter.engine_name
        self._unwanted.pop(engine_name, None)
        async with self._slots:
            try:
                path = await self._resolve(adapter)
                error = await self._post(LOAD_PATH, {"lora_name": engine_name, "lora_path": path}, {200})
            except SourceError as failure:
                error = str(failure)
            except (OSError, ValueError, RuntimeError) as failure:  # such as a directory that cannot be listed
                error = f"{type(failure).__name__}: {failure}"
        if error and ALREADY_LOADED not in error:
            self._record_failure(entry, engine_name, redact(error))
            log.error("adapter %s is not loaded: %s", adapter.name, entry.error)
        elif self._entries.get(adapter.name) is not entry:  # removed from the desired ones meanwhile
            self._discard(engine_name)
        else:
            previous, entry.loaded = entry.loaded, engine_name
            entry.failed = entry.error = ""
            entry.retry_seconds = FIRST_RETRY_SECONDS
            if previous != engine_name:
                self._discard(previous)
            log.info("adapter %s is loaded", adapter.name)
        self._publish()

    def _record_failure(self, entry: _Entry, engine_name: str, error: str) -> None:
        if entry.failed != engine_name:
            entry.retry_seconds = FIRST_RETRY_SECONDS
        entry.failed, entry.error = engine_name, error[:MAX_ERROR_CHARS]
        entry.retry_at = self._now() + entry.retry_seconds
        entry.retry_seconds = min(MAX_RETRY_SECONDS, 2 * entry.retry_seconds)

    async def _unload(self, engine_name: str) -> None:
        error = await self._post(UNLOAD_PATH, {"lora_name": engine_name}, UNLOADED_STATUSES)
        if error:
            log.warning("adapter %s is not unloaded: %s", engine_name, error[:MAX_ERROR_CHARS])
            self._unwanted[engine_name] = self._now() + MAX_RETRY_SECONDS
        else:
            del self._unwanted[engine_name]

    async def _post(self, path: str, fields: dict[str, str], accepted: set[int]) -> str:
        """Return the engine's error message; "" for success."""
        try:
            response = await self._send(path, json.dumps(fields).encode(), LOAD_SECONDS)
        except (OSError, TimeoutError, ValueError) as error:
            return f"the engine does not answer: {type(error).__name__} {error}".strip()
        if response.status in accepted:
            return ""
        message: str = to_openai_error(response.body, response.status)["error"]["message"]
        return message

    def _state_of(self, adapter: Adapter) -> State:
        entry = self._entries[adapter.name]
        if entry.loaded:
            return State.LOADED
        return State.FAILED if entry.failed else State.LOADING

    def _publish(self) -> None:
        """Write the loaded adapters for the middleware. A full disk does not stop a load."""
        states = {
            name: (self._state_of(adapter), self._entries[name].loaded, self._entries[name].error)
            for name, adapter in self._desired.items()
        }
        try:
            self._states.write(states)
        except OSError as error:
            log.warning("the state of the adapters cannot be written: %s", error)


def source_resolver(
    contract: Contract, runtime: str, max_rank: int, environment: Mapping[str, str] = os.environ
) -> Resolve:
    """Return a function that returns the path of an adapter's files, and downloads remote ones.

    It raises SourceError for an adapter of a rank above `max_rank`.
    """
    claims = Path(contract.paths["adapter_claims"])

    async def resolve(adapter: Adapter) -> str:
        if runtime != "vllm":  # the engine simulator has no weights
            return adapter.location
        path = await resolve_source(adapter.scheme, adapter.location, adapter.revision, claims, environment)
        check_rank(Path(path), max_rank)
        return path

    return resolve
