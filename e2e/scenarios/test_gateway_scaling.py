"""The number of gateways changes under load as an autoscaler changes it: no request fails, and a quota stays exact.

A tenant asks for twice its quota all the time. A new owner of its service that knew nothing of what was spent would
grant it one more burst. Attainment by the number of gateways is printed: a run has too few requests to judge it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from e2e.lib import simulated_fleet, stack
from e2e.lib.kube import Cluster
from e2e.lib.load import Load, poisson
from e2e.lib.metrics import GatewayClient
from e2e.lib.request_log import RequestRecord, RequestResult
from e2e.lib.service import Service
from e2e.lib.wait import sleep, wait_until

COUNTS = (1, 2, 3, 1)  # of gateways
STEADY_S = 40.0  # with each number
SLOTS = 9
LIGHT = 1.0  # requests/s, until the gateways know what the replica carries
SHARE = 0.8  # of what the replica carries
TENANT, QUOTA_PER_S, BURST = "jobs", 1.0, 10  # a burst is ten seconds of the rate
TENANT_HEADER = ("x-gateway-inference-fairness-id", TENANT)
CLOSE = ("connection", "close")  # so that every gateway gets some
ENDED_S = 180.0  # of a gateway that leaves: its last stream
TOLERANCE = 0.01


@pytest.fixture
def one_gateway(cluster: Cluster) -> Iterator[None]:
    before = len(stack.gateway_pods(cluster))
    _scale(cluster, 1)
    yield
    _scale(cluster, before)


@pytest.fixture
def shared(cluster: Cluster, namespace: str, one_gateway: None) -> Iterator[Service]:
    """One replica whose capacity the gateways know."""
    made = simulated_fleet.fleet_manifest(
        "scaled-door", {"serve": simulated_fleet.replica_bounds(1, 1)}, max_num_seqs=SLOTS
    )
    made["spec"]["admission"] = {"tenants": [{"name": TENANT, "requestsPerSecond": str(QUOTA_PER_S)}]}
    cluster.apply(made, namespace=namespace)
    found = Service(cluster, namespace, "scaled-door", stack.GATEWAY_URL)
    found.wait_ready()
    prompts = simulated_fleet.prompts("light", 200, 24)
    with Load(found.target, poisson(LIGHT, 300, lambda n: replace(prompts(n), headers=(CLOSE,)), seed=1)):
        simulated_fleet.wait_limits_published(found)
    yield found
    cluster.kubectl("delete", "plim", "scaled-door", "-n", namespace)


def _scale(cluster: Cluster, count: int) -> None:
    """By the scale subresource, as an autoscaler does; waits until those that leave have ended."""
    stack.scale_gateways(cluster, count)
    selector = "app.kubernetes.io/component=gateway"
    wait_until("no gateway is ending", lambda: len(cluster.list("pods", stack.SYSTEM, selector)) == count, ENDED_S)


def _carried(records: list[RequestRecord], begin: float, end: float) -> str:
    some = [r for r in records if begin <= r.sent_at < end]
    kept = sum(map(simulated_fleet.within_slo, some))
    return f"{kept} of {len(some)} within the SLO ({kept / len(some):.1%})"


def test_gateways_scale_under_load(shared: Service, cluster: Cluster, gateway: GatewayClient) -> None:
    users, jobs = (
        simulated_fleet.prompts(name, words, tokens) for name, words, tokens in (("u", 200, 24), ("j", 20, 1))
    )
    rate = SHARE * simulated_fleet.replica_capacity(shared)
    with (
        Load(shared.target, poisson(rate, 900, lambda n: replace(users(n), headers=(CLOSE,)), seed=2)) as user_load,
        Load(
            shared.target,
            poisson(2 * QUOTA_PER_S, 900, lambda n: replace(jobs(n), headers=(CLOSE, TENANT_HEADER)), seed=3),
        ) as job_load,
    ):
        steady, before = [], gateway.fallbacks_by_pod()
        seen = dict(before)
        for count in COUNTS:
            known = gateway.pods
            _scale(cluster, count)
            wait_until("each gateway can ask the others", gateway.has_all_peers, 60)
            begin = time.time()
            sleep(STEADY_S)
            steady.append((count, gateway.owner(shared.key), begin, time.time()))
            print(f"{count} gateways, of which {len(set(gateway.pods) & set(known))} were there before")
            seen |= gateway.fallbacks_by_pod()
    fallbacks = sum(seen.values()) - sum(before.values())
    users_sent, jobs_sent = user_load.ledger.records, job_load.ledger.records
    for count, owner, begin, end in steady:
        print(f"{count} gateways, owner {owner}: {_carried(users_sent, begin, end)}")
    admitted = [r for r in jobs_sent if r.outcome is not RequestResult.REJECTED]
    other = [r for r in jobs_sent if r.outcome is RequestResult.REJECTED and r.reason != "quota_exceeded"]
    sent_s = max(r.sent_at for r in jobs_sent) - min(r.sent_at for r in jobs_sent)
    expected = BURST + QUOTA_PER_S * sent_s
    print(f"{len(jobs_sent)} jobs in {sent_s:.0f} s, {len(admitted)} admitted, the quota is {expected:.1f}")
    print(f"{len(other)} jobs rejected for another reason; {fallbacks} requests decided without the owner")
    failed = simulated_fleet.unexpected_failures([*users_sent, *jobs_sent])
    assert not failed, simulated_fleet.format_records(failed)
    assert len(admitted) <= expected * (1 + TOLERANCE) + fallbacks
    assert len(admitted) >= expected * (1 - TOLERANCE) - fallbacks - len(other) - 1
