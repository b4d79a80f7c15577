"""Without a prefill engine `whenPrefillUnavailable` decides: decode engines compute the prompt, or it is rejected.

The same services show that engines get a request's class as its priority.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import httpx
import pytest

from e2e.lib import stack
from e2e.lib.kube import Cluster, Object
from e2e.lib.load import unique_text
from e2e.lib.metrics import GatewayClient
from e2e.lib.service import Service
from e2e.lib.simulated_fleet import fleet_manifest, replica_bounds
from e2e.lib.wait import wait_until

CLASS = "x-gateway-inference-objective"
WORDS = 300  # more than a KV block
PATIENCE_S = 20.0  # of a client; an answer takes a second
EFFECTIVE_S = 60.0


@dataclass(frozen=True)
class Policies:
    """Two services that differ in their policy alone."""

    serve: Service
    reject: Service

    @property
    def both(self) -> tuple[Service, Service]:
        return self.serve, self.reject


def _manifest(policy: str) -> Object:
    """One prefill and one decode replica, whose counts stay as set by hand, and vLLM's scheduling by priority."""
    made = fleet_manifest(policy.lower(), {role: replica_bounds(1, 1) for role in ("prefill", "decode")})
    made["spec"]["engine"]["args"].append("--scheduling-policy=priority")
    classes = [{"name": "default"}, {"name": "urgent", "priority": 7}]
    made["spec"] |= {"whenPrefillUnavailable": policy, "scaling": {"mode": "Off"}, "admission": {"classes": classes}}
    return made


@pytest.fixture(scope="module")
def policies(cluster: Cluster, namespace: str) -> Policies:
    cluster.apply(_manifest("Serve"), _manifest("Reject"), namespace=namespace)
    found = Policies(*(Service(cluster, namespace, name, stack.GATEWAY_URL) for name in ("serve", "reject")))
    for service in found.both:
        service.wait_ready()
    return found


def _ask(service: Service, words: int = WORDS, request_class: str = "default") -> httpx.Response:
    body = {"model": service.key, "prompt": unique_text(words, time.time_ns()), "max_tokens": 4}
    headers = {CLASS: request_class}
    return httpx.post(f"{service.url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S, trust_env=False)


def _rejection(service: Service) -> httpx.Response | None:
    answer = _ask(service)
    return None if answer.status_code == 200 else answer


def _scale_prefill(policies: Policies, replicas: int) -> None:
    for service in policies.both:
        name = f"deployment/{service.name}-prefill"
        service.cluster.kubectl("scale", name, "-n", service.namespace, f"--replicas={replicas}")


def test_priority_of_the_class_reaches_the_engine(policies: Policies, gateway: GatewayClient) -> None:
    """The body that the decode engine sends on to the prefill engine has the priority too."""
    before, name = gateway.prefill_counts(policies.serve.key), "plimsoll_engine_prioritized_requests_total"
    counted = policies.serve.metrics("decode").total(name)
    for request_class in ("default", "urgent"):
        answer = _ask(policies.serve, request_class=request_class)
        assert answer.status_code == 200, answer.text
    roads = gateway.prefill_counts(policies.serve.key) - before
    print(f"prefill {dict(roads)}")
    assert roads == {"remote": 2}
    assert policies.serve.metrics("decode").total(name) == counted + 2


@pytest.fixture(scope="module")
def without_prefill(policies: Policies, gateway: GatewayClient) -> Policies:
    """Both services, whose prefill tiers are scaled to zero by hand."""
    for service in policies.both:
        assert _ask(service).status_code == 200
    _scale_prefill(policies, 0)
    for service in policies.both:
        wait_until("only a decode engine is left", partial(_is_alone, gateway, service.key), EFFECTIVE_S)
    return policies


def _is_alone(gateway: GatewayClient, key: str) -> bool:
    return len(gateway.routable_pods(key)) == 1


def test_reject_answers_503_without_a_prefill_engine(without_prefill: Policies) -> None:
    refused = _ask(without_prefill.reject)
    print(refused.status_code, dict(refused.headers), refused.text)
    assert refused.status_code == 503
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("prefill_unavailable", "server_error")
    assert int(refused.headers["retry-after"]) > 0
    assert _ask(without_prefill.reject, words=20).status_code == 200  # of less than a KV block


def test_serve_answers_from_decode_alone(without_prefill: Policies, gateway: GatewayClient) -> None:
    key = without_prefill.serve.key
    before = gateway.prefill_counts(key)
    assert [_ask(without_prefill.serve).status_code for _ in range(4)] == [200] * 4
    assert gateway.prefill_counts(key) - before == {"local": 4}


def test_status_and_event_name_the_missing_prefill(without_prefill: Policies) -> None:
    reject, serve = without_prefill.reject, without_prefill.serve
    condition = reject.wait_condition("Ready", status="False", reason="PrefillUnavailable")
    (event, *_) = reject.wait_events("NotReady")
    print(f"{condition['message']}\n{event['message']}")
    assert "whenPrefillUnavailable is Reject" in event["message"]
    assert serve.condition("Ready")["status"] == "True"


def test_returned_prefill_tier_serves_again(without_prefill: Policies) -> None:
    _scale_prefill(without_prefill, 1)
    reject = without_prefill.reject
    wait_until("a long prompt is served again", lambda: _rejection(reject) is None, EFFECTIVE_S)
    reject.wait_condition("Ready", status="True")
