"""An engine hangs under load: it gets no requests any more, is restarted, and the state names the cause.

Two ways to hang, on one of two simulated engines: the whole engine stops, or its engine core does while the API server
answers as before.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from e2e.lib.kube import Cluster, Object
from e2e.lib.load import ClosedLoop, Load
from e2e.lib.request_log import RequestRecord, RequestResult
from e2e.lib.service import Service
from e2e.lib.simulated_fleet import fleet_manifest, prompts, replica_bounds
from e2e.lib.wait import sleep, wait_until

CONCURRENCY = 6
UNREADY_S, RESTART_S = 15.0, 60.0  # after the hang, as docs/concepts/engine-pods.md promises
SEEN_S = 1.0  # until the scenario looks, and the gateway has the news of an unready pod
SETTLE_S = 10.0
HANG_OUTCOMES = {RequestResult.CUT, RequestResult.ERROR_EVENT, RequestResult.REJECTED, RequestResult.UNREACHABLE}

_SIGNAL_ENGINE = """
import os, signal, sys
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{pid}/cmdline").read().split(chr(0))
    except OSError:
        continue
    if words[1:4] == ["-m", "simulated", "serve"]:
        os.kill(int(pid), getattr(signal, sys.argv[1]))
        print("signalled", pid)
"""


def _signal_engine(cluster: Cluster, service: Service, pod: str, name: str) -> None:
    """Sends a signal to the engine itself, below the launcher."""
    said = cluster.execute(service.namespace, pod, "engine", "python3", "-c", _SIGNAL_ENGINE, name)
    assert "signalled " in said, f"no engine process was found: {said}"


def _pod(cluster: Cluster, service: Service, name: str) -> Object:
    found = cluster.get("pods", name, service.namespace)
    assert found, f"the pod {name} is gone"
    return found


def _restarts(pod: Object) -> int:
    return sum(int(status["restartCount"]) for status in pod["status"]["containerStatuses"])


def _is_running_again(pod: Object, restarts: int) -> bool:
    return _restarts(pod) > restarts and all("running" in s["state"] for s in pod["status"]["containerStatuses"])


@pytest.mark.parametrize("signal", ["SIGSTOP", "SIGUSR2"], ids=["engine", "core"])
def test_hung_engine_is_unready_restarted_and_named(
    signal: str, cluster: Cluster, service: Callable[[str], Service]
) -> None:
    fleet = service(f"hang-{signal.lower()}")
    manifest = fleet_manifest(fleet.name, {"serve": replica_bounds(2, 2)})
    cluster.apply(manifest, namespace=fleet.namespace)
    fleet.wait_ready()
    victim = fleet.ready_pods("serve")[0]
    restarts = _restarts(_pod(cluster, fleet, victim))
    with Load(fleet.target, ClosedLoop(CONCURRENCY, prompts(fleet.name, 100, 60), think_s=0.2)) as load:
        sleep(SETTLE_S)
        hung_at = time.time()
        _signal_engine(cluster, fleet, victim, signal)
        wait_until("the hung engine is unready", lambda: victim not in fleet.ready_pods("serve"), UNREADY_S, 0.2)
        unready_at = time.time()
        wait_until(
            "the hung engine is restarted",
            lambda: _is_running_again(_pod(cluster, fleet, victim), restarts),
            RESTART_S - (unready_at - hung_at),
        )
        restarted_at = time.time()
        told = fleet.wait_condition("ServeReady", status="False", reason="EngineFailing")
        events = fleet.wait_events("EngineFailing")
        fleet.wait_ready()
        sleep(SETTLE_S)
    terminated = _pod(cluster, fleet, victim)["status"]["containerStatuses"][0]["lastState"]["terminated"]
    print(
        f"{signal} {victim}: unready after {unready_at - hung_at:.1f} s, restarted after {restarted_at - hung_at:.1f} s"
    )
    print(f"{terminated['exitCode']}: {terminated['message']}; {told['reason']}: {told['message']}")
    print(f"{load.ledger.summary()}; failed: {[str(r.outcome) for r in load.ledger.failures]}")
    assert "the engine made no progress for " in terminated["message"]
    assert terminated["exitCode"] == 1
    assert "the engine made no progress for " in told["message"]
    assert any("the engine made no progress for " in event["message"] for event in events)
    later = load.ledger.since(unready_at + SEEN_S)
    assert later.records, "the other engine got no requests"
    assert not later.failures, later.explain()
    strangers = [record for record in load.ledger.failures if not _was_on_hung_engine(record, hung_at, unready_at)]
    assert not strangers, load.ledger.explain()


def _was_on_hung_engine(record: RequestRecord, hung_at: float, unready_at: float) -> bool:
    """Whether the request may have been at the hung engine: under way at the hang, or sent before it was unready."""
    in_time = record.overlaps(hung_at, unready_at + SEEN_S) and record.sent_at <= unready_at + SEEN_S
    return in_time and record.outcome in HANG_OUTCOMES
