"""Time from an edit of the operator's code to the operator that runs it: image, push, rollout."""

from __future__ import annotations

import time

from e2e.cluster.settings import ROOT
from e2e.lib import stack
from e2e.lib.kube import Cluster

EDITED_FILE = ROOT / "operator" / "plimsoll" / "__init__.py"


def measure(cluster: Cluster) -> dict[str, object]:
    """Seconds of a build with one changed file, its push, and a rollout of the operator."""
    before = EDITED_FILE.read_text()
    start = time.monotonic()
    try:
        EDITED_FILE.write_text(f"{before}# bench {time.time_ns()}\n")
        stack.cluster_verb("images")
        built_s = time.monotonic()
        stack.install(cluster)
    finally:
        EDITED_FILE.write_text(before)
    return {"build and push s": round(built_s - start, 1), "rollout s": round(time.monotonic() - built_s, 1)}
