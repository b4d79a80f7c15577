"""An HPA of the cluster follows the recommendation by the Prometheus adapter, with the rules of the documentation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from e2e.lib import external_metrics, followed, prometheus_adapter, prometheus_server, simulated_fleet
from e2e.lib.followed import HPA_MANAGER, MAX_REPLICAS, RATE, SCALED_S
from e2e.lib.kube import Cluster, Object, condition
from e2e.lib.load import Load, poisson
from e2e.lib.service import Service
from e2e.lib.task_pages import documented
from e2e.lib.wait import wait_until

PAGE = "recommend-mode.md"


@pytest.fixture(scope="module")
def adapter(cluster: Cluster, namespace: str) -> Iterator[None]:
    """Prometheus, which scrapes operator and gateways, and the adapter."""
    prometheus_server.start(cluster, namespace, prometheus_server.plimsoll_pods(cluster))
    url = f"http://{prometheus_server.NAME}.{namespace}.svc:{prometheus_server.PORT}/"
    with prometheus_adapter.installed(cluster, documented(PAGE, "externalRules"), url):
        yield


def autoscaler(service: Service) -> Object:
    """The HPA of the page, for this service."""
    hpa = documented(PAGE, "HorizontalPodAutoscaler")
    hpa["metadata"] = {"name": service.name}
    spec = hpa["spec"]
    spec["scaleTargetRef"]["name"] = f"{service.name}-serve"
    spec |= {"minReplicas": 1, "maxReplicas": MAX_REPLICAS}
    spec["metrics"][0]["external"]["metric"]["selector"]["matchLabels"]["service"] = service.name
    return hpa


@pytest.mark.usefixtures("adapter")
def test_hpa_follows_the_recommendation(cluster: Cluster, service: Callable[[str], Service]) -> None:
    led = service("led")
    followed.recommend(cluster, led, 1)
    led.wait_ready()
    hpa = autoscaler(led)
    cluster.apply(hpa, namespace=led.namespace)
    metric = hpa["spec"]["metrics"][0]["external"]["metric"]

    def read(namespace: str) -> list[float]:
        return external_metrics.read(cluster, namespace, metric["name"], metric["selector"]["matchLabels"])

    def is_active() -> bool:
        live = cluster.get_object("horizontalpodautoscalers.autoscaling", led.name, led.namespace)
        return condition(live, "ScalingActive").get("status") == "True"

    wait_until("the HPA has its metric", is_active, SCALED_S)
    assert read(led.namespace) == [1.0]
    assert read("default") == [], "a service of another namespace"

    with Load(led.target, poisson(RATE, 240, simulated_fleet.prompts("led", 300, 48), seed=4)) as load:
        wait_until("the HPA adds engines", lambda: followed.replicas(cluster, led) > 1, SCALED_S)
        count = wait_until(
            "it has the recommended count",
            lambda: (n := followed.replicas(cluster, led)) > 1 and read(led.namespace) == [float(n)] and n,
            SCALED_S,
        )
        writers = followed.writers_of_replicas(cluster, led)
    print(f"the HPA scaled to {count} replicas as {writers}; {load.ledger.summary()}")
    assert writers == {HPA_MANAGER}
    wait_until("it takes them again", lambda: followed.replicas(cluster, led) == 1, SCALED_S)
