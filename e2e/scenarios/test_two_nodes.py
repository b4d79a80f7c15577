"""vLLM itself over two pods, pipeline parallel on CPUs: the group serves, and serves again after its worker was killed.

The LeaderWorkerSet's controller is `e2e.lib.pod_groups`. On CPUs vLLM 0.32 allocates what a stage receives only in its
warm-up, which `--enforce-eager` with a fixed KV cache leaves out; so the service compiles, with a backend that does
nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from e2e.lib import foreign_fleets, pod_groups
from e2e.lib.client import Prompt
from e2e.lib.definitions import wait_until_established
from e2e.lib.kube import Cluster, is_true
from e2e.lib.load import ClosedLoop, Load
from e2e.lib.request_log import RequestLog
from e2e.lib.service import START_S, Service, make_manifest
from e2e.lib.wait import wait_until
from plimsoll.api import labels

WARM_UP = ["--no-enforce-eager", "--compilation-config", json.dumps({"mode": 1, "backend": "eager"})]
SET = "spread-serve"
TOKENS = 8


@pytest.fixture(scope="module")
def kind(cluster: Cluster) -> Iterator[None]:
    """The definition of LeaderWorkerSets."""
    cluster.kubectl("apply", "-f", str(foreign_fleets.SET_CRD))
    crd = f"crd/{labels.SET_PLURAL}.{labels.SET_GROUP}"
    wait_until_established(cluster.kubectl, crd)
    yield
    cluster.kubectl("delete", "--ignore-not-found", crd)


def ask(service: Service) -> RequestLog:
    """Two users for 20 s, all of whom get answers."""
    users = ClosedLoop(2, lambda n: Prompt(f"Question {n}", max_tokens=TOKENS), seconds=20)
    ledger = Load(service.target, users).run()
    print(ledger.summary())
    assert not ledger.failures, ledger.explain()
    return ledger


def restarts(cluster: Cluster, namespace: str, pod: str) -> int:
    found = cluster.get("pods", pod, namespace) or {}
    return sum(one["restartCount"] for one in found.get("status", {}).get("containerStatuses", ()))


@pytest.mark.usefixtures("kind")
def test_vllm_over_two_pods_serves(cluster: Cluster, service: Callable[[str], Service]) -> None:
    spread = service("spread")
    tiers = {"serve": {"nodes": 2}}
    cluster.apply(make_manifest("spread", tiers, engine={"args": WARM_UP}), namespace=spread.namespace)
    argv = ("get", f"{labels.SET_PLURAL}.{labels.SET_GROUP}", "-n", spread.namespace, "-o", "name")
    wait_until("its LeaderWorkerSet exists", lambda: SET in cluster.kubectl(*argv), START_S)
    leader, worker = pod_groups.make_groups(cluster, spread.namespace, SET)
    wait_until("the group is ready", lambda: spread.ready_pods("serve") == [leader], START_S)
    wait_until("the service is Ready", lambda: is_true(spread.get(), "Ready"), START_S)

    ledger = ask(spread)
    for pod, stage in ((leader, "PP0"), (worker, "PP1")):
        log = cluster.logs(spread.namespace, pod, "engine", tail=-1)
        assert f"Worker_{stage}" in log, f"{pod} runs stage {stage} of the model"
    tokens = spread.engine_metrics(leader).total("vllm:generation_tokens_total")
    assert tokens >= TOKENS * len(ledger.records)

    kill_all = "kill -9 -1 || true"  # but for the launcher, which then ends
    cluster.execute(spread.namespace, worker, "engine", "sh", "-c", kill_all)
    wait_until("the worker has restarted", lambda: restarts(cluster, spread.namespace, worker) > 0, START_S)
    pod_groups.replace_groups(cluster, spread.namespace, SET, [leader, worker])
    wait_until("the new group is ready", lambda: spread.ready_pods("serve") == [leader], START_S)
    wait_until("the service is Ready again", spread.is_ready, START_S)
    ask(spread)
    cluster.delete("inferenceservices", "spread", namespace=spread.namespace)
    wait_until("leader and worker are gone", lambda: not spread.pods(), START_S)
