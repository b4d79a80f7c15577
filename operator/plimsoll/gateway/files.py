"""Files that another process reads at any moment: replaced whole by rename, and only when their content changes."""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, content: bytes) -> bool:
    """Replace `path` by `content`; False if it held just that already. The directory must exist."""
    try:
        if path.read_bytes() == content:
            return False
    except FileNotFoundError:
        pass
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_bytes(content)
    os.replace(fresh, path)
    return True
