"""Definitions of custom resources, from their installation until the API server serves them.

Problem: `kubectl wait --for=condition=Established` fails, rather than waits, on a definition so new that the API
server has written `conditions: null`. Idea: read it until the condition is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from e2e.lib.kube import is_true
from e2e.lib.wait import wait_until

SERVED_S: Final = 60


def wait_until_established(kubectl: Callable[..., str], *which: str) -> None:
    """Wait for definitions. kubectl: runs one command and returns what it printed; which: what `get` shall read.

    Raises AssertionError after SERVED_S, and what kubectl raises where one does not exist.
    """

    def established() -> bool:
        found = json.loads(kubectl("get", *which, "-o", "json"))
        return all(is_true(one, "Established") for one in found.get("items", (found,)))

    wait_until(f"established: {' '.join(which)}", established, timeout_s=SERVED_S, every_s=0.1)
