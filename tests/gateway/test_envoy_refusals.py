"""What the gateway refuses names the field, the value, the limit and what to do: through real Envoy."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from e2e.lib import sdks
from tests.gateway.kube_objects import LIMITS, Object, pod, service
from tests.gateway.malformed_requests import GOOD_BODY
from tests.gateway.picker_harness import service_with_slo
from tests.gateway.recording_relay import CLIENTS, ClientProcess
from tests.gateway.stack import TIMEOUT_S, GatewayStack

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

ORIGIN = "https://app.example"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
CHAT = "/v1/chat/completions"
ARGS = ["--max-num-seqs", "16"]


async def exchange(
    stack: GatewayStack,
    method: str,
    path: str,
    headers: dict[str, str] | None = None,
    data: bytes | io.BytesIO | None = None,
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, error object (empty without one) and headers."""
    async with stack.http.request(method, stack.url + path, headers=headers, data=data) as answer:
        raw = await answer.read()
        body = json.loads(raw) if raw else {}
        return answer.status, body.get("error", body), {key.lower(): value for key, value in answer.headers.items()}


async def raw(stack: GatewayStack, sent: bytes) -> bytes:
    """What comes back for these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    writer.write(sent)
    answer = await asyncio.wait_for(reader.read(65536), TIMEOUT_S)
    writer.close()
    return answer


async def one_engine(stack: GatewayStack, made: Object) -> None:
    """An engine that runs 16 sequences at once and accepts 128, as its pod and its limits say."""
    made["spec"]["engine"] = {"args": ARGS}
    if LIMITS in made:
        made[LIMITS]["costModel"]["max_sequences"] = 16
    engine = await stack.engine()
    there = pod(engine.address)
    there["spec"]["containers"][0]["env"] = [{"name": "PLIMSOLL_ARGS", "value": json.dumps(ARGS)}]
    await stack.set_objects([made], [there])
    await stack.wait_routable(engine)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def open_to_browsers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayStack]:
    gateway = GatewayStack(tmp_path_factory.mktemp("gw"), cors_origins=(ORIGIN,))
    try:
        yield await gateway.start([service()], [])
    finally:
        await gateway.shut_down()


@pytest.mark.parametrize("made", [service, service_with_slo])
@pytest.mark.parametrize(
    ("fields", "param", "value"),
    [
        ({"n": 129}, "n", "129"),
        ({"n": 100_000}, "n", "100000"),
        ({"prompt": ["x"] * 129}, "prompt", "129"),
        ({"prompt": ["x"] * 13, "n": 10}, "n", "130"),
        ({"n": 129.0}, "n", "129"),
    ],
)
async def test_n_above_every_engine_is_a_final_400(
    stack: GatewayStack, made: Any, fields: dict[str, Any], param: str, value: str
) -> None:
    await one_engine(stack, made())
    status, body, headers = await stack.ask_fully(**fields)
    error = body["error"]
    assert (status, error["code"], error["param"]) == (400, "request_too_large", param)
    assert headers["x-should-retry"] == "false"
    assert "retry-after" not in headers
    assert value in error["message"]
    assert "at most 128 " in error["message"]


@pytest.mark.parametrize("made", [service, service_with_slo])
@pytest.mark.parametrize("fields", [{"n": 128}, {"prompt": ["x"] * 17}])
async def test_n_within_an_engines_queue_is_served(stack: GatewayStack, made: Any, fields: dict[str, Any]) -> None:
    await one_engine(stack, made())
    status, body, _ = await stack.ask_fully(**fields)
    assert status == 200, body


@pytest.mark.parametrize("name", ["tiny", "team/chat", "team%2Fchat"])
async def test_model_by_name_is_described(stack: GatewayStack, name: str) -> None:
    await stack.set_objects([service(model="tiny")], [])
    status, body, _ = await exchange(stack, "GET", f"/v1/models/{name}?x=1")
    name = name.replace("%2F", "/")
    assert (status, body) == (200, {"id": name, "object": "model", "created": 1767323045, "owned_by": "plimsoll"})


async def test_model_by_unknown_name_is_a_404(stack: GatewayStack) -> None:
    status, error, headers = await exchange(stack, "GET", "/v1/models/team/none")
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "'team/none'" in error["message"]
    assert headers["x-should-retry"] == "false"


async def test_anthropic_client_gets_its_error_of_models(stack: GatewayStack) -> None:
    status, error, _ = await exchange(stack, "GET", "/v1/models/none", {"anthropic-version": "2023-06-01"})
    assert (status, error["type"]) == (404, "not_found_error")
    assert error.keys() == {"type", "message"}


@pytest.mark.parametrize("coding", ["gzip", "br", "identity, gzip"])
async def test_compressed_body_is_a_415_that_names_it(stack: GatewayStack, coding: str) -> None:
    sent = {"content-encoding": coding, "content-type": "application/json"}
    status, error, headers = await exchange(stack, "POST", CHAT, sent, gzip.compress(GOOD_BODY))
    assert (status, error["code"]) == (415, "compressed_body")
    assert f"Content-Encoding: {coding}" in error["message"]
    assert "without compression" in error["message"]
    assert (headers["accept-encoding"], headers["x-should-retry"]) == ("identity", "false")


async def test_identity_content_encoding_passes(stack: GatewayStack) -> None:
    sent = {"content-encoding": "Identity", "content-type": "application/json"}
    status, error, _ = await exchange(stack, "POST", CHAT, sent, GOOD_BODY)
    assert (status, error["code"]) == (404, "model_not_found")


async def test_body_above_the_limit_names_the_limit(stack: GatewayStack) -> None:
    status, error, _ = await exchange(stack, "POST", CHAT, None, io.BytesIO(b" " * ((8 << 20) + 1)))
    assert (status, error["code"]) == (413, "body_too_large")
    assert "8388608 bytes" in error["message"]
    assert "gateway.maxBodyBytes" in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", "/v1/completions", "POST"),
        ("OPTIONS", CHAT, "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/chat", "GET, HEAD"),
        ("POST", "/healthz", "GET, HEAD"),
    ],
)
async def test_other_method_is_a_405_with_allow(stack: GatewayStack, method: str, path: str, allow: str) -> None:
    status, error, headers = await exchange(stack, method, path)
    assert (status, error["code"], headers["allow"]) == (405, "method_not_allowed", allow)
    assert method in error["message"]
    assert f"Use {allow}." in error["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/chat", "/v1/models/none"])
async def test_head_of_models_is_get_without_a_body(stack: GatewayStack, path: str) -> None:
    await one_engine(stack, service())
    got, body, headers = await exchange(stack, "GET", path)
    assert body
    for _ in range(2):  # the connection to the picker stays usable
        head_response = await exchange(stack, "HEAD", path)
        assert head_response[:2] == (got, {})
        assert head_response[2]["content-length"] == headers["content-length"]
        assert head_response[2]["content-type"] == headers["content-type"]


@pytest.mark.parametrize("sent", [b"x: " + b"y" * 70_000 + b"\r\n", b"x: y\r\n" * 120], ids=["long", "many"])
async def test_431_names_the_limit(stack: GatewayStack, sent: bytes) -> None:
    answer = await raw(stack, b"GET /v1/models HTTP/1.1\r\nhost: a\r\n" + sent + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"100 headers of 60 KiB together" in answer


@pytest.mark.parametrize("body", [b"", b" \n"])
async def test_empty_body_says_what_to_send(stack: GatewayStack, body: bytes) -> None:
    status, error, _ = await exchange(stack, "POST", CHAT, {"content-type": "application/json"}, body)
    assert (status, error["code"]) == (400, "invalid_json")
    assert error["message"] == "The request has no body. Send a JSON object that has the field model and the input."


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/embeddings"])
async def test_missing_content_type_says_what_to_send(stack: GatewayStack, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: {len(GOOD_BODY)}\r\n\r\n"
    answer = await raw(stack, head.encode() + GOOD_BODY)
    assert answer.startswith(b"HTTP/1.1 415 ")
    assert b"x-plimsoll-reason: content_type_required" in answer
    assert b"Send Content-Type: application/json" in answer


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/v1/models/chat", "/rerank", "/tokenize"])
async def test_preflight_without_origins_says_how_to_allow(stack: GatewayStack, path: str) -> None:
    status, error, headers = await exchange(stack, "OPTIONS", path, {"origin": ORIGIN, **PREFLIGHT})
    assert (status, error["code"]) == (403, "origin_not_allowed")
    assert ORIGIN in error["message"]
    assert "gateway.corsAllowedOrigins" in error["message"]
    assert "access-control-allow-origin" not in headers


async def test_preflight_of_an_allowed_origin_is_answered(open_to_browsers: GatewayStack) -> None:
    status, _, headers = await exchange(open_to_browsers, "OPTIONS", CHAT, {"origin": ORIGIN, **PREFLIGHT})
    assert (status, headers.get("access-control-allow-origin")) == (200, ORIGIN), headers
    assert {"authorization", "*"} <= set(headers["access-control-allow-headers"].replace(" ", "").split(","))
    assert "POST" in headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in headers


async def test_refusal_to_an_allowed_origin_is_readable(open_to_browsers: GatewayStack) -> None:
    status, error, headers = await exchange(open_to_browsers, "POST", CHAT, {"origin": ORIGIN}, GOOD_BODY)
    assert (status, error["code"]) == (503, "model_starting")
    assert headers["access-control-allow-origin"] == ORIGIN
    assert {"retry-after", "x-plimsoll-reason"} <= set(headers["access-control-expose-headers"].split(","))


async def test_preflight_of_another_origin_is_refused(open_to_browsers: GatewayStack) -> None:
    sent = {"origin": "https://app.example.evil", **PREFLIGHT}
    status, error, headers = await exchange(open_to_browsers, "OPTIONS", CHAT, sent)
    assert (status, error["code"]) == (403, "origin_not_allowed")
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("origin", [ORIGIN, "https://app.example.evil"])
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (CHAT, (405, "method_not_allowed")),
        (f"/check{CHAT}", (404, "unknown_path")),
        ("/reserve/x", (404, "unknown_path")),
    ],
)
async def test_options_without_a_method_is_no_preflight(
    open_to_browsers: GatewayStack, path: str, expected: tuple[int, str], origin: str
) -> None:
    """The CORS filter passes such a request on, so no route of it may reach the picker."""
    sent = {"origin": origin, "access-control-request-method": ""}
    status, error, _ = await exchange(open_to_browsers, "OPTIONS", path, sent, GOOD_BODY)
    assert (status, error["code"]) == expected


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_health_of_a_gateway_is_200(stack: GatewayStack, method: str) -> None:
    assert (await exchange(stack, method, "/healthz?x=1"))[:2] == (200, {})


async def test_health_of_a_draining_gateway_is_503(stack: GatewayStack) -> None:
    await stack.admin.fail_health()
    try:
        status, error, headers = await exchange(stack, "GET", "/healthz")
    finally:
        await stack.admin.pass_health()
    assert (status, error["code"], headers["retry-after"]) == (503, "draining", "1")
    assert "shutting down" in error["message"]


async def test_two_host_headers_are_refused(stack: GatewayStack) -> None:
    answer = await raw(stack, b"GET /v1/models HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    error = json.loads(body)["error"]
    assert error["code"] == "bad_request"
    assert "Host" in error["message"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(shared: GatewayStack) -> AsyncIterator[ClientProcess]:
    """Answers a request with the classes of the exception that each SDK raises, by SDK."""
    for package in ("openai", "langchain_openai", "litellm"):
        sdks.require_package(package)
    process = await ClientProcess.start(sys.executable, str(CLIENTS / "too_large.py"), shared.url)
    try:
        await process.ready()
        yield process
    finally:
        await process.stop()


@pytest.mark.timeout(300)
async def test_prompt_too_long_is_a_context_error_in_sdks(stack: GatewayStack, client: ClientProcess) -> None:
    await one_engine(stack, service_with_slo())
    found = await client.tell({"model": "chat", "messages": [{"role": "user", "content": "x" * 4_000_000}]})
    assert "BadRequestError" in found["with_openai"]
    assert "ContextOverflowError" in found["with_langchain"]
    assert "ContextWindowExceededError" in found["with_litellm"]


@pytest.mark.timeout(300)
async def test_n_too_large_is_no_context_error_in_sdks(stack: GatewayStack, client: ClientProcess) -> None:
    """A shorter prompt or a model of longer context would not help."""
    await one_engine(stack, service())
    found = await client.tell({"model": "chat", "messages": [{"role": "user", "content": "x"}], "n": 129})
    assert all("BadRequestError" in kinds for kinds in found.values()), found
    assert "ContextOverflowError" not in found["with_langchain"]
    assert "ContextWindowExceededError" not in found["with_litellm"]
