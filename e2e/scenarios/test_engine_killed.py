"""d. An engine is killed under load: its own streams end, nothing else does, and the state tells.

Two ways to die: the engine's core is killed inside a living pod, and the pod is torn away whole.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import pytest

from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, KubectlError
from e2e.lib.load import ClosedLoop, Load, unique_text
from e2e.lib.metrics import GatewayClient
from e2e.lib.node import has_ended, main_process, signal_container
from e2e.lib.prober import Prober
from e2e.lib.request_log import RequestResult
from e2e.lib.service import START_S, Service
from e2e.lib.wait import sleep, wait_until

CONCURRENCY = 6
ENGINE_LOSS_OUTCOMES = {RequestResult.CUT, RequestResult.ERROR_EVENT, RequestResult.REJECTED, RequestResult.UNREACHABLE}
SETTLE_S = 5.0

_KILL_CORE = """
import os, signal
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        title = open(f"/proc/{pid}/cmdline").read() + open(f"/proc/{pid}/comm").read()
    except OSError:
        continue
    if "EngineCore" in title:
        os.kill(int(pid), signal.SIGKILL)
        print("killed", pid, title)
"""


def _kill_core(cluster: Cluster, service: Service, pod: str) -> None:
    try:
        said = cluster.execute(service.namespace, pod, "engine", "python3", "-c", _KILL_CORE)
    except KubectlError as error:  # the container may end, and this command with it, before it has returned
        said = str(error)
    assert "killed " in said, f"no EngineCore process was found: {said}"


def _kill_container(cluster: Cluster, service: Service, pod: str) -> None:
    found = cluster.get("pods", pod, service.namespace)
    assert found
    signal_container(found, "engine", "KILL")


def _force_delete_pod(cluster: Cluster, service: Service, pod: str) -> None:
    cluster.kubectl("delete", "pod", "-n", service.namespace, pod, "--force", "--grace-period=0", "--wait=false")


def _busiest(in_flight: Counter[str], pods: list[str]) -> str | None:
    streams, pod = max((in_flight[pod], pod) for pod in pods)
    return pod if streams else None


@pytest.mark.parametrize(
    "kill",
    [_kill_core, *(pytest.param(kill, marks=pytest.mark.extended) for kill in (_kill_container, _force_delete_pod))],
)
def test_engine_kill_ends_only_its_own_streams(
    kill: Callable[[Cluster, Service, str], None], pd: Service, cluster: Cluster, gateway: GatewayClient, prober: Prober
) -> None:
    def prompts(n: int) -> Prompt:
        return Prompt(unique_text(150, f"d {start} {n}"), max_tokens=200)

    start = time.time()
    events = len(pd.events())
    with Load(pd.target, ClosedLoop(CONCURRENCY, prompts)) as load:
        sleep(5)
        victim = wait_until(
            "a decode engine has streams", lambda: _busiest(gateway.in_flight(pd.key), pd.ready_pods("decode"))
        )
        found = cluster.get("pods", victim, pd.namespace)
        assert found
        process = main_process(found, "engine")
        killed_at = time.time()
        kill(cluster, pd, victim)
        # Until its last process has ended, the engine takes connections that it can no longer serve.
        wait_until("the engine's processes have ended", lambda: has_ended(process), every_s=0.1)
        killed_by = time.time()
        prober.allow_failures(killed_at, killed_by)
        condition = pd.wait_condition("Reconciling", status="True")
        wait_until("the engine is replaced", pd.is_ready, START_S)
        sleep(SETTLE_S)
    failures, later = load.ledger.failures, load.ledger.since(killed_by)
    print(f"{kill.__name__} {victim}: {[str(r.outcome) for r in failures]} of {load.ledger.summary()}")
    print(f"sent later: {later.summary()}; {len(pd.events()) - events} new Events")
    print(f"{condition['reason']}: {condition['message']}; Ready {pd.condition('Ready')['status']}")
    assert not later.failures, later.explain()
    unexplained = [r for r in failures if not (r.sent_at <= killed_by and r.outcome in ENGINE_LOSS_OUTCOMES)]
    assert not unexplained, load.ledger.explain()
    # Clients that are rejected while the engine ends ask again and again; each had one stream when it was killed.
    own = [r for r in failures if r.sent_at <= killed_at]
    assert len(own) < CONCURRENCY, f"the other engine's streams ended too:\n{load.ledger.explain()}"
