"""A converged fleet costs the API server nothing: over five minutes, no write but the leases' heartbeats.

The fleet is the shared services. The scenarios before this one only sent them requests, so their time counts; what
the operator wrote meanwhile about services that these scenarios made elsewhere is theirs: that includes one entry in
the list of namespaces with services for each namespace in which they made one. An operator applies everything once
when it starts, so that no quiet time is older than its pod.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime

import pytest

from e2e.lib import stack
from e2e.lib.kube import Cluster, Object
from e2e.lib.node import ApiCall, audit_writes
from e2e.lib.service import Service
from e2e.lib.wait import sleep
from plimsoll.controllers.reconcile.service_namespaces import CONFIGMAP_NAME

WINDOWS = 3  # in the first ones a probe of a pod may fail on a busy machine, which the operator must report
SETTLE_S = 15.0  # the last status writes after a change
OWNED_RESOURCES = frozenset(
    {
        "inferenceservices",
        "inferenceserviceadmissions",
        "deployments",
        "services",
        "poddisruptionbudgets",
        "networkpolicies",
    }
)


def _changes(statuses: Iterable[Object]) -> list[float]:
    """When conditions last changed, since the epoch."""
    conditions = [c for status in statuses for c in status.get("conditions") or ()]
    return [datetime.fromisoformat(c["lastTransitionTime"]).timestamp() for c in conditions]


def _last_cause(services: dict[str, Service], cluster: Cluster, writes: list[ApiCall]) -> float:
    """When the cluster or somebody else last did what the operator answers to, such as a pod's readiness."""
    pods = [*cluster.list("pods", stack.SYSTEM), *(pod for s in services.values() for pod in s.pods())]
    mine = {s.namespace for s in services.values()}
    edits = [
        c.at
        for c in writes
        if not c.user.startswith("system:") and c.resource in OWNED_RESOURCES and c.namespace in mine
    ]
    return max([*_changes(pod["status"] for pod in pods), *edits])


def _namespaces_with_new_services(since: float) -> set[str]:
    """Where somebody other than the cluster itself has created or applied a service since then."""
    return {
        c.namespace
        for c in audit_writes(since)
        if not c.user.startswith("system:") and c.resource == "inferenceservices" and c.verb in {"create", "patch"}
    }


def test_converged_fleet_writes_only_leases(
    shared: dict[str, Service], cluster: Cluster, request: pytest.FixtureRequest
) -> None:
    seconds = request.config.getoption("--quiet-seconds")
    assert cluster.list("pods", stack.SYSTEM, selector="app.kubernetes.io/component=operator")
    writes = audit_writes(time.time() - 2 * seconds)
    last = max(_last_cause(shared, cluster, writes), *_changes(s.status() for s in shared.values()))
    for _ in range(WINDOWS):
        since = last + SETTLE_S
        sleep(max(0.0, since + seconds - time.time()))
        last = _last_cause(shared, cluster, audit_writes(since))
        if last < since:
            break
    assert last < since, "pods or other users changed something in each window"
    own = f"system:serviceaccount:{stack.SYSTEM}:"
    writes = [c for c in audit_writes(since) if c.user.startswith(own) and c.at <= since + seconds]
    leases = [c for c in writes if c.resource == "leases"]
    here = {stack.SYSTEM, "", *(s.namespace for s in shared.values())}
    others = [c for c in writes if c.resource != "leases" and c.namespace in here]
    recorded = [c for c in others if (c.resource, c.name) == ("configmaps", CONFIGMAP_NAME)]
    if len(recorded) <= len(_namespaces_with_new_services(since - SETTLE_S) - here):
        others = [c for c in others if c not in recorded]
    print(f"{seconds:.0f} s: {len(leases)} writes of leases, {len(others)} others about the fleet")
    assert leases, "the audit log shows no lease renewal: is it the right log?"
    assert not others, "\n".join(map(str, others))
