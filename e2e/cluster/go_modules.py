"""Published Go modules, as Go unpacks them."""

from __future__ import annotations

import json
from pathlib import Path

from e2e.cluster.settings import HERE
from e2e.cluster.shell import output


def downloaded(module: str) -> Path:
    """Where Go has unpacked PATH@VERSION, after a download if need be. The folder is read-only."""
    return Path(json.loads(output("go", "mod", "download", "-json", module, cwd=HERE))["Dir"])
