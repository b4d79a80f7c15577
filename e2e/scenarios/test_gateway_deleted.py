"""A gateway pod is deleted under load, beside another one and as the only one: no request is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from e2e.lib import stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object
from e2e.lib.load import ClosedLoop, Load, unique_text
from e2e.lib.service import Service
from e2e.lib.wait import wait_until

REQUESTS = 240
USERS = 4  # one after the other, on connections that they keep
NEW_USERS = 2  # each request on a connection of its own
SLOW_USERS, THINK_S = 2, 8.0  # their connection is idle for most of the time
CLOSE = (("connection", "close"),)
GONE_S = 180.0  # of the deleted pod: a start of its successor, the last stream, and idle connections


@pytest.fixture
def gateways(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[int]:
    """So many gateways; afterwards as many as before."""
    before = len(stack.gateway_pods(cluster))
    stack.scale_gateways(cluster, request.param)
    wait_until("no gateway is ending", lambda: not _ending(cluster), GONE_S)
    yield request.param
    stack.scale_gateways(cluster, before)


def _all_pods(cluster: Cluster) -> dict[str, Object]:
    """The gateway pods, those that are being deleted included, by name."""
    found = cluster.list("pods", stack.SYSTEM, "app.kubernetes.io/component=gateway")
    return {pod["metadata"]["name"]: pod for pod in found}


def _ending(cluster: Cluster) -> bool:
    return len(_all_pods(cluster)) > len(stack.gateway_pods(cluster))


def _prompts(name: str, headers: tuple[tuple[str, str], ...] = ()) -> Callable[[int], Prompt]:
    """Streamed and whole ones in turn."""
    start = time.time()
    return lambda n: Prompt(unique_text(60, f"{name} {start} {n}"), max_tokens=24, stream=n % 2 == 0, headers=headers)


@pytest.mark.parametrize("gateways", [1, 2], indirect=True)
def test_gateway_deleted_under_load_loses_no_request(gateways: int, solo: Service, cluster: Cluster) -> None:
    with (
        Load(solo.target, ClosedLoop(USERS, _prompts("keep"))) as keep,
        Load(solo.target, ClosedLoop(NEW_USERS, _prompts("new", CLOSE))) as new,
        Load(solo.target, ClosedLoop(SLOW_USERS, _prompts("slow"), think_s=THINK_S)) as slow,
    ):
        loads = (keep, new, slow)
        wait_until("all clients have connections", lambda: all(load.ledger.records for load in loads), 60)
        gone = stack.gateway_pods(cluster)[0]["metadata"]["name"]
        deleted_at = time.time()
        cluster.kubectl("delete", "pod", gone, "-n", stack.SYSTEM, "--wait=false")
        stack.wait_for_gateways(cluster, gateways)
        ready_s = time.time() - deleted_at
        wait_until("the deleted pod has ended", lambda: gone not in _all_pods(cluster), GONE_S)
        gone_s = time.time() - deleted_at

        def sent() -> int:
            return sum(len(load.ledger.since(deleted_at).records) for load in loads)

        wait_until(f"{REQUESTS} requests since the deletion", lambda: sent() >= REQUESTS, 300)
    print(f"{gateways} gateways: successor ready after {ready_s:.0f} s, {gone} gone after {gone_s:.0f} s")
    for name, load in zip(("keep", "new", "slow"), loads, strict=True):
        print(f"{name}: {load.ledger.summary()}")
    assert not [failure for load in loads for failure in load.ledger.failures], "\n".join(
        load.ledger.explain() for load in loads if load.ledger.failures
    )
