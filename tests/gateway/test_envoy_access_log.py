"""The access log of a whole gateway: one line for each request, and none of a client's making."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from plimsoll.core.admission.token_estimator import MIN_STREAMS
from plimsoll.gateway.settings import ApiKeyMode
from tests.gateway.api_key_secrets import bearer, key_of, key_secret
from tests.gateway.conftest import make_directory
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.kube_objects import pod
from tests.gateway.logged_gateway import LoggedGateway
from tests.gateway.picker_harness import service_with_slo

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: object) -> AsyncIterator[LoggedGateway]:
    stack = LoggedGateway(make_directory(tmp_path_factory), access_log=True, api_keys=ApiKeyMode.OPTIONAL)
    try:
        stack.write_secrets(key_secret("ci", tenant="team-a", **{"class": "low"}))
        yield await stack.start()
    finally:
        await stack.shut_down()
        print(stack.log.read_text()[-4000:])


@pytest_asyncio.fixture(loop_scope="module")
async def single_slot_gateway(gateway: LoggedGateway) -> AsyncIterator[tuple[LoggedGateway, FakeEngine]]:
    """The gateway, and an engine that takes one request at a time."""
    engine = await gateway.engine()
    classes = [{"name": "low"}, {"name": "high", "priority": 1}]
    made = service_with_slo(admission={"classes": classes}, classes=("low", "high"), batch=1)
    await gateway.set_objects([made], [pod(engine.address)])
    await gateway.wait_routable(engine)
    yield gateway, engine
    await gateway.reset()


async def test_served_request_has_one_full_line(single_slot_gateway: tuple[LoggedGateway, FakeEngine]) -> None:
    gateway, engine = single_slot_gateway
    async with gateway.ask(stream=True, sent={"x-request-id": "served", **bearer("ci")}) as answer:
        body = await answer.read()
    line = await gateway.line_of("served")
    assert {name: line[name] for name in ("tenant", "class", "api_key", "model", "service", "endpoint", "status")} == {
        "tenant": "team-a",
        "class": "low",
        "api_key": "ci",
        "model": "chat",
        "service": "team/chat",
        "endpoint": engine.address,
        "status": 200,
    }
    assert (line["method"], line["path"], line["outcome"]) == ("POST", "/v1/chat/completions", "succeeded")
    assert (line["response_bytes"], line["attempts"], line["retry"]) == (len(body), 1, False)
    assert 0 < line["ttft_s"] <= line["duration_s"]
    assert line["prompt_tokens"] > 0
    assert line["request_bytes"] > 0
    assert (line["reason"], line["prefill_endpoint"]) == (None, None)


FORGED = '{"usage": {"completion_tokens": 7}}' * 100


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ('{"prompt_tokens": 9, "completion_tokens": 41, "completion_tokens_details": {"reasoning_tokens": 3}}', 41),
        ('{"input_tokens":9,"output_tokens":42}', 42),
        ("", None),
        ('{"completion_tokens": -5}', None),
        ('{"completion_tokens": 12345678901}', None),
    ],
)
async def test_reported_output_tokens_are_in_the_line(
    single_slot_gateway: tuple[LoggedGateway, FakeEngine], usage: str, tokens: int | None, stream: bool
) -> None:
    gateway, engine = single_slot_gateway
    engine.behaviour.usage, engine.behaviour.text = usage.encode(), FORGED
    name = f"usage-{tokens}-{len(usage)}-{stream}"
    async with gateway.ask(stream=stream, sent={"x-request-id": name}) as answer:
        assert answer.status == 200
        await answer.read()
    line = await gateway.line_of(name)
    assert (line["output_tokens"], line["output_tokens_from"]) == (tokens, None if tokens is None else "usage")


async def test_streams_without_usage_are_estimated_by_size(
    single_slot_gateway: tuple[LoggedGateway, FakeEngine],
) -> None:
    gateway, _ = single_slot_gateway
    for n in range(MIN_STREAMS):
        async with gateway.ask(stream=True, sent={"x-request-id": f"sized-{n}"}) as answer:
            await answer.read()
    line = await gateway.line_of(f"sized-{MIN_STREAMS - 1}")
    assert line["output_tokens"] > 0
    assert line["output_tokens_from"] == "size"


async def test_queued_and_cancelled_requests_have_lines(single_slot_gateway: tuple[LoggedGateway, FakeEngine]) -> None:
    gateway, engine = single_slot_gateway
    hold = engine.behaviour.release_event = asyncio.Event()
    running = asyncio.create_task(gateway.ask_fully(sent={"x-request-id": "running"}))
    await gateway.wait_inflight(engine, 1)
    leaving = asyncio.create_task(gateway.ask_fully(sent={"x-request-id": "leaving", **bearer("ci")}))
    await gateway.wait_queued(1)
    waiting = asyncio.create_task(gateway.ask_fully(sent={"x-request-id": "waiting"}))
    await gateway.wait_queued(2)
    leaving.cancel()
    left = await gateway.line_of("leaving")
    assert (left["api_key"], left["model"], left["service"], left["endpoint"]) == ("ci", "chat", "team/chat", None)
    assert left["queue_s"] > 0
    assert "DC" in left["flags"]
    hold.set()
    assert [status for status, *_ in (await running, await waiting)] == [200, 200]
    assert (await gateway.line_of("running"))["queue_s"] == 0
    assert (await gateway.line_of("waiting"))["queue_s"] > 0


async def test_client_that_leaves_a_stream_is_cancelled(single_slot_gateway: tuple[LoggedGateway, FakeEngine]) -> None:
    gateway, engine = single_slot_gateway
    engine.behaviour.pause = asyncio.Event()
    async with gateway.ask(stream=True, sent={"x-request-id": "half"}) as answer:
        await answer.content.readany()
        answer.close()
    line = await gateway.line_of("half")
    assert (line["outcome"], line["endpoint"], line["status"]) == ("cancelled", engine.address, 200)
    assert line["duration_s"] is not None


async def test_rejected_requests_have_a_line_with_reason(single_slot_gateway: tuple[LoggedGateway, FakeEngine]) -> None:
    gateway, engine = single_slot_gateway
    await gateway.set_objects([service_with_slo(admission={"whenFull": "Shed"}, batch=1)], [pod(engine.address)])
    hold = engine.behaviour.release_event = asyncio.Event()
    running = asyncio.create_task(gateway.ask_fully())
    await gateway.wait_inflight(engine, 1)
    wrong = f"{key_of('ci')}x"
    for request_id, model, sent, status, reason in (
        ("full", "chat", {}, 429, "overloaded"),
        ("unknown", "no-model", bearer("ci"), 404, "model_not_found"),
        ("no key", "chat", {"authorization": f"Bearer {wrong}"}, 401, "invalid_api_key"),
        ("large", "x" * (8 << 20), {}, 413, "body_too_large"),
    ):
        found = await gateway.ask_fully(model, sent={"x-request-id": request_id, **sent})
        assert found[0] == status, found
        line = await gateway.line_of(request_id)
        assert (line["status"], line["reason"], line["endpoint"], line["ttft_s"]) == (status, reason, None, None)
    assert (await gateway.line_of("full"))["service"] == "team/chat"
    unknown = await gateway.line_of("unknown")
    assert (unknown["model"], unknown["service"], unknown["api_key"]) == ("no-model", None, "ci")
    async with gateway.http.get(f"{gateway.url}/secret?token=abc", headers={"x-request-id": "path"}) as answer:
        assert answer.status == 404
    line = await gateway.line_of("path")
    assert (line["path"], line["reason"]) == ("/secret", "unknown_path")
    assert wrong not in gateway.log.read_text()
    hold.set()
    assert (await running)[0] == 200


async def test_starting_model_is_logged_with_its_503(gateway: LoggedGateway) -> None:
    await gateway.set_objects([service_with_slo(admission={"whenFull": "Shed"})], [])
    assert (await gateway.ask_fully(sent={"x-request-id": "starting"}))[0] == 503
    line = await gateway.line_of("starting")
    assert (line["reason"], line["service"], line["endpoint"]) == ("model_starting", "team/chat", None)
    await gateway.reset()


@pytest.mark.parametrize(
    "head",
    [
        b'x-request-id: a","status":200}\r\n',
        b"x-request-id: \xff\xfe\xe2\x80\xa8\r\n",
        b"x-request-id: " + b"i" * 5000 + b"\r\n",
        b"user-agent: \xff\r\n",
    ],
)
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/%0a%7b?a=\xff", b"/\xff" + b"p" * 3000])
async def test_hostile_bytes_make_one_line(
    single_slot_gateway: tuple[LoggedGateway, FakeEngine], head: bytes, path: bytes
) -> None:
    gateway, _ = single_slot_gateway
    model = 'a"}\n{"time":"x","log":"access"}\u2028'
    body = json.dumps({"model": model + "m" * 1000, "messages": [{"role": "user", "content": "a prompt"}]}).encode()
    before = len(gateway.lines())
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.settings.port)
    size = b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
    writer.write(b"POST %s HTTP/1.1\r\nhost: g\r\ncontent-type: application/json\r\n" % path + head + size + body)
    await reader.read()
    writer.close()
    await gateway.ask_fully(sent={"x-request-id": f"after-{before}"})
    await gateway.line_of(f"after-{before}")
    *made, _ = gateway.lines()[before:]
    (line,) = made
    assert max(len(str(value)) for value in line.values()) <= 400
    assert line["status"] in (400, 404)
    assert "a prompt" not in gateway.log.read_text()
    signals = await gateway.http.get(f"{gateway.picker_url}/metrics")
    metrics = await signals.text()
    assert "plimsoll_gateway_bad_log_records_total 0.0" in metrics
    assert "plimsoll_gateway_access_log_lines_dropped_total 0.0" in metrics
