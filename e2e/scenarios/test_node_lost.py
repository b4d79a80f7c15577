"""A node is lost with a gateway, an operator and engines on it; a node is drained that has a tier's only engine.

These need a cluster of several nodes: `make e2e-nodes`.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from e2e.cluster import pod_network
from e2e.lib import simulated_fleet, stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object
from e2e.lib.load import Load, poisson, unique_text
from e2e.lib.request_log import RequestRecord, RequestResult
from e2e.lib.service import START_S, Service
from e2e.lib.wait import sleep, wait_until

PRODUCTION = stack.CHART / "values-production.yaml"
CLOSE = (("connection", "close"),)  # each request on a connection of its own, so that every gateway gets some
ENGINES = 3
TOKENS = 100
RATE_PER_S = 6.0
LOST_AT_S, LOST_S, LOAD_S = 60.0, 100.0, 170.0
NOTICED_S = 60.0  # the control plane takes a silent node's pods off the endpoints after 50 s
DRAINED_AT_S, DRAIN_LOAD_S = 10.0, 90.0


@pytest.fixture(scope="module")
def production(cluster: Cluster) -> None:
    """The chart with its values for clusters that must survive the loss of a node."""
    stack.install(cluster, "--values", str(PRODUCTION))


@contextmanager
def lost(node: str) -> Iterator[None]:
    """While the block lasts, the node is gone as if its power had failed: nobody says goodbye, connections hang."""
    subprocess.run(["docker", "kill", node], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["docker", "start", node], check=True, capture_output=True)
        pod_network.join()


def components(cluster: Cluster, component: str) -> list[Object]:
    return cluster.list("pods", stack.SYSTEM, f"app.kubernetes.io/component={component}")


def by_node(pods: list[Object]) -> Counter[str]:
    """How many of these pods each node has."""
    return Counter(pod["spec"]["nodeName"] for pod in pods)


def prompts(name: str) -> Callable[[int], Prompt]:
    start = time.time()
    return lambda n: Prompt(unique_text(100, f"{name} {start} {n}"), max_tokens=TOKENS, headers=CLOSE)


def summary(records: list[RequestRecord], origin_s: float) -> str:
    """Outcomes in steps of ten seconds, and the share within the SLO."""
    steps: dict[int, Counter[str]] = {}
    for record in records:
        step = steps.setdefault(int((record.sent_at - origin_s) // 10) * 10, Counter())
        step[str(record.outcome)] += 1
        step["within SLO"] += simulated_fleet.within_slo(record)
    return "\n".join(f"{begin:5d} s {dict(step)}" for begin, step in sorted(steps.items()))


def test_lost_node_costs_only_what_ran_there(
    production: None, service: Callable[[str], Service], cluster: Cluster
) -> None:
    """Connections to the lost gateway hang until Kubernetes takes it off its endpoints: those are Kubernetes' part."""
    fleet = service("spread")
    tiers = {"serve": simulated_fleet.replica_bounds(ENGINES, ENGINES + 1)}
    cluster.apply(simulated_fleet.fleet_manifest("spread", tiers), namespace=fleet.namespace)
    fleet.wait_ready()
    assert set(by_node(fleet.pods()).values()) == {1}, "engines spread over the nodes by themselves"
    gateways, operators = by_node(components(cluster, "gateway")), by_node(components(cluster, "operator"))
    assert set(gateways.values()) == set(operators.values()) == {1}
    victim = min(set(gateways) & set(operators))  # two and two on three nodes
    [engine] = [pod["metadata"]["name"] for pod in fleet.pods() if pod["spec"]["nodeName"] == victim]
    with Load(fleet.target, poisson(RATE_PER_S, LOAD_S, prompts("lost"))) as load:
        sleep(LOST_AT_S)
        with lost(victim):
            lost_at = time.time()
            degraded = fleet.wait_condition("ServeDegraded", LOST_S, reason="NodeNotReady")
            tier = fleet.status()["tiers"]["serve"]
            sleep(max(0.0, lost_at + LOST_S - time.time()))
    records = load.ledger.records
    print(f"{victim} is lost: {degraded['message']}\n{summary(records, lost_at)}")
    assert engine in degraded["message"]
    assert victim in degraded["message"]
    assert "starting" not in tier, tier
    cut = [r for r in records if not r.ok and r.sent_at < lost_at]
    assert all(r.outcome in (RequestResult.CUT, RequestResult.UNREACHABLE) for r in cut), load.ledger.explain()
    later = [r for r in records if not r.ok and lost_at <= r.sent_at < lost_at + NOTICED_S]
    assert all(r.status is None for r in later), "the gateway that is left serves whatever reaches it"
    failures = load.ledger.since(lost_at + NOTICED_S).failures
    assert not failures, "the lost node costs nothing any more\n" + simulated_fleet.format_records(failures)
    fleet.wait_ready()


def test_drained_node_with_the_only_engine_costs_no_request(
    production: None, service: Callable[[str], Service], cluster: Cluster
) -> None:
    alone = service("alone")
    manifest = simulated_fleet.fleet_manifest(
        "alone", {"serve": simulated_fleet.replica_bounds(1, 1)}, start_seconds=20
    )
    cluster.apply(manifest, namespace=alone.namespace)
    alone.wait_ready()
    [before] = alone.pods()
    node = before["spec"]["nodeName"]
    with Load(alone.target, poisson(1.0, DRAIN_LOAD_S, prompts("drained"))) as load:
        sleep(DRAINED_AT_S)
        drained_at = time.time()
        try:
            cluster.kubectl(
                "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=240s",
                f"--pod-selector=plimsoll.dev/service={alone.name}",
            )  # fmt: skip
            wait_until("the engine moved", lambda: len(alone.ready_pods()) == 1, START_S)
        finally:
            cluster.kubectl("uncordon", node)
    print(f"drained in {time.time() - drained_at:.0f} s\n{summary(load.ledger.records, drained_at)}")
    [after] = alone.pods()
    assert after["spec"]["nodeName"] != node
    assert not load.ledger.failures, load.ledger.explain()
