"""LoRA adapters in vLLM's API: names that are loaded and unloaded while the engine runs.

There are no weights, so any path can be loaded, except those in the simulation's own option.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from plimsoll.engines import vllm
from simulated.options import LoraOptions
from simulated.protocol import RequestError

PATHS = (vllm.LOAD_LORA_PATH, vllm.UNLOAD_LORA_PATH)


class LoadedAdapters:
    """The adapters of one engine, in the order of their loads."""

    def __init__(self, options: LoraOptions) -> None:
        self._options = options
        self._path_by_name: dict[str, str] = {}

    @property
    def enabled(self) -> bool:
        """Whether the engine has the two paths."""
        return self._options.enabled

    def cards(self, parent: str, created: int) -> list[dict[str, Any]]:
        """Return their entries in the list of models."""
        return [
            {
                "id": name,
                "object": "model",
                "created": created,
                "owned_by": "vllm",
                "root": path,
                "parent": parent,
                "permission": [],
            }
            for name, path in self._path_by_name.items()
        ]

    def named_in(self, body: bytes) -> str:
        """Return the adapter of a request, "" for another model."""
        if not self._path_by_name:
            return ""
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            return ""
        model = document.get("model") if isinstance(document, dict) else None
        return model if isinstance(model, str) and model in self._path_by_name else ""

    async def respond(self, path: str, body: bytes) -> bytes:
        """Load or unload an adapter; raises RequestError with vLLM's message."""
        try:
            document = json.loads(body)
            name, source = document["lora_name"], document.get("lora_path", "")
        except (ValueError, LookupError, TypeError):
            raise RequestError(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput") from None
        if path == vllm.UNLOAD_LORA_PATH:
            if self._path_by_name.pop(name, None) is None:
                raise RequestError(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
            return f"Success: LoRA adapter '{name}' removed successfully.".encode()
        if name in self._path_by_name:
            message = f"The lora adapter '{name}' has already been loaded."
            raise RequestError(400, message, "InvalidUserInput")
        await asyncio.sleep(self._options.load_s)
        if source in self._options.failing:
            message = f"Loading lora {name} failed: No adapter found for {source}"
            raise RequestError(404, message, "NotFoundError")
        self._path_by_name[name] = source
        return f"Success: LoRA adapter '{name}' added successfully.".encode()
