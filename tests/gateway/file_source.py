"""A source of API objects that reads them from a file, for a picker in a process of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from plimsoll.adapters.kube_client import Resource, WatchEvent

Object = dict[str, Any]


class FileSource:
    """Objects of a JSON file {plural: [object]}; a replaced file is a new sync, no file an API server that is away."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def list(
        self, resource: Resource, namespace: str | None = None, selector: str | None = None
    ) -> tuple[list[Object], str]:
        objects = json.loads(self._path.read_bytes())[resource.plural]
        return [o for o in objects if _is_selected(o, namespace, selector)], ""

    async def watch(
        self, resource: Resource, namespace: str | None = None, selector: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        before: tuple[int, int] | None = None
        while True:
            found = self._path.stat() if self._path.exists() else None
            # A file of two replacements later can have the inode of the first.
            now = found and (found.st_ino, found.st_mtime_ns)
            if now is not None and now != before:
                before = now
                objects = json.loads(self._path.read_bytes())[resource.plural]
                yield WatchEvent("SYNC", objects=tuple(o for o in objects if _is_selected(o, namespace, selector)))
            await asyncio.sleep(0.02)


def _is_selected(obj: Object, namespace: str | None, selector: str | None) -> bool:
    """Whether a list of this namespace (None: all) with this selector (KEY, KEY=VALUE or both) has the object."""
    meta, found = obj["metadata"], obj["metadata"].get("labels", {})
    parts = [part.partition("=") for part in (selector or "").split(",") if part]
    is_named = all(found.get(key) == value if value else key in found for key, _, value in parts)
    return namespace in (None, meta["namespace"]) and is_named
