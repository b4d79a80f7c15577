"""What clients can make Envoy hold stays below the chart's memory limit, and other clients are served meanwhile."""

from __future__ import annotations

import asyncio
import io
import json
import resource
import socket
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import h2.config
import h2.connection
import h2.events
import h2.exceptions
import pytest
import pytest_asyncio
import yaml

from plimsoll.core.units import parse_quantity
from plimsoll.gateway.envoy.admin import Limit
from tests.gateway.kube_objects import pod, service
from tests.gateway.stack import ROOT, TIMEOUT_S, GatewayStack, stop, wait_until

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="function"), pytest.mark.timeout(120)]

VALUES = yaml.safe_load((ROOT / "charts/plimsoll/values.yaml").read_text())
MEMORY_BYTES = int(parse_quantity(VALUES["gateway"]["envoy"]["resources"]["limits"]["memory"]))
BODY_BYTES = int(7.5e6)
ATTACK_SECONDS = 8.0  # enough for Envoy to reach its memory limit
HEAD = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n"


@pytest_asyncio.fixture
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[GatewayStack]:
    """A gateway of the test's own with the services `chat` and `vision`, one engine each, and Envoy's peak below the
    limit in the end."""
    stack = GatewayStack(tmp_path_factory.mktemp("gw"), envoy_memory_bytes=MEMORY_BYTES)
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
        assert peak < MEMORY_BYTES
    finally:
        await stack.shut_down()
        print(stack.log.read_text()[-2000:])


def peak_bytes(pid: int) -> int:
    """The largest resident set of a process so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


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


async def half_send(gateway: GatewayStack) -> bytes:
    """Sends a body without its last byte. Returns the response, or nothing if the connection is reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.settings.port)
    try:
        writer.write(HEAD.format(BODY_BYTES).encode() + b"a" * (BODY_BYTES - 1))
        return await reader.read(1 << 16)
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def cancel(tasks: list[asyncio.Task[bytes]]) -> None:
    """End the clients that still wait."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_half_sent_bodies_are_bounded(gateway: GatewayStack) -> None:
    sending = [asyncio.create_task(half_send(gateway)) for _ in range(120)]

    def responses() -> list[bytes]:
        return [answer for task in sending if task.done() and (answer := task.result())]

    await wait_until(lambda: len(responses()) >= 60, "at least half of the requests are rejected")
    assert (await gateway.ask_fully())[0] == 200
    assert all(answer.startswith(b"HTTP/1.1 429 ") and b"gateway_full" in answer for answer in responses())
    await cancel(sending)


async def test_half_sent_bodies_without_picker_do_not_end_envoy(gateway: GatewayStack) -> None:
    """Nobody bounds their sum then: Envoy takes no new requests, and ends those that hold most."""
    assert gateway.picker is not None
    stop(gateway.picker)
    assert (await gateway.ask_fully(pad="a" * BODY_BYTES))[0] == 200
    sending = [asyncio.create_task(half_send(gateway)) for _ in range(180)]
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
    assert await refused >= 60


def half_send_http2(port: int, count: int) -> int:
    """Sends `count` bodies without their last byte over one connection. Returns how many got a 429."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        client = Http2Client(sock)
        for _ in range(count):
            try:
                client.half_send()
            except (h2.exceptions.TooManyStreamsError, h2.exceptions.StreamClosedError):
                client.receive(0.1)
        while client.receive(0.5):
            pass
    return client.refused


class Http2Client:
    """One connection, and how many of its streams got a 429."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self._connection.initiate_connection()
        self._sock.sendall(self._connection.data_to_send())
        self._closed: set[int] = set()
        self.refused = 0
        self.receive(1.0)

    def receive(self, timeout: float) -> bool:
        """Wait for frames. Returns whether some came."""
        self._sock.settimeout(timeout)
        try:
            data = self._sock.recv(1 << 16)
        except TimeoutError:
            return False
        for event in self._connection.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived):
                self.refused += dict(event.headers)[b":status"] == b"429"
                self._closed.add(event.stream_id)
        self._sock.settimeout(5.0)
        self._sock.sendall(self._connection.data_to_send())
        return bool(data)

    def half_send(self) -> None:
        """Send a body up to its last byte, or until it is refused or not read any more."""
        stream, left = self._connection.get_next_available_stream_id(), BODY_BYTES - 1
        path = [(":method", "POST"), (":scheme", "http"), (":authority", "x"), (":path", "/v1/chat/completions")]
        self._connection.send_headers(stream, [*path, ("content-type", "application/json")])
        while left and stream not in self._closed:
            size = min(self._connection.local_flow_control_window(stream), left, 16384)
            if size:
                self._connection.send_data(stream, b"a" * size)
                self._sock.sendall(self._connection.data_to_send())
                left -= size
            elif not self.receive(0.3):
                break


async def test_slow_readers_are_bounded(gateway: GatewayStack) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """An engine that sends as fast as it can."""
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        piece = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
        try:
            for _ in range(300):
                writer.write(piece)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    engine = await asyncio.start_server(flood, "127.0.0.1", 0)
    address = f"127.0.0.1:{engine.sockets[0].getsockname()[1]}"
    await gateway.set_objects(
        [service(), service("flood")], [pod(gateway.engines[0].address), pod(address, service="flood")]
    )
    body = json.dumps({"model": "flood", "messages": [], "stream": True})
    request = (HEAD.format(len(body)) + body).encode()
    clients = []
    for _ in range(150):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        client.connect(("127.0.0.1", gateway.settings.port))
        client.sendall(request)
        clients.append(client)
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
        assert (await stack.ask_fully())[0] == 200  # over a connection that stays open
        for _ in range(stack.settings.max_connections + 50):
            connections.append(await asyncio.open_connection("127.0.0.1", stack.settings.port))

        async def refused() -> int:
            return (await stack.admin.stats()).reached[Limit.CONNECTIONS]

        async def are_refused() -> bool:
            return await refused() >= 50

        await wait_until(are_refused, "the surplus is closed")
        assert (await stack.admin.stats()).connections <= stack.settings.max_connections
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
