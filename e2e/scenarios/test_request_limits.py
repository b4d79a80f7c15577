"""Single requests that ask for too much or take too long: refused, bounded, or ended at the engine too."""

from __future__ import annotations

import time

import httpx
import pytest

from e2e.lib import stack
from e2e.lib.kube import Cluster
from e2e.lib.metrics import GatewayClient
from e2e.lib.service import Service
from e2e.lib.simulated_fleet import fleet_manifest, replica_bounds
from e2e.lib.wait import wait_until

NAME = "limited"
MAX_OUTPUT_TOKENS = 600  # some 24 s at 40 ms a token
SHORT = 5  # output tokens
DEADLINE_S = 3.0
EFFECTIVE_S = 30.0


@pytest.fixture(scope="module")
def limited(cluster: Cluster, namespace: str) -> Service:
    """One slow light engine without an SLO, whose requests have limits."""
    made = fleet_manifest(NAME, {"serve": replica_bounds(1, 1)})
    del made["spec"]["slo"]
    made["spec"]["requestLimits"] = {"maxOutputTokens": MAX_OUTPUT_TOKENS, "maxDuration": "2m"}
    cluster.apply(made, namespace=namespace)
    service = Service(cluster, namespace, NAME, stack.GATEWAY_URL)
    service.wait_ready()
    return service


def _ask(service: Service, timeout: str | None = None, **fields: object) -> httpx.Response:
    body = {"model": service.key, "messages": [{"role": "user", "content": f"{time.time_ns()}"}], **fields}
    headers = {} if timeout is None else {"x-request-timeout": timeout}
    return httpx.post(f"{service.url}/v1/chat/completions", json=body, headers=headers, timeout=120, trust_env=False)


def _running(service: Service) -> float:
    (pod,) = service.ready_pods()
    return service.engine_metrics(pod).total("vllm:num_requests_running")


def _error(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_output_limit_is_refused_above_and_set_where_absent(limited: Service) -> None:
    refused = _ask(limited, max_tokens=MAX_OUTPUT_TOKENS + 1)
    assert _error(refused) == (400, "request_too_large")
    assert str(MAX_OUTPUT_TOKENS) in refused.json()["error"]["message"]
    answer = _ask(limited)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] <= MAX_OUTPUT_TOKENS
    assert _ask(limited, max_tokens=SHORT).json()["usage"]["completion_tokens"] == SHORT


def test_request_past_its_deadline_ends_at_the_engine(limited: Service, gateway: GatewayClient) -> None:
    before = gateway.metrics()
    ended = _ask(limited, f"{DEADLINE_S:g}", max_tokens=MAX_OUTPUT_TOKENS)
    assert _error(ended) == (504, "deadline_exceeded")
    assert ended.headers["x-should-retry"] == "false"
    wait_until("the engine has stopped", lambda: _running(limited) == 0, EFFECTIVE_S)
    wait_until("its capacity is free", lambda: not sum(gateway.in_flight(limited.key).values()), EFFECTIVE_S)

    def ended_requests() -> float:
        name = "plimsoll_gateway_requests_completed_total"
        return (gateway.metrics() - before).total(name, service=limited.key, outcome="deadline_exceeded")

    wait_until("the metrics count it", lambda: ended_requests() == 1, EFFECTIVE_S)


def test_stream_past_its_deadline_is_never_complete(limited: Service) -> None:
    body = {"model": limited.key, "messages": [{"role": "user", "content": "count"}], "stream": True}
    received, headers = b"", {"x-request-timeout": f"{DEADLINE_S:g}"}
    with httpx.stream(
        "POST", f"{limited.url}/v1/chat/completions", json=body, headers=headers, timeout=120, trust_env=False
    ) as answer:
        assert answer.status_code == 200
        with pytest.raises(httpx.RemoteProtocolError):  # noqa: PT012 - the chunks up to then count
            for chunk in answer.iter_raw():
                received += chunk
    assert received.startswith(b"data:")
    assert b"[DONE]" not in received
    wait_until("the engine has stopped", lambda: _running(limited) == 0, EFFECTIVE_S)


def test_invalid_timeout_is_refused(limited: Service) -> None:
    assert _error(_ask(limited, "soon", max_tokens=SHORT)) == (400, "invalid_timeout")
