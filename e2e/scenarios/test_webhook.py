"""The admission webhook answers at apply, from leader and standby alike. Down, it keeps nobody from working."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from e2e.lib import stack
from e2e.lib.kube import Cluster, KubectlError, Object
from e2e.lib.operator import OperatorClient
from e2e.lib.service import Service, make_manifest
from e2e.lib.wait import wait_until

NOWHERE = {"serve": {"pod": {"nodeSelector": {"example.com/nowhere": "yes"}}}}
OPERATOR = f"deployment/{stack.RELEASE}-operator"
SELECTOR = "app.kubernetes.io/component=operator"
LEFT = "secrets,services,validatingwebhookconfigurations"
ANSWER_S = 60.0  # the kubelet mounts the certificate, and kube-proxy learns the address


@pytest.fixture(scope="module")
def webhook(cluster: Cluster) -> Iterator[None]:
    """The chart with webhook and standby; afterwards without both, and nothing of the webhook is left."""
    stack.install(cluster, "--set", "webhook.enabled=true,operator.replicas=2")
    yield
    stack.install(cluster)
    left = cluster.kubectl("get", LEFT, "-n", stack.SYSTEM, "-o", "name").split()
    assert not [name for name in left if "webhook" in name], left


def apply_error(cluster: Cluster, manifest: Object, namespace: str) -> str:
    """What a dry run of an apply says: a refusal or a warning; "" where it is accepted without a word."""
    argv = ("apply", "--warnings-as-errors", "--dry-run=server", "-n", namespace, "-f", "-")
    try:
        cluster.kubectl(*argv, stdin=json.dumps(manifest))
    except KubectlError as error:
        return str(error)
    return ""


def claiming(name: str, model: str) -> Object:
    return make_manifest(name, NOWHERE, model={"name": model})


def falling_back(name: str, fallback: str) -> Object:
    manifest = make_manifest(name, NOWHERE, slo={"ttft": "5s"})
    manifest["spec"]["admission"] = {"whenFull": "Downgrade", "fallback": {"name": fallback}}
    return manifest


@pytest.mark.usefixtures("webhook")
def test_apply_of_claimed_name_is_refused(solo: Service, service: Callable[[str], Service], cluster: Cluster) -> None:
    late = service("late")
    since = solo.status()["nameClaim"].partition(" since ")[2].partition(".")[0]
    refusal = wait_until(
        "it is refused", lambda: apply_error(cluster, claiming("late", solo.name), late.namespace), ANSWER_S
    )
    with pytest.raises(KubectlError, match=f"service {solo.key} holds the name since {since}"):
        cluster.apply(claiming("late", solo.name), namespace=late.namespace)
    print(refusal.splitlines()[-1])
    assert late.get() is None
    reviews = [
        cluster.in_pod(stack.SYSTEM, pod["metadata"]["name"], 8081, "/metrics")
        for pod in cluster.list("pods", stack.SYSTEM, SELECTOR)
    ]
    assert any('plimsoll_operator_admission_reviews_total{result="refused"} 0.0' not in page for page in reviews)
    cluster.kubectl("label", "inferenceservice", solo.name, "-n", solo.namespace, "webhook=asked")
    cluster.kubectl("label", "inferenceservice", solo.name, "-n", solo.namespace, "webhook-")


@pytest.mark.usefixtures("webhook")
def test_circle_is_refused_and_a_missing_fallback_is_warned_of(
    service: Callable[[str], Service], cluster: Cluster
) -> None:
    namespace = service("first").namespace
    warning = wait_until(
        "it is warned of", lambda: apply_error(cluster, falling_back("first", "second"), namespace), ANSWER_S
    )
    print(warning.splitlines()[-1])
    assert f"{namespace}/second does not exist" in warning
    cluster.apply(falling_back("first", "second"), namespace=namespace)  # a warning refuses nothing
    circle = f"cycle: {namespace}/second -> {namespace}/first -> {namespace}/second"
    wait_until(
        "the circle is refused", lambda: circle in apply_error(cluster, falling_back("second", "first"), namespace)
    )
    cluster.delete("inferenceservices", "first", namespace=namespace)


@pytest.mark.usefixtures("webhook")
def test_apply_of_slo_beyond_the_gpus_is_warned_of(service: Callable[[str], Service], cluster: Cluster) -> None:
    fast = service("fast")
    tiers = {"serve": {"pod": {"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"}}}}
    manifest = make_manifest("fast", tiers, model={"uri": "hf://Qwen/Qwen3-8B"}, slo={"tpot": "1ms"})
    words = "spec.slo.tpot: tier serve cannot meet 1 ms"
    wait_until("it is warned of", lambda: words in apply_error(cluster, manifest, fast.namespace), ANSWER_S)
    cluster.apply(manifest, namespace=fast.namespace)
    condition = fast.wait_condition("SLOInfeasible", status="True")
    print(f"{condition['reason']}: {condition['message']}")
    assert words in condition["message"]
    cluster.delete("inferenceservices", "fast", namespace=fast.namespace)


@pytest.mark.usefixtures("webhook")
def test_standby_reviews_while_there_is_no_leader(
    solo: Service, service: Callable[[str], Service], cluster: Cluster
) -> None:
    late = service("late")
    leader = OperatorClient(cluster, stack.SYSTEM).leader
    cluster.kubectl("delete", "pod", leader, "-n", stack.SYSTEM, "--force", "--grace-period=0")
    refusal = wait_until(
        "it is refused", lambda: apply_error(cluster, claiming("late", solo.name), late.namespace), ANSWER_S
    )
    print(f"without {leader}: {refusal.splitlines()[-1]}")
    assert solo.key in refusal


@pytest.mark.usefixtures("webhook")
def test_apply_works_while_webhook_is_down(solo: Service, service: Callable[[str], Service], cluster: Cluster) -> None:
    late = service("late")
    cluster.kubectl("scale", OPERATOR, "-n", stack.SYSTEM, "--replicas=0")
    wait_until("no operator runs", lambda: not cluster.list("pods", stack.SYSTEM, SELECTOR), 120)
    cluster.apply(claiming("late", solo.name), namespace=late.namespace)
    cluster.kubectl("scale", OPERATOR, "-n", stack.SYSTEM, "--replicas=2")
    condition = late.wait_condition("ModelNameRejected", status="True")
    print(f"let through, and then: {condition['reason']}")
    assert condition["reason"] == "ModelNameTaken"
    cluster.delete("inferenceservices", "late", namespace=late.namespace)
