"""What other autoscalers follow: the KEDA scaler through its Service, and the recommendations over HTTP.

The scenario plays KEDA: it asks as KEDA does, from a pod, and scales the Deployment to the answer, from zero (KEDA
itself: `test_keda.py`). With a standby and a leader, half of all connections meet a pod without decisions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx
import jsonschema
import pytest

from e2e.cluster.settings import ROOT
from e2e.lib import simulated_fleet, stack
from e2e.lib.client import Prompt
from e2e.lib.kube import Cluster, KubectlError
from e2e.lib.load import Load, poisson, unique_text
from e2e.lib.operator import PORT, OperatorClient
from e2e.lib.service import Service
from e2e.lib.wait import wait_until

SCHEMA = json.loads((ROOT / "docs" / "reference" / "recommendations.schema.json").read_text())
SELECTOR = "app.kubernetes.io/component=operator"
VALUES = "operator.replicas=2,operator.kedaScaler.enabled=true,operator.recommendations.enabled=true"
ADDRESS = f"{stack.RELEASE}-keda.{stack.SYSTEM}.svc:8082"
ANSWER_S = 60.0  # a lease that changes hands, a busy machine
RATE = 12.0  # requests/s; one replica carries about 6

# KEDA's two questions, in a pod of the operator's image. Prints the count and whether it is active, or the status.
CLIENT = """
import sys, grpc
from plimsoll.controllers.keda_scaler import messages
from plimsoll.controllers.keda_scaler.answers import METRIC_NAME
address, namespace, service = sys.argv[1:]
reference = messages.ScaledObjectRef(name="scaled", namespace=namespace, scalerMetadata={"service": service})
request = messages.GetMetricsRequest(scaledObjectRef=reference, metricName=METRIC_NAME)
options = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 500)]
with grpc.insecure_channel(address, options=options) as channel:
    def ask(method, question, answer):
        stub = channel.unary_unary(f"/{messages.SERVICE}/{method}", type(question).SerializeToString, answer.FromString)
        return stub(question, timeout=20, wait_for_ready=True)
    try:
        count = ask("GetMetrics", request, messages.GetMetricsResponse).metricValues[0].metricValue
        print(count, ask("IsActive", reference, messages.IsActiveResponse).result)
    except grpc.RpcError as error:
        print(error.code().name, error.details())
"""


@pytest.fixture(scope="module")
def scaler(cluster: Cluster) -> Iterator[None]:
    """The chart with the scaler, the API and a standby; afterwards without them."""
    stack.install(cluster, "--set", VALUES)
    yield
    stack.install(cluster)


@pytest.fixture(scope="module")
def operator(cluster: Cluster) -> OperatorClient:
    return OperatorClient(cluster, stack.SYSTEM)


def read_keda_count(cluster: Cluster, namespace: str, service: str) -> str:
    """The answer to KEDA's questions, "" while no pod can ask."""
    for pod in cluster.list("pods", stack.SYSTEM, SELECTOR):
        try:
            argv = ("python", "-c", CLIENT, ADDRESS, namespace, service)
            return cluster.execute(stack.SYSTEM, pod["metadata"]["name"], "operator", *argv).strip()
        except KubectlError:
            continue
    return ""


def _prompt(name: str) -> Callable[[int], Prompt]:
    return lambda n: Prompt(unique_text(300, f"{name} {n}"), max_tokens=48)


@pytest.mark.usefixtures("scaler")
def test_deployment_follows_scaler_from_zero(cluster: Cluster, service: Callable[[str], Service]) -> None:
    asleep = service("asleep")
    tiers = {"serve": simulated_fleet.replica_bounds(0, 6)}
    manifest = simulated_fleet.fleet_manifest("asleep", tiers)
    manifest["spec"]["scaling"] = {"mode": "Recommend"}
    cluster.apply(manifest, namespace=asleep.namespace)
    wait_until(
        "nothing is recommended", lambda: read_keda_count(cluster, asleep.namespace, "asleep") == "0 False", ANSWER_S
    )

    def scale() -> int:
        """As KEDA's HPA does: the Deployment gets the count, which the operator leaves alone."""
        count = read_keda_count(cluster, asleep.namespace, "asleep").split()[0]
        if count.isdigit():
            cluster.kubectl("scale", "deployment/asleep-serve", "-n", asleep.namespace, f"--replicas={count}")
        return int(count) if count.isdigit() else 0

    with Load(asleep.target, poisson(RATE, 180, _prompt("asleep"), seed=4)) as load:
        wait_until("a request wakes it", lambda: scale() >= 1, ANSWER_S)
        asleep.wait_ready()
        most = wait_until("more is recommended", lambda: (n := scale()) > 1 and n, 120)
    print(f"{most} replicas; {load.ledger.summary()}")
    deployment = cluster.get("deployments", "asleep-serve", asleep.namespace)
    assert deployment is not None
    assert deployment["spec"]["replicas"] == most, "only KEDA sets the count"


@pytest.mark.usefixtures("scaler")
def test_scaler_says_what_is_wrong(cluster: Cluster, namespace: str) -> None:
    answer = wait_until("it answers", lambda: read_keda_count(cluster, namespace, "absent"), ANSWER_S)
    assert answer.startswith("NOT_FOUND"), answer
    assert f"{namespace}/absent" in answer


@pytest.mark.usefixtures("scaler")
def test_recommendations_are_those_of_the_leader(
    cluster: Cluster, operator: OperatorClient, solo: Service, namespace: str
) -> None:
    del namespace
    listed = json.loads(cluster.in_pod(stack.SYSTEM, operator.leader, PORT, "/v1/recommendations"))
    jsonschema.validate(listed, SCHEMA)
    assert solo.key in [f"{item['namespace']}/{item['name']}" for item in listed["items"]]
    names = [pod["metadata"]["name"] for pod in cluster.list("pods", stack.SYSTEM, SELECTOR)]
    [standby] = [name for name in names if name != operator.leader]
    with pytest.raises(httpx.HTTPStatusError) as refused:
        cluster.in_pod(stack.SYSTEM, standby, PORT, "/v1/recommendations")
    assert (refused.value.response.status_code, refused.value.response.json()["reason"]) == (503, "NotLeading")


@pytest.mark.usefixtures("scaler")
def test_scaler_follows_the_lease(cluster: Cluster, operator: OperatorClient, solo: Service) -> None:
    """A lost leader takes its connections along, and the next one answers."""
    before = operator.leader
    cluster.delete("pod", before, namespace=stack.SYSTEM)
    wait_until("another leads", lambda: operator.leader not in ("", before), ANSWER_S)
    namespace, name = solo.key.split("/")
    answer = wait_until("it answers", lambda: read_keda_count(cluster, namespace, name), ANSWER_S)
    assert answer.startswith(("FAILED_PRECONDITION", "UNAVAILABLE")), f"solo has no SLO: {answer}"
