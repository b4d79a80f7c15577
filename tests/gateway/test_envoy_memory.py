"""What clients can make Envoy hold stays below the chart's memory limit, and other clients are served meanwhile."""

from __future__ import annotations

import asyncio
import io
import json
import resource
from collections import Counter
from collections.abc import AsyncIterator

import aiohttp
import pytest
import pytest_asyncio

from plimsoll.gateway.gateway_limit import GatewayLimit
from tests.gateway.kube_objects import pod, service
from tests.gateway.quantity_attacks import (
    BODY_BYTES,
    ENVOY_MEMORY_BYTES,
    HEAD,
    flood,
    half_send,
    half_send_http2,
    peak_bytes,
    slow_reader,
)
from tests.gateway.stack import TIMEOUT_S, GatewayStack, stop, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(120)]

ATTACK_SECONDS = 8.0  # enough for Envoy to reach its memory limit


@pytest_asyncio.fixture
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayStack]:
    """A gateway of the test's own with the services `chat` and `vision`, one engine each, and Envoy's peak below the
    limit in the end."""
    stack = GatewayStack(tmp_path_factory.mktemp("gw"), envoy_memory_bytes=ENVOY_MEMORY_BYTES)
    try:
        chat, vision = await stack.engine(), await stack.engine()
        pods = [pod(chat.address), pod(vision.address, service="vision")]
        await stack.start([service(), service("vision")], pods)
        await stack.wait_routable(chat)
        await stack.wait_routable(vision, service="team/vision")
        yield stack
        assert stack.envoy is not None
        assert stack.envoy.poll() is None, "Envoy ended"
        peak = peak_bytes(stack.envoy.pid)
        print(f"Envoy's peak RSS: {peak / 1e6:.0f} MB")
        assert peak < ENVOY_MEMORY_BYTES
    finally:
        await stack.shut_down()
        print(stack.log.read_text()[-2000:])


async def stream_fully(stack: GatewayStack) -> str:
    async with stack.ask(stream=True) as answer:
        return (await answer.text())[-14:]


async def test_surplus_of_large_bodies_is_refused_and_streams_go_on(gateway: GatewayStack) -> None:
    chat, vision = gateway.engines
    chat.behaviour.pause, vision.behaviour.release_event = asyncio.Event(), asyncio.Event()
    streams = [asyncio.create_task(stream_fully(gateway)) for _ in range(5)]
    await wait_until(lambda: chat.open == 5, "five streams of another model run")
    body = json.dumps({"model": "vision", "messages": [{"role": "user", "content": "a" * BODY_BYTES}]}).encode()

    async def send() -> tuple[int, str]:
        data, headers = io.BytesIO(body), {"content-type": "application/json"}
        async with gateway.http.post(f"{gateway.url}/v1/chat/completions", data=data, headers=headers) as answer:
            if answer.status == 429:
                assert (await answer.json())["error"]["type"] == "rate_limit_error"
                assert int(answer.headers["retry-after"]) > 0
            await answer.read()
            return answer.status, answer.headers.get("x-plimsoll-reason", "")

    sent = [asyncio.create_task(send()) for _ in range(60)]
    await wait_until(lambda: sum(task.done() for task in sent) + vision.open == 60, "each is refused or at the engine")
    assert vision.open >= 10
    assert (await gateway.ask_fully("chat", max_tokens=1))[0] == 200
    chat.behaviour.pause.set()
    vision.behaviour.release_event.set()
    outcomes = Counter(await asyncio.gather(*sent))
    assert outcomes.keys() == {(200, ""), (429, "gateway_full")}
    assert await asyncio.gather(*streams) == ["data: [DONE]\n\n"] * 5

    async def gives_back() -> bool:
        return (await gateway.ask_fully("vision", pad="a" * BODY_BYTES))[0] == 200

    await wait_until(gives_back, "what ended counts no more")


async def cancel(tasks: list[asyncio.Task[bytes]]) -> None:
    """End the clients that still wait."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_half_sent_bodies_are_bounded(gateway: GatewayStack) -> None:
    sending = [asyncio.create_task(half_send(gateway.settings.port)) for _ in range(120)]

    def responses() -> list[bytes]:
        return [answer for task in sending if task.done() and (answer := task.result())]

    await wait_until(lambda: len(responses()) >= 60, "at least half of the requests are rejected")
    assert (await gateway.ask_fully())[0] == 200
    assert all(answer.startswith(b"HTTP/1.1 429 ") and b"gateway_full" in answer for answer in responses())
    await cancel(sending)


async def test_half_sent_bodies_of_one_source_leave_room(gateway: GatewayStack) -> None:
    """A body of the largest size of another source is served meanwhile."""
    sending = [asyncio.create_task(half_send(gateway.settings.port, "127.0.0.2")) for _ in range(40)]

    def refused() -> int:
        return sum(task.done() and b"gateway_full" in task.result() for task in sending)

    await wait_until(lambda: refused() >= 20, "the source has no more room")
    assert (await gateway.ask_fully(pad="a" * BODY_BYTES))[0] == 200
    await cancel(sending)


async def test_half_sent_bodies_without_picker_do_not_end_envoy(gateway: GatewayStack) -> None:
    """Nobody bounds their sum then: Envoy takes no new requests, and ends those that hold most."""
    assert gateway.picker is not None
    stop(gateway.picker)
    assert (await gateway.ask_fully(pad="a" * BODY_BYTES))[0] == 200
    sending = [asyncio.create_task(half_send(gateway.settings.port)) for _ in range(180)]
    await asyncio.wait(sending, timeout=ATTACK_SECONDS)
    await cancel(sending)

    async def serves() -> bool:
        return (await gateway.ask_fully())[0] == 200

    await wait_until(serves, "the memory is free again")


async def test_half_sent_bodies_on_one_http2_connection_are_bounded(gateway: GatewayStack) -> None:
    refused = asyncio.create_task(asyncio.to_thread(half_send_http2, gateway.settings.port, 120))
    while not refused.done():
        assert (await gateway.ask_fully())[0] == 200
        await asyncio.sleep(0.1)
    assert sum(headers[b":status"] == b"429" for headers in await refused) >= 60


async def test_slow_readers_are_bounded(gateway: GatewayStack) -> None:
    engine = await asyncio.start_server(flood, "127.0.0.1", 0)
    address = f"127.0.0.1:{engine.sockets[0].getsockname()[1]}"
    await gateway.set_objects(
        [service(), service("flood")], [pod(gateway.engines[0].address), pod(address, service="flood")]
    )
    body = json.dumps({"model": "flood", "messages": [], "stream": True})
    request = (HEAD.format(len(body)) + body).encode()
    clients = [slow_reader(gateway.settings.port, request) for _ in range(150)]
    for _ in range(20):
        assert (await gateway.ask_fully())[0] == 200
        await asyncio.sleep(0.1)
    for client in clients:
        client.close()
    engine.close()


async def test_connections_beyond_limit_are_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Those that are open are served on. The file limit of the test is raised, for its side of the connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    stack = GatewayStack(tmp_path_factory.mktemp("gw"), envoy_memory_bytes=256 << 20, headers_timeout_seconds=600.0)
    connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        engine = await stack.engine()
        await stack.start([service()], [pod(engine.address)])
        await stack.wait_routable(engine)
        await stack.http.close()
        stack.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(keepalive_timeout=600.0))
        assert (await stack.ask_fully())[0] == 200  # over a connection that stays open
        for _ in range(stack.settings.max_connections + 50):
            connections.append(await asyncio.open_connection("127.0.0.1", stack.settings.port))

        async def refused() -> int:
            return (await stack.admin.stats()).reached[GatewayLimit.CONNECTIONS]

        async def are_refused() -> bool:
            return await refused() >= 50

        await wait_until(are_refused, "the surplus is closed")
        assert (await stack.admin.stats()).connections <= stack.settings.max_connections
        async with stack.http.get(f"http://127.0.0.1:{stack.settings.probe_port}/readyz") as page:
            assert page.status == 200, "a full gateway stays in its Service"
        assert (await stack.ask_fully())[0] == 200
        reader, _ = connections[-1]
        assert await asyncio.wait_for(reader.read(1), TIMEOUT_S) == b""
    finally:
        for _, writer in connections:
            writer.close()
        await stack.shut_down()


async def test_chunked_body_is_counted_by_its_true_size_once_read(gateway: GatewayStack) -> None:
    """A client that does not say how long its body is holds the largest size only until the body is there."""
    vision = gateway.engines[1]
    vision.behaviour.release_event = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield json.dumps({"model": "vision", "messages": []}).encode()

    async def send() -> int:
        headers = {"content-type": "application/json"}
        async with gateway.http.post(f"{gateway.url}/v1/chat/completions", data=pieces(), headers=headers) as answer:
            return answer.status

    sent = []
    for count in range(1, 41):
        sent.append(asyncio.create_task(send()))
        await wait_until(lambda reached=count: vision.open == reached, f"{count} at the engine")  # type: ignore[misc]
    vision.behaviour.release_event.set()
    assert set(await asyncio.gather(*sent)) == {200}


async def test_refused_body_is_an_error_that_clients_understand(gateway: GatewayStack) -> None:
    """A client that writes its whole body before it reads gets the refusal, too."""
    vision = gateway.engines[1]
    vision.behaviour.release_event = asyncio.Event()
    sent = [asyncio.create_task(gateway.ask_fully("vision", pad="a" * BODY_BYTES)) for _ in range(40)]
    await wait_until(lambda: any(task.done() for task in sent), "one is refused")
    vision.behaviour.release_event.set()
    results = await asyncio.gather(*sent, return_exceptions=True)
    assert [result for result in results if isinstance(result, aiohttp.ClientError)] == []
