"""KEDA itself scales a Deployment by Plimsoll's recommendation, also when Plimsoll's operator restarts or is away.

KEDA's operator takes the first and the last engine; between, the HPA that it makes reads its metrics server.
"""

from __future__ import annotations

import base64
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from e2e.lib import external_metrics, followed, keda, simulated_fleet, stack
from e2e.lib.followed import HPA_MANAGER, MAX_REPLICAS, RATE, SCALED_S
from e2e.lib.kube import Cluster, Object, condition
from e2e.lib.load import Load, poisson
from e2e.lib.service import Service
from e2e.lib.task_pages import documented
from e2e.lib.wait import sleep, wait_until
from tests.certificates import Authority

OPERATOR_NAME = f"{stack.RELEASE}-operator"
OPERATOR = f"deployment/{OPERATOR_NAME}"
FALLBACK_REPLICAS = 2
COUNTS = {"idle": 0, "small": FALLBACK_REPLICAS - 1, "large": FALLBACK_REPLICAS + 1}  # recommended, by service
AWAY_S = 75.0  # five times as long as the period of an HPA: more failures than the fallback's threshold
SERVER_SECRET = "keda-server"
POLL_S = 600  # so that KEDA learns by the stream alone that a service is active


@pytest.fixture(scope="module")
def running(cluster: Cluster) -> Iterator[None]:
    """The chart with the scaler, and KEDA; afterwards without both."""
    stack.install(cluster, "--set", "operator.kedaScaler.enabled=true")
    with keda.installed(cluster):
        yield
    stack.install(cluster)


def scaled_object(service: str) -> Object:
    """The ScaledObject of the page, for a service of this scenario."""
    made = documented("keda.md", "ScaledObject")
    made["metadata"] = {"name": service}
    spec = made["spec"]
    spec |= {"scaleTargetRef": {"name": f"{service}-serve"}, "maxReplicaCount": MAX_REPLICAS}
    spec["triggers"][0]["metadata"]["service"] = service
    return made


def is_active(cluster: Cluster, service: Service, status: str) -> bool:
    """Whether KEDA follows the service, with this status of the condition Active."""
    scaled = cluster.get_object("scaledobjects.keda.sh", service.name, service.namespace)
    return [condition(scaled, kind).get("status") for kind in ("Ready", "Active")] == ["True", status]


@pytest.mark.usefixtures("running")
def test_keda_scales_from_zero_and_back(cluster: Cluster, service: Callable[[str], Service]) -> None:
    led = service("followed")
    followed.recommend(cluster, led, 0)
    cluster.apply(scaled_object(led.name), namespace=led.namespace)

    def recommended() -> list[float]:
        """What the HPA reads."""
        live = cluster.get_object("horizontalpodautoscalers.autoscaling", f"keda-hpa-{led.name}", led.namespace)
        [metric] = [one["external"]["metric"] for one in live["spec"]["metrics"]]
        return external_metrics.read(cluster, led.namespace, metric["name"], metric["selector"]["matchLabels"])

    wait_until("KEDA follows it at zero", lambda: is_active(cluster, led, "False") and not led.pods(), SCALED_S)
    assert recommended() == [0.0]

    started_s = time.monotonic()
    with Load(led.target, poisson(RATE, 300, simulated_fleet.prompts("followed", 300, 48), seed=4)) as load:
        wait_until("KEDA starts an engine", lambda: followed.replicas(cluster, led) >= 1, SCALED_S)
        activated_s = time.monotonic() - started_s
        count = wait_until(
            "its HPA has the recommended count",
            lambda: (n := followed.replicas(cluster, led)) > 1 and recommended() == [float(n)] and n,
            SCALED_S,
        )
        writers = followed.writers_of_replicas(cluster, led)
    records = load.ledger.records
    refused = Counter(record.reason for record in records if record.reason)
    first_s = min(record.sent_at for record in records if record.ok) - min(record.sent_at for record in records)
    print(
        f"KEDA scaled from zero {activated_s:.1f} s after the first request, its HPA to {count} replicas as {writers};"
        f" refused: {dict(refused)}, the first that succeeds is sent after {first_s:.1f} s; {load.ledger.summary()}"
    )
    assert HPA_MANAGER in writers
    assert not [one for one in writers if "plimsoll" in one], "only KEDA and its HPA set the count"

    wait_until("KEDA takes the last engine", lambda: followed.replicas(cluster, led) == 0, SCALED_S)
    wait_until("KEDA calls it inactive", lambda: is_active(cluster, led, "False"), SCALED_S)


@pytest.mark.usefixtures("running")
def test_keda_reports_what_the_scaler_says(cluster: Cluster, namespace: str, service: Callable[[str], Service]) -> None:
    """A trigger that names no service: KEDA's Event has the scaler's own words."""
    followed.recommend(cluster, service("other"), 0)
    absent = scaled_object("absent")
    absent["spec"]["scaleTargetRef"] = {"name": "other-serve"}
    cluster.apply(absent, namespace=namespace)

    def failure() -> str:
        events = [one for one in cluster.list("events", namespace) if one["involvedObject"]["name"] == "absent"]
        return next((one["message"] for one in events if f"{namespace}/absent" in one["message"]), "")

    message = wait_until("KEDA reports why", failure, SCALED_S)
    print(message)
    assert "correct service and namespace" in message


@pytest.mark.usefixtures("running")
def test_keda_listens_to_a_restarted_operator(cluster: Cluster, service: Callable[[str], Service]) -> None:
    led = service("restarted")
    followed.recommend(cluster, led, 0)
    scaled = scaled_object(led.name)
    cluster.apply(scaled, namespace=led.namespace)
    wait_until("KEDA follows it at zero", lambda: is_active(cluster, led, "False") and not led.pods(), SCALED_S)
    scaled["spec"]["pollingInterval"] = POLL_S
    cluster.apply(scaled, namespace=led.namespace)

    cluster.kubectl("rollout", "restart", OPERATOR, "-n", stack.SYSTEM)
    cluster.kubectl("rollout", "status", OPERATOR, "-n", stack.SYSTEM, "--timeout=180s", timeout_s=200)
    started_s = time.monotonic()
    with Load(led.target, poisson(RATE, 300, simulated_fleet.prompts("restarted", 300, 48), seed=5)):
        wait_until("KEDA starts an engine", lambda: followed.replicas(cluster, led) >= 1, SCALED_S)
    print(f"KEDA scaled from zero {time.monotonic() - started_s:.1f} s after the operator was ready and had requests")


@pytest.fixture(scope="module")
def led(cluster: Cluster, namespace: str, running: None) -> dict[str, Service]:
    """Services by name, of which KEDA has set the recommended counts."""
    found = {name: Service(cluster, namespace, name, stack.GATEWAY_URL) for name in COUNTS}
    for name, count in COUNTS.items():
        followed.recommend(cluster, found[name], count)
        scaled = scaled_object(name)
        scaled["spec"]["fallback"]["replicas"] = FALLBACK_REPLICAS
        cluster.apply(scaled, namespace=namespace)
    wait_until(
        "KEDA follows them",
        lambda: all(is_active(cluster, found[name], str(count > 0)) for name, count in COUNTS.items()),
        SCALED_S,
    )
    wait_until("all have the recommended counts", lambda: counts(cluster, found) == COUNTS, SCALED_S)
    return found


def counts(cluster: Cluster, services: dict[str, Service]) -> dict[str, int]:
    return {name: followed.replicas(cluster, one) for name, one in services.items()}


def test_keda_falls_back_without_a_recommendation(cluster: Cluster, led: dict[str, Service]) -> None:
    """The fallback raises a small count, also from zero, and keeps a larger one."""

    def set_mode(mode: str) -> None:
        for one in led.values():
            cluster.patch("inferenceservices", one.name, one.namespace, {"spec": {"scaling": {"mode": mode}}})

    def falls_back(one: Service) -> bool:
        live = cluster.get_object("scaledobjects.keda.sh", one.name, one.namespace)
        return condition(live, "Fallback").get("status") == "True"

    set_mode("Off")
    started_s = time.monotonic()
    for name, one in sorted(led.items(), key=lambda item: -COUNTS[item[0]]):
        wait_until(f"{name} falls back", partial(falls_back, one), SCALED_S)
        print(f"KEDA fell back from {COUNTS[name]} after at most {time.monotonic() - started_s:.0f} s")
    raised = {name: max(count, FALLBACK_REPLICAS) for name, count in COUNTS.items()}
    wait_until("all have at least the fallback's count", lambda: counts(cluster, led) == raised, SCALED_S)
    set_mode("Recommend")
    wait_until("KEDA follows the recommendation again", lambda: counts(cluster, led) == COUNTS, SCALED_S)


def test_keda_keeps_counts_while_the_operator_is_away(cluster: Cluster, led: dict[str, Service]) -> None:
    """KEDA has no fallback then: it applies to a scaler that answers."""
    scaled = {name: one for name, one in led.items() if COUNTS[name]}  # an HPA does nothing at zero

    def have_a_metric(status: str) -> bool:
        hpas = [
            cluster.get_object("horizontalpodautoscalers.autoscaling", f"keda-hpa-{name}", one.namespace)
            for name, one in scaled.items()
        ]
        return all(condition(hpa, "ScalingActive").get("status") == status for hpa in hpas)

    operators = cluster.get_object("deployments.apps", OPERATOR_NAME, stack.SYSTEM)["spec"]["replicas"]
    wait_until("the HPAs have their metric", lambda: have_a_metric("True"), SCALED_S)
    cluster.kubectl("scale", OPERATOR, "-n", stack.SYSTEM, "--replicas=0")
    try:
        wait_until("the HPAs have no metric", lambda: have_a_metric("False"), SCALED_S)
        sleep(AWAY_S)
        assert counts(cluster, led) == COUNTS
    finally:
        cluster.kubectl("scale", OPERATOR, "-n", stack.SYSTEM, f"--replicas={operators}")
    wait_until("the HPAs have their metric again", lambda: have_a_metric("True"), SCALED_S)
    assert counts(cluster, led) == COUNTS


@pytest.fixture
def encrypted(cluster: Cluster, running: None, service: Callable[[str], Service], tmp_path: Path) -> Iterator[Service]:
    """A service whose namespace has KEDA's certificate, without which the scaler accepts no client."""
    authority, made = Authority(tmp_path / "authority", "scaler"), service("encrypted")
    for name, namespace, host in (
        (SERVER_SECRET, stack.SYSTEM, f"{stack.RELEASE}-keda.{stack.SYSTEM}.svc"),
        ("keda-client", made.namespace, "keda"),
    ):
        files = {key: base64.b64encode(value).decode() for key, value in authority.issue(host).items()}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": files}
        cluster.apply(secret, namespace=namespace)
    values = ("enabled=true", f"tls.secretName={SERVER_SECRET}", "tls.requireClientCertificate=true")
    stack.install(cluster, *(word for value in values for word in ("--set", f"operator.kedaScaler.{value}")))
    yield made
    cluster.kubectl("delete", "secret", SERVER_SECRET, "-n", stack.SYSTEM)


def test_keda_follows_by_mutual_tls(cluster: Cluster, encrypted: Service) -> None:
    authentication = documented("keda.md", "TriggerAuthentication")
    authentication["metadata"].pop("namespace")
    plain, scaled = scaled_object(encrypted.name), scaled_object(encrypted.name)
    scaled["spec"]["triggers"][0]["authenticationRef"] = {"name": authentication["metadata"]["name"]}
    followed.recommend(cluster, encrypted, 1)
    cluster.apply(authentication, scaled, namespace=encrypted.namespace)
    wait_until("KEDA follows it", lambda: is_active(cluster, encrypted, "True"), SCALED_S)

    cluster.apply(plain, namespace=encrypted.namespace)

    def is_refused() -> bool:
        live = cluster.get_object("scaledobjects.keda.sh", encrypted.name, encrypted.namespace)
        return condition(live, "Ready").get("status") == "False"

    wait_until("KEDA gets no answer without TLS", is_refused, SCALED_S)
