"""A node is lost with a gateway, an operator and engines on it; a node is drained that has a tier's only engine.

Only a cluster of several nodes has these: `make e2e-nodes`.
"""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from e2e.cluster import pod_network
from e2e.cluster.settings import WORKER_NODES
from e2e.lib import simulated_fleet, stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object, is_true
from e2e.lib.load import Load, poisson
from e2e.lib.request_log import RequestRecord
from e2e.lib.service import Service
from e2e.lib.wait import sleep, wait_until

PRODUCTION = stack.CHART / "values-production.yaml"
CLOSE = (("connection", "close"),)  # each request on a connection of its own, so that every gateway gets some
RATE_PER_S = 11.0
TOKENS = 40
LOST_AT_S, LOST_S, LOAD_S = 90.0, 130.0, 240.0
NOTICED_S = 60.0  # the control plane calls a silent node NotReady after 50 s, and takes its pods off the endpoints


@pytest.fixture(scope="module")
def production(cluster: Cluster) -> None:
    """The chart with the values for clusters that must survive a node."""
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


def nodes_of(pods: list[Object]) -> Counter[str]:
    """How many of these pods each node has."""
    return Counter(pod["spec"]["nodeName"] for pod in pods)


def components(cluster: Cluster, component: str) -> list[Object]:
    return cluster.list("pods", stack.SYSTEM, f"app.kubernetes.io/component={component}")


def test_lost_node_costs_only_what_ran_there(
    production: None, service: Callable[[str], Service], cluster: Cluster
) -> None:
    fleet = service("spread")
    cluster.apply(
        simulated_fleet.fleet_manifest("spread", {"serve": simulated_fleet.replica_bounds(3, 6)}),
        namespace=fleet.namespace,
    )
    fleet.wait_ready()
    assert set(nodes_of(fleet.pods()).values()) == {1}, "three engines spread over three nodes by themselves"
    gateways, operators = nodes_of(components(cluster, "gateway")), nodes_of(components(cluster, "operator"))
    print(f"gateways {dict(gateways)}, operators {dict(operators)}")
    assert set(gateways.values()) == set(operators.values()) == {1}
    victim = max(set(gateways) & set(operators))
    prompts = simulated_fleet.prompts("lost", 100, TOKENS)
    prompt = lambda n: Prompt(prompts(n).text, max_tokens=TOKENS, headers=CLOSE)
    with Load(fleet.target, poisson(RATE_PER_S, LOAD_S, prompt)) as load:
        sleep(LOST_AT_S)
        lost_at = time.time()
        with lost(victim):
            while time.time() < lost_at + LOST_S:
                tier = fleet.status()["tiers"]["serve"]
                print(f"{time.time() - lost_at:5.1f} s {tier}")
                for c in fleet.status()["conditions"]:
                   if c["type"] not in ("Ready",) and c['status']=='True' or c['type'] in ('Ready','ServeReady'):
                      print("      ",c["type"],c["status"],c["reason"],c["message"][:400])
                sleep(10)
    rs=load.ledger.records if hasattr(load.ledger,'records') else []
    import collections
    late=collections.Counter(); tot=collections.Counter(); kinds=collections.defaultdict(collections.Counter)
    for r in rs:
        b=int((r.sent_at-lost_at)//10); tot[b]+=1; late[b]+= simulated_fleet.within_slo(r); kinds[b][str(r.outcome)+str(r.reason)]+=1
    for b in sorted(tot): print(b*10,tot[b],late[b],dict(kinds[b]))
    print(load.ledger.summary())
    for pod in [*fleet.pods(), *components(cluster, "gateway"), *components(cluster, "operator")]:
        print(pod["metadata"]["name"], pod["spec"]["nodeName"], is_true(pod, "Ready"), pod["metadata"].get("deletionTimestamp"))
    for event in fleet.events():
        print(event["reason"], event["message"])
