"""f. The picker is killed and hung under load: Envoy lets requests pass by itself, counts it, and nobody notices."""

from __future__ import annotations

import time

import pytest

from e2e.lib import stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object, is_true
from e2e.lib.load import ClosedLoop, Load, unique_text
from e2e.lib.metrics import GatewayClient
from e2e.lib.node import signal_container
from e2e.lib.service import Service
from e2e.lib.wait import sleep, wait_until

USERS = 2
SETTLE_S = 5.0


def _restarts(pods: list[Object]) -> int:
    return sum(s["restartCount"] for p in pods for s in p["status"]["containerStatuses"] if s["name"] == "picker")


def test_failure_mode_allowed_is_zero_without_fault(gateway: GatewayClient) -> None:
    allowed = gateway.failures_allowed()
    print(f"failure_mode_allowed after all scenarios so far: {allowed}")
    assert allowed == 0


@pytest.mark.parametrize("signal", ["KILL", pytest.param("STOP", marks=pytest.mark.extended)])
def test_picker_outage_fails_no_request(
    signal: str, solo: Service, pd: Service, cluster: Cluster, gateway: GatewayClient
) -> None:
    def prompts(n: int) -> Prompt:
        return Prompt(unique_text(140, f"f {start} {n}"), max_tokens=32)

    def more(n: int) -> Prompt:
        return prompts(-n - 1)

    start = time.time()
    before, restarts = gateway.failures_allowed(), _restarts(stack.gateway_pods(cluster))
    engines = [s.ready_pods() for s in (solo, pd)]
    with (
        Load(solo.target, ClosedLoop(USERS, prompts, think_s=0.3)) as one,
        Load(pd.target, ClosedLoop(USERS, more, think_s=0.3)) as two,
    ):
        sleep(SETTLE_S)
        pods = stack.gateway_pods(cluster)
        for pod in pods:
            signal_container(pod, "picker", signal)
        struck_at = time.time()
        wait_until(
            "the kubelet restarts the pickers",
            lambda: _restarts(stack.gateway_pods(cluster)) >= restarts + len(pods),
            120,
        )
        wait_until("the gateway is whole", lambda: all(is_true(p, "Ready") for p in stack.gateway_pods(cluster)), 120)
        whole_after = time.time() - struck_at
        sleep(SETTLE_S)
    allowed = gateway.failures_allowed() - before
    print(f"SIG{signal}: failure_mode_allowed {allowed}, whole again after {whole_after:.0f} s")
    print(f"solo: {one.ledger.summary()}\npd: {two.ledger.summary()}")
    assert not one.ledger.failures, one.ledger.explain()
    assert not two.ledger.failures, two.ledger.explain()
    assert allowed > 0
    assert [s.ready_pods() for s in (solo, pd)] == engines
