"""Deadlines through real Envoy: what waits or runs past them ends, at the engine too, and no client can set Envoy's."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.kube_objects import Object, pod, service
from tests.gateway.picker_harness import service_with_slo
from tests.gateway.stack import GatewayStack, wait_until
from tests.gateway.test_deadlines import limited

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

TIMEOUT = "x-request-timeout"
MADE = {"without slo": service, "with slo": service_with_slo}


async def start(stack: GatewayStack, made: Object) -> FakeEngine:
    engine = await stack.engine()
    await stack.set_objects([made], [pod(engine.address)])
    await stack.wait_routable(engine)
    return engine


async def completed(stack: GatewayStack, outcome: str) -> float:
    """How many requests ended so, by the gateway's metrics."""
    async with stack.http.get(f"{stack.picker_url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    name = f'plimsoll_gateway_requests_completed_total{{outcome="{outcome}",service="team/chat"}}'
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


async def wait_completed(stack: GatewayStack, outcome: str, count: float) -> None:
    async def is_met() -> bool:
        return await completed(stack, outcome) == count

    await wait_until(is_met, f"{count} requests ended as {outcome}")


@pytest.mark.parametrize("made", MADE)
async def test_response_past_deadline_is_504_and_cancelled(stack: GatewayStack, made: str) -> None:
    engine = await start(stack, MADE[made]())
    engine.behaviour.release_event = asyncio.Event()
    limit = "3"  # seconds: on a busy machine the request must have reached the engine by then
    status, body, headers = await stack.ask_fully(sent={TIMEOUT: limit}, max_tokens=5)
    assert (status, body["error"]["code"], headers["x-plimsoll-reason"]) == (
        504,
        "deadline_exceeded",
        "deadline_exceeded",
    )
    assert f"within {limit} s" in body["error"]["message"]
    assert headers["x-should-retry"] == "false"
    await wait_until(lambda: engine.open == 0, "the engine sees that the client is gone")
    await stack.wait_inflight(engine, 0)
    await wait_completed(stack, "deadline_exceeded", 1)
    assert await completed(stack, "failed") == 0
    assert engine.header("x-plimsoll-deadline-seconds") == limit
    assert engine.header("x-envoy-upstream-stream-duration-ms") is None
    assert len(engine.received) == 1


async def test_anthropic_client_gets_its_own_error_shape(stack: GatewayStack) -> None:
    engine = await start(stack, service())
    engine.behaviour.release_event = asyncio.Event()
    body = {"model": "chat", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}
    async with stack.http.post(f"{stack.url}/v1/messages", json=body, headers={TIMEOUT: "0.5"}) as answer:
        assert answer.status == 504
        assert (await answer.json())["error"]["type"] == "timeout_error"


async def test_stream_past_deadline_is_cut_never_completed(stack: GatewayStack) -> None:
    engine = await start(stack, service())
    engine.behaviour.pause = asyncio.Event()
    async with stack.ask(sent={TIMEOUT: "4"}, stream=True) as answer:  # time for the first byte, on a busy machine
        assert answer.status == 200
        received = await answer.content.readany()
        with pytest.raises(aiohttp.ClientPayloadError):
            received += await answer.content.read()
    assert received.startswith(b"data:")
    assert b"[DONE]" not in received
    await wait_until(lambda: engine.open == 0, "the engine sees that the client is gone")
    await wait_completed(stack, "deadline_exceeded", 1)


async def test_sdk_read_timeout_does_not_cut_a_stream(stack: GatewayStack) -> None:
    engine = await start(stack, service())
    pause = engine.behaviour.pause = asyncio.Event()
    async with stack.ask(sent={"x-stainless-read-timeout": "1"}, stream=True) as answer:
        await answer.content.readany()
        await asyncio.sleep(1.5)  # longer than the SDK would wait between two bytes: that is its own affair
        pause.set()
        assert b"[DONE]" in await answer.read()


async def test_queued_request_leaves_at_its_deadline(stack: GatewayStack) -> None:
    engine = await start(stack, service_with_slo(batch=1))
    hold = engine.behaviour.release_event = asyncio.Event()
    running = asyncio.create_task(stack.ask_fully())
    await stack.wait_inflight(engine, 1)
    waiting = asyncio.create_task(stack.ask_fully(sent={TIMEOUT: "4"}, max_tokens=1))
    await stack.wait_queued(1)
    status, body, headers = await waiting
    assert (status, body["error"]["code"], headers["x-should-retry"]) == (504, "deadline_exceeded", "false")
    assert "(x-request-timeout)" in body["error"]["message"]
    await stack.wait_queued(0)
    hold.set()
    assert (await running)[0] == 200
    assert len(engine.received) == 1
    assert (await stack.admission())["outcomes"] == {"Admitted": 1, "Queued": 1, "ShedDeadline": 1}


@pytest.mark.parametrize("made", MADE)
async def test_envoy_headers_of_clients_set_no_timeout(stack: GatewayStack, made: str) -> None:
    engine = await start(stack, MADE[made]())
    hold = engine.behaviour.release_event = asyncio.Event()
    spoofed = {
        "x-envoy-upstream-stream-duration-ms": "50",
        "x-envoy-upstream-rq-timeout-ms": "50",
        "X-Envoy-Upstream-Rq-Per-Try-Timeout-Ms": "50",
        "x-envoy-expected-rq-timeout-ms": "50",
        "x-envoy-upstream-rq-timeout-alt-response": "1",
        "x-plimsoll-deadline-seconds": "0.05",
        "x-plimsoll-idle-timeout": "5",
        "x-plimsoll-max-output-tokens": "1",
    }
    pending = asyncio.create_task(stack.ask_fully(sent=spoofed))
    await stack.wait_inflight(engine, 1)
    await asyncio.sleep(0.5)
    assert not pending.done()
    hold.set()
    assert (await pending)[0] == 200
    assert not {name.lower().encode() for name in spoofed} & engine.received[-1].headers.keys()


async def test_client_cannot_lengthen_the_services_limit(stack: GatewayStack) -> None:
    engine = await start(stack, limited({"maxDuration": "1s"}))
    engine.behaviour.release_event = asyncio.Event()
    spoofed = {"x-envoy-upstream-stream-duration-ms": "0", TIMEOUT: "3600"}
    status, body, _ = await stack.ask_fully(sent=spoofed)
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
    assert "within 1 s" in body["error"]["message"]


@pytest.mark.parametrize("value", ["-1", "NaN", "1e99", "0"])
async def test_nonsense_timeout_is_400(stack: GatewayStack, value: str) -> None:
    engine = await start(stack, service())
    status, body, headers = await stack.ask_fully(sent={TIMEOUT: value})
    assert (status, body["error"]["code"], headers["x-should-retry"]) == (400, "invalid_timeout", "false")
    assert f"'{value}'" in body["error"]["message"]
    assert engine.received == []


async def test_several_timeout_headers_are_400(stack: GatewayStack) -> None:
    await start(stack, service())
    body = b'{"model":"chat","messages":[]}'
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\nconnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.settings.port)
    writer.write(f"{head}{TIMEOUT}: 5\r\n{TIMEOUT}: 700\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"invalid_timeout"' in answer


async def test_idle_timeout_before_the_first_token_is_504(stack: GatewayStack) -> None:
    engine = await start(stack, limited({"idleTimeout": "5s"}))
    hold = engine.behaviour.release_event = asyncio.Event()
    status, body, headers = await stack.ask_fully(stream=True)
    assert (status, body["error"]["code"], headers["x-should-retry"]) == (504, "timeout", "false")
    await wait_until(lambda: engine.open == 0, "the engine sees that the client is gone")
    await wait_completed(stack, "idle_timeout", 1)
    hold.set()
    assert (await stack.ask_fully())[0] == 200
    assert engine.header("x-plimsoll-idle-timeout") is None  # only a stream shows that its engine works


async def test_idle_timeout_between_tokens_cuts_the_stream(stack: GatewayStack) -> None:
    engine = await start(stack, limited({"idleTimeout": "5s"}))
    engine.behaviour.pause = asyncio.Event()
    async with stack.ask(stream=True) as answer:
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    await wait_until(lambda: engine.open == 0, "the engine sees that the client is gone")
    await wait_completed(stack, "idle_timeout", 1)


async def test_deadlines_of_many_clients_eject_no_engine(stack: GatewayStack) -> None:
    made = service()
    made["spec"]["engine"] = {"args": ["--max-num-seqs", "2"]}  # three failed connections in a row eject an engine
    engines = [await stack.engine() for _ in range(4)]
    await stack.set_objects([made], [pod(engine.address) for engine in engines])
    await stack.wait_routable(*engines)
    for engine in engines:
        engine.behaviour.release_event = asyncio.Event()
    pending = [stack.ask_fully(sent={TIMEOUT: "1.5"}) for _ in range(40)]
    assert {status for status, *_ in await asyncio.gather(*pending)} == {504}
    await wait_completed(stack, "deadline_exceeded", 40)
    for _ in range(10):  # Envoy decides once a second
        await asyncio.sleep(0.2)
        assert [e["routable"] for e in (await stack.endpoints()).values()] == [True] * 4
