"""An engine that leaves before its answers are done: each client is told, and so is whoever looks at the service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.lib import simulated_fleet, stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster
from e2e.lib.load import Arrival, Load, OpenLoop, unique_text
from e2e.lib.metrics import Samples
from e2e.lib.request_log import RequestResult
from e2e.lib.service import Service
from e2e.lib.wait import wait_until

DRAIN_S = 5
LONG, SHORT = 3000, 50  # tokens of about 40 ms: two minutes, and done before the drain begins
METRICS_PORT = 8081
CUT_OUTCOMES = {RequestResult.CUT, RequestResult.ERROR_EVENT}


def _drain_timeout_counts(cluster: Cluster, key: str) -> tuple[float, float]:
    """Drains that timed out and requests that they cut off, as the operator counts them."""
    found = cluster.list("pods", stack.SYSTEM, "app.kubernetes.io/component=operator")
    pages = Samples.sum(
        Samples.parse(cluster.in_pod(stack.SYSTEM, pod["metadata"]["name"], METRICS_PORT, "/metrics"))
        for pod in found
        if "deletionTimestamp" not in pod["metadata"]
    )
    drains = pages.total("plimsoll_operator_drains_timed_out_total", service=key)
    return drains, pages.total("plimsoll_operator_requests_aborted_total", service=key)


@pytest.fixture(scope="module")
def leaving(cluster: Cluster, namespace: str) -> Iterator[Service]:
    """One engine that may take five seconds for what it still answers when it goes."""
    made = simulated_fleet.fleet_manifest(
        "leaving", {"serve": simulated_fleet.replica_bounds(1, 1)}, max_model_len=8192
    )
    made["spec"]["engine"]["drainTimeout"] = f"{DRAIN_S}s"
    cluster.apply(made, namespace=namespace)
    found = Service(cluster, namespace, "leaving", stack.GATEWAY_URL)
    found.wait_ready()
    yield found
    cluster.kubectl("delete", "plim", "leaving", "-n", namespace)


def _plan(*tokens: int) -> OpenLoop:
    return OpenLoop(
        [Arrival(0.0, Prompt(unique_text(20, f"leaving {n}"), max_tokens=many)) for n, many in enumerate(tokens)]
    )


def _delete(cluster: Cluster, service: Service, *flags: str) -> str:
    (pod,) = service.ready_pods()
    cluster.kubectl("delete", "pod", "-n", service.namespace, pod, "--wait=false", *flags)
    return pod


@pytest.mark.parametrize(
    ("grace", "words", "counted"),
    [
        ((), "2 requests were aborted in serve pod {}, still running 5 s after its stop", 2),
        (("--grace-period=3",), "serve pod {} was killed after its termination grace period of 3 s", 0),
    ],
    ids=["in time", "killed"],
)
def test_drain_timeout_cuts_streams_and_reports_them(
    leaving: Service, cluster: Cluster, grace: tuple[str, ...], words: str, counted: int
) -> None:
    leaving.wait_ready()
    drains, requests = _drain_timeout_counts(cluster, leaving.key)
    with Load(leaving.target, _plan(LONG, LONG, SHORT)) as load:
        wait_until("the engine answers", lambda: len(load.ledger.records) == 1 or None, 60)
        pod = _delete(cluster, leaving, *grace)
    events = wait_until(
        "it is told", lambda: [e for e in leaving.wait_events("DrainTimedOut") if pod in e["message"]], 60
    )
    print(load.ledger.explain(), events[0]["message"], sep="\n")
    assert words.format(pod) in events[0]["message"]
    assert sorted(r.outcome in CUT_OUTCOMES for r in load.ledger.records) == [False, True, True]
    assert sum(r.ok for r in load.ledger.records) == 1
    now = _drain_timeout_counts(cluster, leaving.key)
    assert (now[0] - drains, now[1] - requests) == (1, counted)
