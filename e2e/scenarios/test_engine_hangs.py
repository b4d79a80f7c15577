"""An engine hangs under load: it gets no requests any more, is restarted, and the state names the cause.

Two ways to hang, on one of two simulated engines: the whole engine stops, or its engine core does while the API server
answers as before. Then the engine core of a real vLLM, which is a process of its own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import datetime

import pytest

from e2e.lib.kube import Cluster, Object, condition
from e2e.lib.load import ClosedLoop, Load
from e2e.lib.metrics import GatewayClient
from e2e.lib.prober import Prober
from e2e.lib.request_log import RequestRecord, RequestResult
from e2e.lib.service import START_S, Service
from e2e.lib.simulated_fleet import fleet_manifest, prompts, replica_bounds
from e2e.lib.wait import sleep, wait_until

CONCURRENCY = 6
# As docs/concepts/engine-pods.md promises: unready within 15 s and restarted within 60 s for limits of the launcher of
# 10 s and 40 s. A core that has been slow to answer, as on a busy machine, stretches both limits alike.
UNREADY_SHARE, UNREADY_DELAY_S, RESTART_DELAY_S = 0.25, 5.0, 20.0
LIMIT = r"the engine made no progress for (\d+) s"
IN_TRANSIT_S = 1.0  # for what a gateway has picked before
SETTLE_S = 10.0
HANG_OUTCOMES = {RequestResult.CUT, RequestResult.ERROR_EVENT, RequestResult.REJECTED, RequestResult.UNREACHABLE}

_SIGNAL_PROCESS = """
import os, signal, sys
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        title = open(f"/proc/{pid}/cmdline").read().replace(chr(0), " ") + open(f"/proc/{pid}/comm").read()
    except OSError:
        continue
    if sys.argv[2] in title and int(pid) != os.getpid():
        os.kill(int(pid), getattr(signal, sys.argv[1]))
        print("signalled", pid)
"""


def _signal_process(cluster: Cluster, service: Service, pod: str, signal: str, title: str) -> None:
    """Sends a signal to the processes below the launcher that have a title."""
    said = cluster.execute(service.namespace, pod, "engine", "python3", "-c", _SIGNAL_PROCESS, signal, title)
    assert "signalled " in said, f"no process {title} was found: {said}"


def _pod(cluster: Cluster, service: Service, name: str) -> Object:
    found = cluster.get("pods", name, service.namespace)
    assert found, f"the pod {name} is gone"
    return found


def _restarts(pod: Object) -> int:
    return sum(int(status["restartCount"]) for status in pod["status"]["containerStatuses"])


def _restarted(pod: Object, restarts: int) -> Object | None:
    """The pod, if its container runs again."""
    statuses = pod["status"]["containerStatuses"]
    return pod if _restarts(pod) > restarts and all("running" in status["state"] for status in statuses) else None


def _last_words(pod: Object) -> str:
    """The termination message of the container before this one."""
    return str(pod["status"]["containerStatuses"][0]["lastState"]["terminated"]["message"])


def _unready_since(pod: Object) -> float:
    """When the pod became unready, to the second below; since the epoch."""
    return datetime.fromisoformat(condition(pod, "Ready")["lastTransitionTime"]).timestamp()


def _started_at(pod: Object) -> float:
    """When its container has started, to the second below; since the epoch."""
    return datetime.fromisoformat(pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]).timestamp()


@pytest.mark.parametrize(
    "signal", [pytest.param("SIGSTOP", id="engine", marks=pytest.mark.extended), pytest.param("SIGUSR2", id="core")]
)
def test_hung_engine_is_unready_restarted_and_named(
    signal: str, cluster: Cluster, service: Callable[[str], Service], gateway: GatewayClient
) -> None:
    fleet = service(f"hang-{signal.lower()}")
    manifest = fleet_manifest(fleet.name, {"serve": replica_bounds(2, 2)}, profile_scale=4)
    del manifest["spec"]["slo"]  # so that the gateway rejects nothing
    cluster.apply(manifest, namespace=fleet.namespace)
    fleet.wait_ready()
    victim = fleet.ready_pods("serve")[0]
    restarts = _restarts(_pod(cluster, fleet, victim))
    with Load(fleet.target, ClosedLoop(CONCURRENCY, prompts(fleet.name, 100, 60), think_s=0.2)) as load:
        sleep(SETTLE_S)
        hung_at = time.time()
        _signal_process(cluster, fleet, victim, signal, "simulated serve")
        hung_by = time.time()
        wait_until("the hung engine is unready", lambda: victim not in fleet.ready_pods("serve"), START_S, 0.2)
        unready_s = _unready_since(_pod(cluster, fleet, victim)) - hung_by
        wait_until("no gateway picks it", lambda: victim not in gateway.routable_pods(fleet.key), every_s=0.1)
        unpicked_at = time.time()
        running = wait_until(
            "the hung engine is restarted", lambda: _restarted(_pod(cluster, fleet, victim), restarts), START_S
        )
        restart_s = _started_at(running) - hung_by
        reported = fleet.wait_condition("ServeDegraded", reason="EngineFailing")
        events = fleet.wait_events("EngineFailing")
        fleet.wait_ready()
        sleep(SETTLE_S)
    print(f"{signal} {victim}: unready after {unready_s:.1f} s, restarted after {restart_s:.1f} s")
    print(f"{_last_words(running)}; {reported['reason']}: {reported['message']}")
    print(f"{load.ledger.summary()}; failed: {[str(r.outcome) for r in load.ledger.failures]}")
    limit = re.search(LIMIT, _last_words(running))
    assert limit, _last_words(running)
    assert unready_s <= UNREADY_SHARE * float(limit[1]) + UNREADY_DELAY_S
    assert unpicked_at - hung_by <= UNREADY_SHARE * float(limit[1]) + 2 * UNREADY_DELAY_S
    assert restart_s <= float(limit[1]) + RESTART_DELAY_S
    assert "the engine made no progress for " in reported["message"]
    assert any("the engine made no progress for " in event["message"] for event in events)
    later = load.ledger.since(unpicked_at + IN_TRANSIT_S)
    assert later.records, "the other engine got no requests"
    assert not later.failures, later.explain()
    unexplained = [record for record in load.ledger.failures if not _was_on_hung_engine(record, hung_at, unpicked_at)]
    assert not unexplained, load.ledger.explain()


def _was_on_hung_engine(record: RequestRecord, hung_at: float, unpicked_at: float) -> bool:
    """Whether the request may have been at the hung engine: under way at the hang, or sent before it was unready."""
    in_time = record.ended_at >= hung_at and record.sent_at <= unpicked_at + IN_TRANSIT_S
    return in_time and record.outcome in HANG_OUTCOMES


@pytest.mark.extended  # with vLLM itself; the launcher is the same before the simulator
def test_hung_core_of_vllm_is_restarted_and_named(pd: Service, cluster: Cluster, prober: Prober) -> None:
    """A busy machine may stretch the bounds of an engine on a CPU, so this one has no bound of its own."""
    victim = pd.ready_pods("decode")[0]
    restarts = _restarts(_pod(cluster, pd, victim))
    hung_at = time.time()
    _signal_process(cluster, pd, victim, "SIGSTOP", "EngineCore")
    wait_until("the hung engine is unready", lambda: victim not in pd.ready_pods("decode"), START_S)
    unready_at = time.time()
    running = wait_until(
        "the hung engine is restarted", lambda: _restarted(_pod(cluster, pd, victim), restarts), START_S
    )
    restarted_at = time.time()
    prober.allow_failures(hung_at, restarted_at)
    reported = pd.wait_condition("DecodeDegraded", reason="EngineFailing")
    pd.wait_ready()
    print(f"{victim}: unready after {unready_at - hung_at:.1f} s, restarted after {restarted_at - hung_at:.1f} s")
    print(f"{_last_words(running)}; {reported['message']}")
    assert "the engine made no progress for " in _last_words(running)
    assert "the engine made no progress for " in reported["message"]
