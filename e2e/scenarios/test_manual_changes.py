"""A person scales a Deployment, and the only engine of a service is killed: status, Events and responses tell it."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from e2e.lib.kube import Cluster
from e2e.lib.node import signal_container
from e2e.lib.service import Service, make_manifest
from e2e.lib.wait import wait_until

TIMEOUT_S = 60.0


def _ask(service: Service) -> httpx.Response:
    body = {"model": service.name, "prompt": "a", "max_tokens": 1}
    return httpx.post(f"{service.url}/v1/completions", json=body, timeout=TIMEOUT_S)


@pytest.mark.extended
def test_count_set_by_hand_is_named_and_undone(service: Callable[[str], Service], cluster: Cluster) -> None:
    handy = service("handy")
    cluster.apply(make_manifest("handy", {"serve": {"minReplicas": 2, "maxReplicas": 3}}), namespace=handy.namespace)
    handy.wait_ready()
    cluster.kubectl("scale", "deployment/handy-serve", "-n", handy.namespace, "--replicas=1")
    message = wait_until(
        "an Event names who set the count",
        lambda: next((e["message"] for e in handy.wait_events("ScaledUp") if "kubectl" in e["message"]), None),
    )
    handy.wait_ready()
    print(message)
    assert message.startswith("serve 1 -> 2: kubectl set the replica count to 1; ")
    assert "spec.tiers.serve.minReplicas" in message
    assert handy.status()["tiers"]["serve"]["summary"].endswith("/2")
    cluster.delete("inferenceservices", "handy", namespace=handy.namespace)


@pytest.mark.extended
def test_only_engine_killed_names_time_of_next(service: Callable[[str], Service], cluster: Cluster) -> None:
    lone = service("lone")
    cluster.apply(make_manifest("lone", {"serve": {}}), namespace=lone.namespace)
    lone.wait_ready()
    wait_until("the engine answers", lambda: _ask(lone).status_code == 200)
    [pod] = lone.pods()
    signal_container(pod, "engine", "KILL")

    def rejected() -> httpx.Response | None:
        answer = _ask(lone)
        return answer if answer.status_code == 503 else None

    answer = wait_until("a request is rejected", rejected, every_s=0.1)
    print(answer.headers, answer.text)
    assert answer.headers.get("x-should-retry") == "false" or int(answer.headers["retry-after"]) > 1
    condition = lone.wait_condition("Ready", status="False")
    print(condition["message"])
    is_starting = condition["message"].startswith("0 of 1 ready: 1 starting")
    assert is_starting or pod["metadata"]["name"] in condition["message"]
    lone.wait_ready()
    cluster.delete("inferenceservices", "lone", namespace=lone.namespace)
