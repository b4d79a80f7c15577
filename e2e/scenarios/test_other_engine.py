"""A server that Plimsoll knows nothing of: it is started, probed, read, served through the gateway, and drained.

The engine simulator without its launcher stands for it: runtime `openai` with its image, command, port and metrics.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.cluster.images import reference
from e2e.lib import simulated_fleet, stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, Object
from e2e.lib.load import Arrival, Load, OpenLoop, unique_text
from e2e.lib.service import Service, make_manifest
from e2e.lib.wait import wait_until
from plimsoll.api import labels

NAME, PORT, DRAIN_S = "foreign", 9000, 60
STEADY_S = 60  # one request a second
LONG, SHORT = 250, 20  # tokens of about 40 ms: ten seconds, and done before the pod is deleted


def _manifest() -> Object:
    image = reference("engine-simulated")
    engine = {
        "runtime": "openai",
        "image": image,
        "command": ["python3", "-m", "simulated", "serve", "$(PLIMSOLL_MODEL)"],
        "args": [
            *("--host", "0.0.0.0", "--port", str(PORT), "--served-model-name", NAME),
            *simulated_fleet.engine_args(),
        ],
        "port": PORT,
        "metrics": {"running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting"},
        "drainTimeout": f"{DRAIN_S}s",
    }
    small = {"requests": {"cpu": "20m", "memory": "96Mi"}, "limits": {"memory": "256Mi"}}
    serve = {"gpus": 0, "minReplicas": 1, "maxReplicas": 1, "pod": {"resources": small}}
    return make_manifest(NAME, {"serve": serve}, {"uri": "file:///models/none"}, engine, {"ttft": "2s", "tpot": "80ms"})


@pytest.fixture(scope="module")
def foreign(cluster: Cluster, namespace: str) -> Iterator[Service]:
    """One engine without a launcher."""
    cluster.apply(_manifest(), namespace=namespace)
    found = Service(cluster, namespace, NAME, stack.GATEWAY_URL)
    found.wait_ready()
    yield found
    cluster.kubectl("delete", "plim", NAME, "-n", namespace)


def test_engine_is_served_read_and_drained(foreign: Service, cluster: Cluster) -> None:
    (pod,) = foreign.ready_pods()
    prompts = [Prompt(unique_text(20, f"foreign {tokens}"), max_tokens=tokens) for tokens in (LONG, SHORT)]
    with Load(foreign.target, OpenLoop([Arrival(0.0, prompt) for prompt in prompts])) as load:
        wait_until("the engine answers", lambda: len(load.ledger.records) == 1 or None, 60)
        cluster.kubectl("delete", "pod", "-n", foreign.namespace, pod, "--wait=false")
    assert not load.ledger.failures, load.ledger.explain()
    foreign.wait_ready()
    assert foreign.ready_pods() != [pod]


def test_status_says_why_it_is_not_sized(foreign: Service) -> None:
    steady = [Arrival(float(n), Prompt(unique_text(20, f"status {n}"), max_tokens=SHORT)) for n in range(STEADY_S)]
    with Load(foreign.target, OpenLoop(steady)) as load:
        inactive = foreign.wait_condition("ScalingInactive", 2 * STEADY_S, reason="DemandUnknown")
        foreign.wait_condition("MetricsDegraded", 2 * STEADY_S, status="False")  # its metrics are read
    assert inactive["message"].startswith("engine openai reports no output tokens, no prompt tokens, ")
    assert not load.ledger.failures, load.ledger.explain()


def test_pods_say_which_engine_they_run(foreign: Service) -> None:
    for pod in foreign.pods("serve"):
        assert pod["metadata"]["labels"][labels.ENGINE] == "openai"
        assert labels.METRICS in pod["metadata"]["annotations"]
