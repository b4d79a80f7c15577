"""API keys through real Envoy: who may enter, what engines never see, and what happens while nobody checks keys."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from e2e.lib import sdks
from plimsoll.gateway.api_routes import EVENT_STREAM
from plimsoll.gateway.settings import ApiKeyMode, TrustedHeaders
from tests.gateway.api_key_secrets import bearer, key_of, key_secret
from tests.gateway.conftest import make_directory
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.kube_objects import gateway_pod, pod, service
from tests.gateway.picker_harness import service_with_slo
from tests.gateway.stack import TIMEOUT_S, GatewayStack, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

SDK = Path(__file__).with_name("clients") / "with_keys.py"
CLASS, TENANT = (name.decode() for name in TrustedHeaders())
SECRETS = (
    key_secret("ci", tenant="team-a"),
    key_secret("narrow", models="team/large"),
    key_secret("slow", requests_per_minute=2),
    key_secret("old", expires="2026-01-31T00:00:00Z"),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def locked(tmp_path_factory: object) -> AsyncIterator[tuple[GatewayStack, FakeEngine]]:
    """A gateway that requires keys, and its one engine."""
    stack = GatewayStack(make_directory(tmp_path_factory), api_keys=ApiKeyMode.REQUIRED, trust_identity_headers=False)
    try:
        engine = await stack.engine()
        stack.write_secrets(*SECRETS)
        await stack.start([service(), service("large")], [pod(engine.address)])
        await stack.wait_routable(engine)
        yield stack, engine
    finally:
        await stack.shut_down()
        print(stack.log.read_text()[-4000:])


async def get(stack: GatewayStack, path: str, headers: Mapping[str, str] = {}) -> tuple[int, Any, Mapping[str, str]]:
    async with stack.http.get(f"{stack.url}{path}", headers=headers) as answer:
        return answer.status, await answer.json(content_type=None), answer.headers


async def test_requests_without_valid_key_get_401(locked: tuple[GatewayStack, FakeEngine]) -> None:
    stack, engine = locked
    seen = len(engine.received)
    for headers, code in (
        ({}, "missing_api_key"),
        ({"authorization": "Bearer none"}, "invalid_api_key"),
        (bearer("unknown"), "invalid_api_key"),
        (bearer("old"), "expired_api_key"),
    ):
        for status, body, reply_headers in (
            await stack.ask_fully(sent=headers),
            await get(stack, "/v1/models", headers),
        ):
            assert (status, body["error"]["code"]) == (401, code)
            assert body["error"]["type"] == "invalid_request_error"
            assert reply_headers["www-authenticate"] == "Bearer"
            assert reply_headers["x-should-retry"] == "false"
    assert len(engine.received) == seen
    assert (await get(stack, "/healthz"))[0] == 200


@pytest.mark.parametrize("header", ["authorization", "x-api-key", "api-key"])
async def test_key_in_any_header_enters_and_reaches_no_engine(
    locked: tuple[GatewayStack, FakeEngine], header: str
) -> None:
    stack, engine = locked
    value = bearer("ci")["authorization"] if header == "authorization" else key_of("ci")
    status, *_ = await stack.ask_fully(
        sent={"cookie": "session=1", "proxy-authorization": "Basic abc", "api-key": "other", header: value}
        if header != "x-api-key"
        else {"cookie": "session=1", header: value}
    )
    assert status == 200
    head = engine.received[-1].headers
    assert not head.keys() & {b"authorization", b"x-api-key", b"api-key", b"cookie", b"proxy-authorization"}
    assert not any(key_of("ci").encode() in value for value in head.values())


async def test_model_that_key_does_not_allow_gets_403(locked: tuple[GatewayStack, FakeEngine]) -> None:
    stack, _ = locked
    status, body, reply_headers = await stack.ask_fully(sent=bearer("narrow"))
    assert (status, body["error"]["code"], body["error"]["param"]) == (403, "model_not_allowed", "model")
    assert reply_headers["x-plimsoll-reason"] == "model_not_allowed"
    _, body, _ = await get(stack, "/v1/models", bearer("narrow"))
    assert [card["id"] for card in body["data"]] == ["large"]
    assert (await get(stack, "/v1/models/chat", bearer("narrow")))[0] == 403
    _, body, _ = await get(stack, "/v1/models", bearer("ci"))
    assert [card["id"] for card in body["data"]] == ["chat", "large"]


async def test_limit_of_key_is_reported_and_enforced(locked: tuple[GatewayStack, FakeEngine]) -> None:
    stack, _ = locked
    stack.write_gateways(gateway_pod("gateway-0"), gateway_pod("gateway-1", ready=False))
    replies = [await stack.ask_fully(sent=bearer("slow")) for _ in range(3)]
    assert [status for status, *_ in replies] == [200, 200, 429]
    assert [reply_headers["x-ratelimit-remaining-requests"] for *_, reply_headers in replies] == ["1", "0", "0"]
    assert replies[2][1]["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(replies[2][2]["retry-after"]) <= 30
    found = (await stack.signals())["services"]["team/chat"]["requests"]
    assert found["rejected"]["rate_limit_exceeded"] == 1


async def test_large_body_without_key_is_rejected_before_it_is_read(locked: tuple[GatewayStack, FakeEngine]) -> None:
    stack, _ = locked
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += "content-length: 8000000\r\n\r\n"
    writer.write(head.encode())
    async with asyncio.timeout(TIMEOUT_S):
        assert (await reader.readline()).split(b" ")[1] == b"401"
    writer.close()


async def test_keys_are_made_and_revoked_without_restart(locked: tuple[GatewayStack, FakeEngine]) -> None:
    stack, _ = locked

    async def status() -> int:
        return int((await stack.ask_fully(sent=bearer("new")))[0])

    assert await status() == 401
    broken = key_secret("broken")
    del broken["data"]["hash"]
    stack.write_secrets(*SECRETS, broken, key_secret("new"))

    async def is_accepted() -> bool:
        return await status() == 200

    async def is_rejected() -> bool:
        return await status() == 401

    await wait_until(is_accepted, "the key is accepted")
    async with stack.http.get(f"{stack.picker_url}/metrics") as answer:
        page = await answer.text()
    assert 'plimsoll_gateway_api_keys{state="invalid"} 1.0' in page
    assert 'plimsoll_gateway_api_key_requests_total{key="new"}' in page
    stack.write_secrets(*SECRETS)
    await wait_until(is_rejected, "the key is revoked")


async def test_revoked_key_ends_its_stream_and_queue(locked: tuple[GatewayStack, FakeEngine]) -> None:
    stack, engine = locked
    known = [service(), service("large")]
    stack.write_secrets(*SECRETS, key_secret("leaked"))
    await stack.set_objects([*known, service_with_slo("asleep", ready_work=10.0)], [pod(engine.address)])

    async def is_accepted() -> bool:
        return (await get(stack, "/v1/models", bearer("leaked")))[0] == 200

    await wait_until(is_accepted, "the key is accepted")
    queued = asyncio.create_task(stack.ask_fully("asleep", sent=bearer("leaked")))
    sent = {**bearer("leaked"), "accept": EVENT_STREAM}
    async with asyncio.timeout(TIMEOUT_S), stack.http.get(f"{stack.url}/v1/models/asleep", headers=sent) as stream:
        assert (await stream.content.readline()) == b"event: asleep\n"
        assert not queued.done()
        stack.write_secrets(*SECRETS)
        end = await stream.text()
        status, body, headers = await queued
    assert end.split("event: ")[-1].startswith("error\n")
    assert json.loads(end.split("data: ")[-1])["error"]["code"] == "invalid_api_key"
    assert (status, body["error"]["code"], headers["x-should-retry"]) == (401, "invalid_api_key", "false")
    await stack.set_objects(known, [pod(engine.address)])


async def test_identity_headers_and_keys_are_logged_nowhere(locked: tuple[GatewayStack, FakeEngine]) -> None:
    stack, _ = locked
    sent = {**bearer("ci"), "cookie": "session=secret-cookie", TENANT: "someone-else"}
    assert (await stack.ask_fully(sent=sent))[0] == 200
    assert (await stack.ask_fully(sent={"x-api-key": key_of("unknown")}))[0] == 401
    log = stack.log.read_text()
    async with stack.http.get(f"{stack.picker_url}/metrics") as answer:
        log += await answer.text() + json.dumps(await stack.signals())
    for secret in (key_of("ci"), key_of("unknown"), "secret-cookie", key_of("ci").rpartition("-")[2]):
        assert secret not in log


async def test_openai_sdk_authenticates(locked: tuple[GatewayStack, FakeEngine]) -> None:
    sdks.require_package("openai")
    stack, _ = locked
    command = (sys.executable, str(SDK), stack.url, "chat", *map(key_of, ("ci", "unknown", "narrow")))
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    out, _ = await process.communicate()
    assert out.decode().splitlines() == [
        "answered",
        "AuthenticationError invalid_api_key",
        "PermissionDeniedError model_not_allowed",
    ]


async def test_nothing_passes_while_picker_is_away(locked: tuple[GatewayStack, FakeEngine]) -> None:
    stack, engine = locked
    assert stack.picker is not None
    stack.picker.send_signal(signal.SIGKILL)
    stack.picker.wait()
    seen = len(engine.received)
    for size in (1, 100_000):
        status, body, reply_headers = await stack.ask_fully(sent=bearer("ci"), pad="x" * size)
        assert (status, body["error"]["code"], reply_headers["retry-after"]) == (503, "unavailable", "1")
        assert "cannot authenticate clients, because its picker failed" in body["error"]["message"]
    assert len(engine.received) == seen
    # Without Secrets the API server answers no list: the new picker must not serve.
    os.rename(stack.objects_file, stack.objects_file.with_suffix(".away"))
    stack.start_picker()

    async def reason() -> str:
        try:
            async with stack.http.get(f"{stack.picker_url}/readyz") as answer:
                return await answer.text() if answer.status == 503 else ""
        except aiohttp.ClientError:
            return ""

    async def is_waiting() -> bool:
        return "the first list" in await reason()

    await wait_until(is_waiting, "the picker waits for its first lists")
    assert (await stack.ask_fully(sent=bearer("ci")))[0] == 503
    os.rename(stack.objects_file.with_suffix(".away"), stack.objects_file)
    await stack.ready()
    assert (await stack.ask_fully(sent=bearer("ci")))[0] == 200


async def test_optional_keys_admit_strangers_also_without_picker(tmp_path_factory: object) -> None:
    stack = GatewayStack(make_directory(tmp_path_factory), api_keys=ApiKeyMode.OPTIONAL, trust_identity_headers=False)
    try:
        engine = await stack.engine()
        stack.write_secrets(*SECRETS)
        await stack.start([service(), service("large")], [pod(engine.address)])
        await stack.wait_routable(engine)
        for headers, expected in (({}, 200), ({"authorization": "Bearer none"}, 200), (bearer("unknown"), 401)):
            assert (await stack.ask_fully(sent=headers))[0] == expected
        assert stack.picker is not None
        stack.picker.kill()
        stack.picker.wait()
        assert (await stack.ask_fully(sent=bearer("ci")))[0] == 200
        assert not engine.received[-1].headers.keys() & {b"authorization"}
    finally:
        await stack.shut_down()
