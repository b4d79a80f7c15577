"""An attacker with one API key, through real Envoy: the names, limits and models of others stay theirs."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from functools import partial

import pytest
import pytest_asyncio

from plimsoll.gateway.settings import ApiKeyMode
from tests.gateway.api_key_secrets import bearer, key_secret
from tests.gateway.conftest import make_directory
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.kube_objects import pod, service, with_adapters
from tests.gateway.malformed_requests import GOOD_BODY, request
from tests.gateway.stack import TIMEOUT_S, GatewayStack, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

KEY = f"authorization: {bearer('narrow')['authorization']}"
SLOW = f"authorization: {bearer('slow')['authorization']}"
LARGE = GOOD_BODY.replace(b'"chat"', b'"large"')
SECRETS = (
    key_secret("narrow", models="team/large", tenant="attacker"),
    key_secret("victim", tenant="victim"),
    key_secret("slow", requests_per_minute=2, tenant="slow"),
)
FORGED = (
    "x-plimsoll-tenant: victim",
    "X-PLIMSOLL-Tenant: victim",
    "x_plimsoll_tenant: victim",
    "x-plimsoll-class: victim\r\nX-Plimsoll-Class: victim",
    "x-plimsoll-priority: -2147483648",
    "x-plimsoll-cache-salt: victim",
    "x-gateway-inference-fairness-id: victim",
    "x-plimsoll-cluster: pick/team/chat",
    "x-plimsoll-cluster: model/chat\r\nX-Plimsoll-Cluster: pick/team/chat",
    "x-plimsoll-endpoint: 127.0.0.1:1",
    "x-plimsoll-request-id: forged-id",
    "x-plimsoll-prefill: 127.0.0.1:1",
    "x-envoy-auth-failure-mode-allowed: true",
    "x-envoy-original-path: /metrics",
    "x-envoy-upstream-rq-timeout-ms: 1",
    "x-forwarded-for: 10.0.0.1",
    "x-stainless-retry-count: 3\r\nidempotency-key: victim-reservation",
    "connection: close, x-plimsoll-request-id, x-plimsoll-endpoint, x-plimsoll-cluster",
    "connection: authorization",
    "authorization: Bearer plim-victim-wrong",
    "host: victim",
)
HIDDEN = (  # names of models that the key must not use
    b'{"model":"chat"',
    b'{"model":"sql"',  # an adapter of chat
    b'{"model":"large","model":"chat"',
    b'{"model":"chat","model":"large"',
    b'{"model":"team/chat"',
    b'{"model":"Chat"',
    b'{"model":"ch\\u0061t"',
    b'{"model":"chat\\u0000"',
    b'{"model":"chat\\ud800"',
    b'{"model":"chat\\r\\nx-plimsoll-cluster: picker"',
    '{"model":"\uff43hat"'.encode(),  # a wide letter
    '{"model":"\u0441hat"'.encode(),  # a Cyrillic letter
    b'{"model":" chat"',
    b'{"model":"chat "',
    b'{"model":["chat"]',
    b'{"mod\\u0065l":"chat"',
    b'{"model":"large","mod\\u0065l":"chat"',
    b'{"\\u006dodel":"chat","model":"large"',
)
ENGINE_PATHS = (
    "//v1/chat/completions",
    "/v1/chat/completions/.",
    "/v1/chat/completions;x",
    "/v1/chat/completions./",
    "/v1/%2563hat/completions",
    "/v1/chat/completions/../../metrics",
)
OPERATIONS = (
    "/metrics",
    "/signals",
    "/config_dump",
    "/readyz",
    "/check/v1/chat/completions",
    "/reserve/v1/chat/completions",
    "/v1/models/../../signals",
    "/v1/models/%2e%2e/%2e%2e/signals",
    "/v1/models/..%2f..%2fsignals",
    "/v1/models/..%252f..%252fsignals",
    "/v1/models/..%5c..%5csignals",
    "/v1/models/..;/..;/signals",
    "/v1/models/chat",
    "/v1/models/sql",
    "/v1/models/ch%61t",
    "http://127.0.0.1/signals",
)
EXTREMES = (
    {"n": 100_000},
    {"n": 2**63},
    {"n": -1},
    {"n": 1e300},
    {"n": "1e400"},
    {"best_of": 100_000},
    {"max_tokens": 2**63},
    {"max_tokens": -1},
    {"max_completion_tokens": 10**4000},
    {"user": "a\r\n{}\x00\u2028"},
)

Locked = tuple[GatewayStack, FakeEngine, FakeEngine]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def locked(tmp_path_factory: object) -> AsyncIterator[Locked]:
    """A gateway that requires keys, the engine of the model that the attacker may use, and another tenant's."""
    stack = GatewayStack(make_directory(tmp_path_factory), api_keys=ApiKeyMode.REQUIRED, trust_identity_headers=False)
    try:
        own, other = await stack.engine(), await stack.engine()
        stack.write_secrets(*SECRETS)
        pods = [pod(own.address, service="large"), pod(other.address)]
        await stack.start([with_adapters(service(), "sql"), service("large")], pods)
        await stack.wait_routable(own, service="team/large")
        await stack.wait_routable(other)
        yield stack, own, other
    finally:
        await stack.shut_down()
        print(stack.log.read_text()[-4000:])


async def exchange(stack: GatewayStack, raw: bytes) -> tuple[int, bytes]:
    """Returns the status of the first answer, 0 for none, and all its bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    answer = b""
    try:
        writer.write(raw)
        async with asyncio.timeout(TIMEOUT_S):
            answer = await reader.read(1 << 20)
    except ConnectionError:
        pass
    finally:
        writer.close()
    return (int(answer.split(b" ")[1]) if answer.startswith(b"HTTP/") else 0), answer


def has_received(engine: FakeEngine, count: int) -> bool:
    return len(engine.received) == count


@pytest.mark.parametrize("header", FORGED)
async def test_forged_header_changes_neither_engine_nor_tenant(locked: Locked, header: str) -> None:
    stack, own, other = locked
    own.received.clear()
    other.received.clear()
    status, answer = await exchange(stack, request(headers=(KEY, header), body=LARGE))
    assert status in (200, 400, 401), answer
    for seen in own.received:
        assert b"authorization" not in seen.headers
        leaked = {name: value for name, value in seen.headers.items() if b"victim" in value or b"forged" in value}
        assert not leaked.keys() - {b"idempotency-key", b"x-gateway-inference-fairness-id"}  # no engine reads these
        assert seen.headers[b"x-plimsoll-endpoint"] == own.address.encode()
        assert not seen.headers.keys() & {b"x-plimsoll-priority", b"x-plimsoll-prefill", b"x-plimsoll-cache-salt"}
    assert not other.received
    assert "victim" not in json.dumps(await stack.signals())


@pytest.mark.parametrize("start", HIDDEN)
async def test_model_of_others_is_reached_by_no_name(locked: Locked, start: bytes) -> None:
    stack, own, other = locked
    own.received.clear()
    other.received.clear()
    body = start + b',"messages":[{"role":"user","content":"hi"}]}'
    status, answer = await exchange(stack, request(headers=(KEY,), body=body))
    assert status in (400, 403), answer
    assert not own.received
    assert not other.received


@pytest.mark.parametrize("path", ENGINE_PATHS)
async def test_odd_path_reaches_no_engine(locked: Locked, path: str) -> None:
    stack, own, other = locked
    own.received.clear()
    status, answer = await exchange(stack, request(path, headers=(KEY,), body=LARGE))
    assert status in (400, 404), answer
    assert not own.received
    assert not other.received


async def test_packed_body_reaches_no_engine(locked: Locked) -> None:
    stack, _, other = locked
    other.received.clear()
    for header in ("content-encoding: gzip", "x: y"):
        packed = request(headers=(KEY, header), body=gzip.compress(GOOD_BODY))
        assert (await exchange(stack, packed))[0] in (400, 415)
    assert not other.received


@pytest.mark.parametrize("path", OPERATIONS)
async def test_client_port_has_no_page_of_operations(locked: Locked, path: str) -> None:
    stack, own, other = locked
    own.received.clear()
    for raw in (request(path, "GET", (KEY,), b""), request(path, "POST", (KEY,), LARGE)):
        status, answer = await exchange(stack, raw)
        assert status in (400, 403, 404, 405), answer
        assert b"plimsoll_gateway_" not in answer
        assert b'"services"' not in answer
    assert not own.received
    assert not other.received


async def test_body_of_get_is_no_request_to_the_picker(locked: Locked) -> None:
    stack, _, _ = locked
    inner = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner)
    for headers, body, length in (((KEY,), inner, True), ((KEY, "transfer-encoding: chunked"), chunked, False)):
        _, answer = await exchange(stack, request("/v1/models", "GET", headers, body, length=length))
        assert answer.count(b"HTTP/1.1 ") == 1
        for _ in range(3):
            status, answer = await exchange(stack, request("/v1/models", "GET", (KEY,), b""))
            assert (status, b'"id":"large"' in answer, b'"chat"' in answer) == (200, True, False)


@pytest.mark.parametrize("fields", EXTREMES, ids=lambda fields: str(fields)[:24])
async def test_extreme_field_is_rejected_or_harmless(locked: Locked, fields: dict[str, object]) -> None:
    stack, _, _ = locked
    body = json.dumps(json.loads(LARGE)).encode()[:-1] + b"," + json.dumps(fields).encode()[1:]
    status, answer = await exchange(stack, request(headers=(KEY,), body=body))
    assert status in (200, 400), answer
    assert (await exchange(stack, request(headers=(KEY,), body=LARGE)))[0] == 200


async def test_aborted_requests_count_against_the_key(locked: Locked) -> None:
    stack, _, other = locked
    other.received.clear()
    other.behaviour.release_event = asyncio.Event()
    try:
        for count in (1, 2):
            _, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
            writer.write(request(headers=(SLOW,)))
            await wait_until(partial(has_received, other, count), "the engine has the request")
            writer.transport.abort()
        assert (await exchange(stack, request(headers=(SLOW,))))[0] == 429
    finally:
        other.behaviour.release_event = None
