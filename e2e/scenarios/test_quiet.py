"""A converged fleet costs the API server nothing: over five minutes, no write but the leases' heartbeats.

The scenarios that only send requests ran since the fleet converged, so their time counts.
"""

from __future__ import annotations

import time
from collections import Counter
from datetime import datetime

import pytest

from e2e.lib import stack
from e2e.lib.kube import Cluster
from e2e.lib.node import WRITES, audit
from e2e.lib.service import Service
from e2e.lib.wait import pause

SETTLE_S = 15.0  # the last status writes of a start


def _converged_since(services: dict[str, Service]) -> float:
    """When the last condition of any service changed, seconds since the epoch."""
    conditions = [c for s in services.values() for c in s.status()["conditions"]]
    return max(datetime.fromisoformat(c["lastTransitionTime"]).timestamp() for c in conditions)


def test_no_write_but_leases(shared: dict[str, Service], cluster: Cluster, request: pytest.FixtureRequest) -> None:
    seconds = request.config.getoption("--quiet-seconds")
    since = max(_converged_since(shared) + SETTLE_S, *(_last_foreign(cluster),))
    pause(max(0.0, since + seconds - time.time()))
    calls = [c for c in audit(since, stack.SYSTEM) if c.at <= since + seconds]
    writes = [c for c in calls if c.verb in WRITES]
    others = [c for c in writes if c.resource != "leases"]
    print(f"{seconds:.0f} s: {len(calls)} finished calls {dict(Counter(c.verb for c in calls))}")
    print(f"{len(writes) - len(others)} writes of leases, {len(others)} others")
    assert writes, "the audit log shows no lease renewal: is it the right log?"
    assert not others, "\n".join(map(str, others))


def _last_foreign(cluster: Cluster) -> float:
    """When the last scenario with objects of its own (the manifests) was done: the quiet begins after it."""
    namespaces = cluster.list("namespaces", selector="kubernetes.io/metadata.name=e2e-i-manifests")
    return time.time() if namespaces else 0.0
