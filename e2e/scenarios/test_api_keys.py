"""API keys at two gateways: made and revoked by the command line, within two seconds, and never seen in a log.

Keys are optional here, because the prober has none: a request with a wrong key is refused all the same.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from e2e.lib import sdks, stack
from e2e.lib.kube import Cluster
from e2e.lib.metrics import GatewayClient
from e2e.lib.service import Service
from e2e.lib.wait import wait_until
from plimsoll.api import labels

GATEWAYS = 2
CONNECTIONS = 16  # new ones: each gateway gets some
EFFECTIVE_S = 15.0  # after the command has ended; on a quiet machine 2 s
EXPIRES_S = 30.0
PER_MINUTE = 4


@pytest.fixture(scope="module", autouse=True)
def optional_keys(cluster: Cluster) -> Iterator[None]:
    """Two gateways that know keys; afterwards as before, without the keys of these tests."""
    stack.install(cluster, "--set", f"gateway.authentication.apiKeys=Optional,gateway.replicas={GATEWAYS}")
    stack.wait_for_gateways(cluster, GATEWAYS)
    yield
    cluster.kubectl("delete", "secrets", "-n", stack.SYSTEM, "-l", labels.API_KEY)
    stack.install(cluster)


def _command(cluster: Cluster, *argv: str) -> str:
    """What `plimsoll key` prints."""
    program = str(Path(sys.executable).with_name("plimsoll"))
    return cluster.run(program, "key", *argv, "-n", stack.SYSTEM).strip()


def _statuses(key: str) -> set[int]:
    """What the gateways say to this key, over new connections."""
    headers = {"authorization": f"Bearer {key}"}
    url = f"{stack.GATEWAY_URL}/v1/models"
    return {httpx.get(url, headers=headers, timeout=10, trust_env=False).status_code for _ in range(CONNECTIONS)}


def _wait_statuses(key: str, status: int, timeout_s: float = EFFECTIVE_S) -> None:
    start = time.monotonic()
    wait_until(f"every gateway says {status}", lambda: _statuses(key) == {status}, timeout_s, 0.05)
    print(f"every gateway said {status} after {time.monotonic() - start:.2f} s")


def _ask(service: Service, **headers: str) -> httpx.Response:
    """A short completion over a connection of its own."""
    body = {"model": service.name, "messages": [{"role": "user", "content": f"{time.time_ns()}"}], "max_tokens": 1}
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{service.url}/v1/chat/completions", json=body, headers=sent, timeout=60, trust_env=False)


def _code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_key_is_valid_until_revoked(solo: Service, cluster: Cluster) -> None:
    key = _command(cluster, "create", "e2e-app", "--tenant", "e2e")
    _wait_statuses(key, 200)
    assert _ask(solo, authorization=f"Bearer {key}").status_code == 200
    assert _ask(solo, x_api_key=key).status_code == 200
    assert _ask(solo).status_code == 200, "keys are optional"
    assert _code(_ask(solo, authorization=f"Bearer {key}x")) == (401, "invalid_api_key")
    listed = _command(cluster, "list")
    assert "e2e-app" in listed
    _command(cluster, "revoke", "e2e-app")
    _wait_statuses(key, 401)
    refused = _ask(solo, authorization=f"Bearer {key}")
    assert _code(refused) == (401, "invalid_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"
    observed = listed + "".join(
        cluster.logs(stack.SYSTEM, pod["metadata"]["name"], container, tail=-1)
        for pod in stack.gateway_pods(cluster)
        for container in ("picker", "envoy")
    )
    assert key not in observed
    assert key.rpartition("-")[2] not in observed


def test_expired_key_is_refused(solo: Service, cluster: Cluster) -> None:
    key = _command(cluster, "create", "e2e-short", "--expires", f"{EXPIRES_S:.0f}s")
    _wait_statuses(key, 200)
    _wait_statuses(key, 401, EXPIRES_S + EFFECTIVE_S)
    assert _code(_ask(solo, authorization=f"Bearer {key}")) == (401, "expired_api_key")
    assert "Expired" in _command(cluster, "list")


def test_key_allows_its_models_only(solo: Service, pd: Service, cluster: Cluster) -> None:
    sdks.require_package("openai")
    from openai import OpenAI, PermissionDeniedError

    key = _command(cluster, "create", "e2e-narrow", "--models", solo.key)
    _wait_statuses(key, 200)
    messages = [{"role": "user", "content": "Hello"}]
    with (
        httpx.Client(trust_env=False, timeout=60) as http,
        OpenAI(base_url=f"{solo.url}/v1", api_key=key, max_retries=0, http_client=http) as client,
    ):
        assert [model.id for model in client.models.list()] == [solo.name]
        assert client.chat.completions.create(model=solo.name, messages=messages, max_tokens=2).choices  # type: ignore[arg-type]
        with pytest.raises(PermissionDeniedError) as caught:
            client.chat.completions.create(model=pd.name, messages=messages, max_tokens=2)  # type: ignore[arg-type]
    assert caught.value.code == "model_not_allowed"


def test_gateways_share_the_limit_of_a_key(solo: Service, cluster: Cluster, gateway: GatewayClient) -> None:
    """One gateway counts the requests of the key: the limit is the key's, wherever they come in."""
    wait_until("each gateway can ask the other", gateway.has_all_peers, 60)
    key = _command(cluster, "create", "e2e-slow", "--requests-per-minute", str(PER_MINUTE))
    _wait_statuses(key, 200)
    start, fallbacks = time.monotonic(), gateway.fallbacks()
    replies = [_ask(solo, authorization=f"Bearer {key}") for _ in range(CONNECTIONS)]
    refilled, fallbacks = (time.monotonic() - start) * PER_MINUTE / 60, gateway.fallbacks() - fallbacks
    counts = Counter(reply.status_code for reply in replies)
    print(f"{dict(counts)}, up to {refilled:.1f} refilled, {fallbacks} counted without the owner of the key")
    assert PER_MINUTE <= counts[200] <= PER_MINUTE + refilled + fallbacks
    assert counts.keys() == {200, 429}
    refused = next(reply for reply in replies if reply.status_code == 429)
    assert _code(refused) == (429, "rate_limit_exceeded")
    assert refused.headers["x-ratelimit-limit-requests"] == str(PER_MINUTE)
    assert int(refused.headers["retry-after"]) >= 1
