"""The operator is restarted and killed: it takes up where the last one was, and says nothing twice."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from e2e.lib import simulated_fleet, stack
from e2e.lib.kube import Cluster, uids
from e2e.lib.node import signal_container
from e2e.lib.operator import OperatorClient
from e2e.lib.service import Service
from e2e.lib.wait import wait_until

RESTARTS = 5
SHRINK_TIMEOUT_S = 420.0  # a minute without requests, the start-up time that is assumed before any, and a busy machine
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
        wait_until("another operator leads", _other_holder(cluster, old), 180)
        wait_until("it has looked at every service", lambda: _reconciliations(cluster) >= len(shared), 180)
    wait_until("the statuses are as they were", lambda: [s.status() for s in shared.values()] == statuses)
    added = _event_counts(shared) - before
    print(f"{RESTARTS} restarts: {len(before)} Events before, {len(added)} added; engines and statuses as they were")
    assert not added
    assert [uids(s.pods()) for s in shared.values()] == engines


def test_killed_operator_work_is_finished_by_next(solo: Service, cluster: Cluster) -> None:
    """Killed right after an edit that it must put back; the next one does."""
    name = f"{solo.name}-serve"
    right = _unavailable(cluster, solo, name)
    leader = cluster.get("pods", _holder(cluster), stack.SYSTEM)
    assert leader
    cluster.patch("poddisruptionbudgets", name, solo.namespace, {"spec": {"maxUnavailable": 4}})
    signal_container(leader, "operator", "KILL")
    wait_until("the edit is put back", lambda: _unavailable(cluster, solo, name) == right, 180)
    print(f"killed: maxUnavailable {right} again; the lease is held by {_holder(cluster)}")


@pytest.mark.extended
def test_idle_fleet_shrinks_after_operator_and_gateway_restart(
    service: Callable[[str], Service], cluster: Cluster
) -> None:
    """No request has ended since either started: that none arrives is known all the same."""
    idle = service("idle-restart")
    manifest = simulated_fleet.fleet_manifest(idle.name, {"serve": simulated_fleet.replica_bounds(3, 4)})
    cluster.apply(manifest, namespace=idle.namespace)
    idle.wait_ready()
    wait_until("three engines are ready", lambda: len(idle.ready_pods()) == 3)
    for name in ("operator", "gateway"):
        cluster.kubectl("rollout", "restart", f"deployment/plimsoll-{name}", "-n", stack.SYSTEM)
    for name in ("operator", "gateway"):
        argv = ("rollout", "status", f"deployment/plimsoll-{name}", "-n", stack.SYSTEM, "--timeout=180s")
        cluster.kubectl(*argv, timeout_s=200)
    cluster.patch("inferenceservices", idle.name, idle.namespace, {"spec": {"tiers": {"serve": {"minReplicas": 1}}}})
    wait_until("one engine is left", lambda: len(idle.pods()) == 1, SHRINK_TIMEOUT_S)
    events = [one["message"] for one in idle.wait_events("ScaledDown")]
    assert any("no request for" in message for message in events), events
    print(f"idle after both restarts: {events[-1]}")
    idle.wait_condition("ScalingInactive", status="False")


def _unavailable(cluster: Cluster, service: Service, name: str) -> object:
    return (cluster.get("poddisruptionbudgets", name, service.namespace) or {})["spec"]["maxUnavailable"]
