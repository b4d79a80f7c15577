"""What reaches the port for other gateways and is none, or one that lies, is cut off, and costs no one else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from plimsoll.gateway.one_queue import connection, messages, owner_server
from plimsoll.gateway.one_queue.frames import FrameSession
from plimsoll.telemetry import gateway_metrics
from tests.gateway.one_queue_harness import SECRET, Gateway, Gateways, eventually, is_admitted
from tests.gateway.picker_harness import engine_names, service_with_slo
from tests.gateway.test_one_queue_frames import QUESTION


@pytest_asyncio.fixture
async def gateways(tmp_path: Path) -> AsyncIterator[Gateways]:
    async with Gateways(tmp_path, 2, service_with_slo(batch=9), pods=engine_names(1)) as made:
        yield made
        for gateway in made.all:  # whatever happened, gateways serve each other
            assert is_admitted(await gateway.ask(f"last of {gateway.name}"))
        assert made.owner().admits == 2


class Client:
    """A connection to the owner's port, with the secret or another one."""

    def __init__(self, gateways: Gateways) -> None:
        self._address = gateways.owner().address, gateways.port
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter
        self.session: FrameSession

    async def connect(self, secret: bytes = SECRET, name: str | None = None, source: str | None = None) -> Client:
        local = None if source is None else (source, 0)
        self.reader, self.writer = await asyncio.open_connection(*self._address, local_addr=local)
        self.session = FrameSession(secret, is_client=True)
        self.writer.write(self.session.hello)
        self.session.feed(await self.reader.readexactly(20))
        if name is not None:
            self.send(messages.Greeting(name))
        return self

    def send(self, message: messages.Message) -> None:
        self.writer.write(self.session.encode(messages.encode(message)))

    def send_raw(self, payload: bytes) -> None:
        self.writer.write(self.session.encode(payload))

    async def is_closed(self) -> bool:
        """Wait until the owner has closed the connection."""
        try:
            while await asyncio.wait_for(self.reader.read(1 << 16), 30.0):
                pass
        except ConnectionError:
            pass
        self.writer.close()
        return True

    async def receive(self) -> messages.FromOwner:
        while True:
            for payload in self.session.feed(await asyncio.wait_for(self.reader.read(1 << 16), 30.0)):
                return messages.decode_from_owner(payload)


async def test_wrong_secret_is_cut_off(gateways: Gateways) -> None:
    client = await Client(gateways).connect(b"the secret of an attacker", "gateway-7")
    assert await client.is_closed()


async def test_gateway_with_a_short_secret_does_not_start(tmp_path: Path) -> None:
    """It could connect to no other gateway, and would decide all by itself."""
    (tmp_path / "secret").write_bytes(b"short\n")
    with pytest.raises(ValueError, match=r"secret .* must have at least 16 bytes, not 5"):
        Gateway(0, 1, tmp_path / "secret", ack_seconds=1.0, authenticator=None)


async def test_other_protocol_is_cut_off(gateways: Gateways) -> None:
    reader, writer = await asyncio.open_connection(gateways.owner().address, gateways.port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
    received = b""
    try:
        received = await asyncio.wait_for(reader.read(), 30.0)
    except ConnectionError:
        pass
    assert len(received) <= 20  # the hello, and nothing about this gateway
    writer.close()


async def test_silent_connection_is_cut_off(gateways: Gateways, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HELLO_SECONDS", 0.05)
    monkeypatch.setattr(connection, "PING_SECONDS", 0.02)
    reader, writer = await asyncio.open_connection(gateways.owner().address, gateways.port)
    try:
        await asyncio.wait_for(reader.read(), 30.0)
    except ConnectionError:
        pass
    writer.close()
    greeted_not = await Client(gateways).connect()
    assert await greeted_not.is_closed()


async def test_gateway_that_falls_silent_is_cut_off(gateways: Gateways, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENCE_SECONDS", 0.1)
    monkeypatch.setattr(connection, "PING_SECONDS", 0.02)
    client = await Client(gateways).connect(name="gateway-7")
    assert await client.is_closed()
    await gateways.connected(*gateways.all)


async def test_connections_live_while_both_sides_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silence_s = 2.0  # more than a busy machine keeps this process waiting
    monkeypatch.setattr(connection, "SILENCE_SECONDS", silence_s)
    monkeypatch.setattr(connection, "HELLO_SECONDS", silence_s)
    monkeypatch.setattr(connection, "PING_SECONDS", 0.02)
    async with Gateways(tmp_path, 2, service_with_slo(batch=9), pods=engine_names(1)) as gateways:
        links = [link for gateway in gateways.all for link in gateway.queue._links.values()]
        before = [link._connection for link in links]
        await asyncio.sleep(1.5 * silence_s)
        assert [link._connection for link in links] == before


@pytest.mark.parametrize("name", ["", "OWNER"])
async def test_impossible_name_is_cut_off(gateways: Gateways, name: str) -> None:
    client = await Client(gateways).connect(name=gateways.owner().name if name else "")
    assert await client.is_closed()


async def test_question_before_greeting_is_cut_off(gateways: Gateways) -> None:
    client = await Client(gateways).connect()
    client.send(QUESTION)
    assert await client.is_closed()


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"[]", b"\x91\xa4Oops", b"\x9f" * 1000, b"\xdd\xff\xff\xff\xff"])
async def test_payload_that_is_no_message_is_cut_off(gateways: Gateways, payload: bytes) -> None:
    client = await Client(gateways).connect(name="gateway-7")
    client.send_raw(payload)
    assert await client.is_closed()


async def test_question_about_unknown_or_foreign_service_is_refused(gateways: Gateways) -> None:
    client = await Client(gateways).connect(name="gateway-7")
    for number, service in enumerate(("team/unknown", "", "x" * 600)):
        client.send(messages.Question(**_fields(number=number, service=service)))
        assert await client.receive() == messages.Refused(number)
    client.send(messages.Question(**_fields(number=9, route="/admin")))
    assert await client.receive() == messages.Refused(9)
    client.writer.close()


async def test_request_id_of_another_gateway_is_refused(gateways: Gateways) -> None:
    """Neither a question nor an end nor a withdrawal touches what runs through another gateway."""
    (other,), owner = gateways.others(), gateways.owner()
    reply = await other.ask("hi")
    ((request_id, in_flight),) = owner.picker.inflight.requests()
    assert in_flight.via == other.name
    client = await Client(gateways).connect(name="gateway-7")
    client.send(messages.Question(**_fields(request_id=request_id)))
    assert await client.receive() == messages.Refused(1)
    client.send(messages.Ended(request_id, "10.0.0.1:8000", 200, "-"))
    client.send(messages.Withdrawn(1, request_id))
    client.send(messages.Ping())
    assert isinstance(await client.receive(), messages.Pong)
    assert owner.admits == 1
    other.complete(reply)
    await eventually(lambda: owner.admits == 0, "its own gateway may end it")
    client.writer.close()


async def test_gateway_that_vanishes_while_asking_holds_nothing(
    gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await Client(gateways).connect(name="gateway-7")
    client.send(messages.Question(**_fields()))
    answer = await client.receive()
    assert isinstance(answer, messages.Answer)
    assert answer.running is not None
    client.writer.close()
    await eventually(lambda: gateways.owner().admits == 0, "no gateway of that name exists")


def rejected(reason: str) -> float:
    return float(gateway_metrics.GATEWAY_PEER_CONNECTIONS_REJECTED.labels(reason)._value.get())


async def test_unproven_connections_leave_room_for_gateways(
    gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reaches the port may open many connections. They push out each other, and no gateway."""
    monkeypatch.setattr(owner_server, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(owner_server, "MAX_UNPROVEN", 3)
    before = rejected("surplus")
    strangers = [await Client(gateways).connect() for _ in range(12)]
    for stranger in strangers[:9]:
        assert await stranger.is_closed()
    assert rejected("surplus") == before + 9
    client = await Client(gateways).connect(name="gateway-7")
    client.send(messages.Ping())
    assert isinstance(await client.receive(), messages.Pong)
    await gateways.connected(*gateways.all)
    for one in (*strangers, client):
        one.writer.close()


async def test_stranger_pushes_out_no_gateway_that_connects(
    gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner_server, "MAX_UNPROVEN", 2)
    slow = await Client(gateways).connect()  # from the address of a gateway
    strangers = [await Client(gateways).connect(source="127.0.0.99") for _ in range(4)]
    for stranger in strangers[:3]:
        assert await stranger.is_closed()
    slow.send(messages.Greeting("gateway-7"))
    slow.send(messages.Ping())
    assert isinstance(await slow.receive(), messages.Pong)
    for one in (*strangers, slow):
        one.writer.close()


async def test_too_many_gateways_are_cut_off(gateways: Gateways, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_server, "MAX_CONNECTIONS", 3)
    before = rejected("limit")
    clients = [await Client(gateways).connect(name=f"gateway-{n}") for n in range(10, 12)]
    for client in clients:
        client.send(messages.Ping())
        assert isinstance(await client.receive(), messages.Pong)
    assert await (await Client(gateways).connect(name="gateway-12")).is_closed()
    assert rejected("limit") == before + 1
    for client in clients:
        client.writer.close()


async def test_wrong_secrets_are_counted_and_logged_once(gateways: Gateways, caplog: pytest.LogCaptureFixture) -> None:
    before = rejected("unproven")
    for _ in range(5):
        client = await Client(gateways).connect(b"the secret of an attacker", "gateway-7")
        assert await client.is_closed()
    await eventually(lambda: rejected("unproven") == before + 5, "the connections are counted")
    said = [record for record in caplog.records if "another secret" in record.getMessage()]
    assert len(said) == 1


def _fields(**changes: object) -> dict[str, object]:
    return {name: getattr(QUESTION, name) for name in QUESTION.__struct_fields__} | changes
