"""Mutual TLS between gateways' pickers: who is cut off, and a Secret that is renewed while they are connected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from plimsoll.adapters.certificate_files import AUTHORITY_FILE
from plimsoll.adapters.internal_tls import IdentityWatch
from plimsoll.api.contract import engine_tls_name, internal_tls_name
from plimsoll.gateway.one_queue import owner_server
from plimsoll.gateway.one_queue.frames import FrameSession
from plimsoll.gateway.one_queue.tls_stream import PeerTls, TlsStream
from plimsoll.telemetry import gateway_metrics
from tests.certificates import Authority, SecretVolume
from tests.gateway.one_queue_harness import SECRET, Gateways, eventually, is_admitted
from tests.gateway.picker_harness import engine_names, service_with_slo

NAME = internal_tls_name("plimsoll-system")
REJECTED = gateway_metrics.GATEWAY_PEER_CONNECTIONS_REJECTED.labels("unproven")


class Secret:
    """The Secret of the release, as one pod reads it."""

    def __init__(self, folder: Path, files: dict[str, bytes], name: str = NAME) -> None:
        self._volume = SecretVolume(folder)
        self.watch = IdentityWatch(self._volume.directory, name)
        self.write(files)

    @property
    def tls(self) -> PeerTls:
        return PeerTls(lambda: self.watch.identity, NAME)

    def write(self, files: dict[str, bytes]) -> None:
        self._volume.write(files)
        self.watch.take(self.watch.read())
        assert not self.watch.problem


class Fleet:
    """Two gateways with TLS. `end`: those that are up end by it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority = folder, Authority(folder / "ca", "plimsoll")
        self.secrets = [Secret(folder / f"gateway-{n}", self.authority.issue(NAME)) for n in range(2)]
        self.gateways = Gateways(
            folder, 2, service_with_slo(batch=9), pods=engine_names(1), tls=[secret.tls for secret in self.secrets]
        )

    async def serve_each_other(self) -> None:
        for gateway in self.gateways.all:
            assert is_admitted(await gateway.ask(f"of {gateway.name}"))
        assert self.gateways.owner().admits == 2


@pytest_asyncio.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    made = Fleet(tmp_path)
    async with made.gateways:
        yield made


async def test_gateways_decide_as_one_over_tls(fleet: Fleet) -> None:
    await fleet.serve_each_other()


async def be_cut_off(fleet: Fleet, tls: PeerTls | None) -> None:
    """Connect as a client that knows the secret of the gateways, until the owner closes the connection."""
    rejected = REJECTED._value.get()
    owner = fleet.gateways.owner()
    reader, writer = await asyncio.open_connection(owner.address, fleet.gateways.port)
    if tls is None:
        writer.write(FrameSession(SECRET, is_client=True).hello)
    else:
        stream = TlsStream(tls, is_client=True)
        writer.write(stream.outgoing())
        while not stream.is_open and (data := await reader.read(1 << 16)):
            stream.feed(data)
            writer.write(stream.outgoing())
    try:
        while await asyncio.wait_for(reader.read(1 << 16), 30.0):
            pass
    except ConnectionError:
        pass
    writer.close()
    await eventually(lambda: REJECTED._value.get() > rejected, "the metric counts it")


@pytest.mark.parametrize("client", ["plain", "engine", "another authority"])
async def test_peer_without_a_gateways_certificate_is_cut_off(
    fleet: Fleet, client: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(owner_server, "LOG_SECONDS", 0.0)
    files = fleet.authority.issue(NAME)
    tls: PeerTls | None = Secret(fleet.folder / "client", files).tls
    message = "wrong version number"
    if client == "plain":
        tls = None
    elif client == "engine":
        name = engine_tls_name("team")
        tls = Secret(fleet.folder / "engine", fleet.authority.issue(name), name).tls
        message = f"it has no certificate with the name {NAME}"
    else:
        other = Secret(fleet.folder / "other", Authority(fleet.folder / "another", "another").issue(NAME))
        assert other.watch.identity is not None
        other.watch.identity.client.load_verify_locations(cadata=fleet.authority.pem.decode())
        tls, message = other.tls, "TLS handshake failed: self-signed certificate in certificate chain"
    await be_cut_off(fleet, tls)
    assert message in caplog.text
    await fleet.serve_each_other()


async def test_silent_handshakes_have_few_places(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_server, "MAX_UNPROVEN", 3)
    owner = fleet.gateways.owner()
    silent = [await asyncio.open_connection(owner.address, fleet.gateways.port) for _ in range(9)]
    closed = [asyncio.create_task(reader.read()) for reader, _ in silent]
    await eventually(lambda: sum(task.done() for task in closed) >= 6, "the oldest make room")
    await fleet.serve_each_other()
    for _, writer in silent:
        writer.close()
    await asyncio.gather(*closed, return_exceptions=True)


async def test_renewed_secret_ends_no_connection(fleet: Fleet) -> None:
    links = [link for gateway in fleet.gateways.all for link in gateway.queue._links.values()]
    before, new = [link._connection for link in links], Authority(fleet.folder / "new", "new")
    for secret in fleet.secrets:
        secret.write({**fleet.authority.issue(NAME), AUTHORITY_FILE: fleet.authority.pem + new.pem})
    for secret in fleet.secrets:
        secret.write(new.issue(NAME))
    await fleet.serve_each_other()
    assert [link._connection for link in links] == before
    for connection in before:
        assert connection is not None
        connection.close()
    await eventually(lambda: all(link._connection not in (None, *before) for link in links), "they connect again")
    await fleet.gateways.connected(*fleet.gateways.all)


async def test_gateway_that_refuses_its_peer_is_named_once(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """One of two has a certificate of another authority. Each decides by itself, and its log says why."""
    other = Authority(fleet.folder / "other", "other")
    fleet.secrets[0].write(other.issue(NAME))
    for gateway in fleet.gateways.all:
        for link in gateway.queue._links.values():
            assert link._connection is not None
            link._connection.close()

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if "cannot reach the" in record.getMessage()]

    await eventually(lambda: len(said()) == 2, "both logs name the other gateway")
    assert all("TLS handshake failed: self-signed certificate" in line for line in said())
    rejected = REJECTED._value.get()
    await eventually(lambda: REJECTED._value.get() > rejected + 2, "they try again")
    assert len(said()) == 2
    for gateway in fleet.gateways.all:
        assert is_admitted(await gateway.ask(f"of {gateway.name}"))
    fleet.secrets[0].write(fleet.authority.issue(NAME))
    await fleet.gateways.connected(*fleet.gateways.all)
