"""Atomic file replacement by rename, for files that another process may read at any time."""

from __future__ import annotations

import os
from pathlib import Path


def write_if_changed(path: Path, content: bytes) -> bool:
    """Atomically replace `path`. Returns False if its content is already equal. The directory must exist."""
    try:
        if path.read_bytes() == content:
            return False
    except FileNotFoundError:
        pass
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(content)
    os.replace(temporary, path)
    return True
