"""The list of desired LoRA adapters: the operator writes it into a ConfigMap, the launcher reads it in the pod.

`make generate` copies this module to `engine-image/launcher/desired_adapters.py`, so that the keys have one home.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

FILE = "adapters.json"  # the key in the ConfigMap, and so the name of the file


@dataclass(frozen=True)
class Adapter:
    """A desired adapter; `location` is ORG/REPO, CLAIM/PATH or /PATH, by its scheme."""

    name: str
    scheme: str
    location: str
    revision: str
    pinned: bool

    @property
    def engine_name(self) -> str:
        """The name in the engine: `@` cannot be in the name of a model."""
        source = json.dumps([self.scheme, self.location, self.revision])
        return f"{self.name}@{hashlib.sha256(source.encode()).hexdigest()[:8]}"


def dump(adapters: Iterable[Adapter]) -> str:
    """The text of the file."""
    entries = [asdict(adapter) for adapter in adapters]
    return json.dumps({"adapters": entries}, ensure_ascii=False, separators=(",", ":"))


def parse(text: bytes) -> dict[str, Adapter]:
    """The desired adapters by name; ValueError if the text is something else."""
    document = json.loads(text)
    entries = document.get("adapters") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ValueError("no list of adapters")
    return {one.name: one for one in map(_parse_adapter, entries)}


def _parse_adapter(entry: Any) -> Adapter:
    given = entry if isinstance(entry, dict) else {}
    name, scheme, location, revision = (given.get(key) for key in ("name", "scheme", "location", "revision"))
    if not (isinstance(name, str) and name and isinstance(scheme, str) and isinstance(location, str)):
        raise ValueError("an adapter without a name or a source")
    return Adapter(name, scheme, location, str(revision or ""), given.get("pinned") is True)
