"""The operator is restarted and killed: it takes up where the last one was, and says nothing twice."""

from __future__ import annotations

from collections.abc import Callable

import httpx

from e2e.lib import stack
from e2e.lib.kube import Cluster, uids
from e2e.lib.node import signal_container
from e2e.lib.operator import OperatorClient
from e2e.lib.service import Service
from e2e.lib.wait import wait_until

RESTARTS = 5
SELECTOR = "app.kubernetes.io/component=operator"


def _holder(cluster: Cluster) -> str:
    return OperatorClient(cluster, stack.SYSTEM).leader


def _other_holder(cluster: Cluster, old: str) -> Callable[[], bool]:
    return lambda: _holder(cluster) not in ("", old)


def _event_counts(services: dict[str, Service]) -> set[tuple[str, int]]:
    """Every Event about the services: its name and how often it was counted."""
    return {(e["metadata"]["name"], e.get("count") or 1) for s in services.values() for e in s.events()}


def _reconciliations(cluster: Cluster) -> float:
    """How many reconciliations the leading operator has ended; 0 while it cannot be asked."""
    try:
        return (
            OperatorClient(cluster, stack.SYSTEM).metrics().total("plimsoll_operator_reconciles_total", outcome="done")
        )
    except httpx.HTTPError:
        return 0.0


def test_five_operator_restarts_add_no_event(shared: dict[str, Service], cluster: Cluster) -> None:
    for service in shared.values():
        service.wait_ready()
    before = _event_counts(shared)
    engines = [uids(s.pods()) for s in shared.values()]
    statuses = [s.status() for s in shared.values()]
    for _ in range(RESTARTS):
        old = _holder(cluster)
        cluster.kubectl("delete", "pod", "-n", stack.SYSTEM, "-l", SELECTOR, "--wait=false")
        wait_until("another operator leads", _other_holder(cluster, old), 90)
        wait_until("it has looked at every service", lambda: _reconciliations(cluster) >= len(shared), 60)
    added = _event_counts(shared) - before
    print(f"{RESTARTS} restarts: {len(before)} Events before, {len(added)} added; engines and statuses as they were")
    assert not added
    assert [uids(s.pods()) for s in shared.values()] == engines
    assert [s.status() for s in shared.values()] == statuses


def test_killed_operator_work_is_finished_by_next(solo: Service, cluster: Cluster) -> None:
    """Killed right after an edit that it must put back; the next one does."""
    name = f"{solo.name}-serve"
    right = _unavailable(cluster, solo, name)
    leader = cluster.get("pods", _holder(cluster), stack.SYSTEM)
    assert leader
    cluster.patch("poddisruptionbudgets", name, solo.namespace, {"spec": {"maxUnavailable": 4}})
    signal_container(leader, "operator", "KILL")
    wait_until("the edit is put back", lambda: _unavailable(cluster, solo, name) == right, 90)
    print(f"killed: maxUnavailable {right} again; the lease is held by {_holder(cluster)}")


def _unavailable(cluster: Cluster, service: Service, name: str) -> object:
    return (cluster.get("poddisruptionbudgets", name, service.namespace) or {})["spec"]["maxUnavailable"]
