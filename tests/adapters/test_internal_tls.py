"""TLS in the cluster with real servers on 127.0.0.1: who is accepted by whom, and what a renewed Secret changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from plimsoll.adapters.certificate_files import AUTHORITY_FILE, KEY_FILE
from plimsoll.adapters.internal_tls import IdentityWatch, has_name, listener_context
from plimsoll.adapters.pod_http import get_page
from plimsoll.api.contract import engine_tls_name, internal_tls_name
from plimsoll.core.errors import UntrustedPeer
from tests.certificates import Authority, SecretVolume

NAME, ENGINE = internal_tls_name("plimsoll-system"), engine_tls_name("team")


class Peer:
    """A pod with a mounted Secret."""

    def __init__(self, folder: Path, name: str, files: dict[str, bytes]) -> None:
        self._volume = SecretVolume(folder)
        self.watch = IdentityWatch(self._volume.directory, name)
        self.write(files)

    def write(self, files: dict[str, bytes]) -> None:
        """The kubelet has written the Secret, and the pod has read it."""
        self._volume.write(files)
        self.watch.take(self.watch.read())


class Pair:
    """A server with pages, and the operator."""

    def __init__(self, folder: Path, server_name: str = NAME) -> None:
        self.folder, self.authority = folder, Authority(folder / "ca", "plimsoll")
        self.server = Peer(folder / "server", server_name, self.authority.issue(server_name))
        self.operator = Peer(folder / "operator", NAME, self.authority.issue(NAME))
        self.server_name, self.port = server_name, 0
        self.session: aiohttp.ClientSession

    def other(self) -> Authority:
        return Authority(self.folder / "other", "other")

    async def get(self, name: str = "") -> bytes:
        """What the operator reads: whether the server knows it, from which port, and the serial of the server."""
        identity = self.operator.watch.identity
        return await get_page(
            self.session,
            "127.0.0.1",
            self.port,
            "/",
            name or self.server_name,
            max_bytes=100,
            tls_context=lambda: None if identity is None else identity.client,
        )


async def page(request: web.Request) -> web.Response:
    assert request.transport is not None
    is_operator = has_name(request.transport.get_extra_info("peercert"), NAME)
    return web.Response(text=f"{is_operator} {request.transport.get_extra_info('peername')[1]}")


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    made, application = Pair(tmp_path), web.Application()
    application.router.add_get("/", page)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=listener_context(lambda: made.server.watch.identity)).start()
    made.port = runner.addresses[0][1]
    async with aiohttp.ClientSession() as made.session:
        yield made
    await runner.cleanup()


async def test_both_sides_know_each_other(pair: Pair) -> None:
    assert (await pair.get()).startswith(b"True ")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("another namespace", f"no valid certificate for {ENGINE}: Hostname mismatch"),
        ("another authority", "no valid certificate for .*: self-signed certificate in certificate chain"),
        ("expired", "no valid certificate for .*: certificate has expired"),
    ],
)
async def test_server_without_the_right_certificate_is_refused(pair: Pair, fault: str, message: str) -> None:
    if fault == "another authority":
        pair.server = Peer(pair.folder / "another", NAME, pair.other().issue(NAME))
    elif fault == "expired":  # as if time had passed
        identity = pair.server.watch.identity
        assert identity is not None
        for name, content in pair.authority.issue(NAME, days=-1).items():
            (pair.folder / name).write_bytes(content)
        identity.server.load_cert_chain(pair.folder / "tls.crt", pair.folder / "tls.key")
    with pytest.raises(UntrustedPeer, match=message):
        await pair.get(ENGINE if fault == "another namespace" else "")


async def test_client_of_another_authority_is_refused(pair: Pair) -> None:
    files = pair.other().issue(NAME)
    pair.operator.write({**files, AUTHORITY_FILE: files[AUTHORITY_FILE] + pair.authority.pem})
    with pytest.raises(UntrustedPeer, match=r"it may not accept the certificate of internalTls\.secretName"):
        await pair.get()


async def test_authority_with_comments_is_trusted(pair: Pair) -> None:
    comment = "# Főtanúsítvány\n".encode()
    for peer in (pair.server, pair.operator):
        files = pair.authority.issue(NAME)
        peer.write({**files, AUTHORITY_FILE: comment + files[AUTHORITY_FILE]})
        assert peer.watch.identity is not None
        assert peer.watch.identity.authority.startswith(comment)
    assert (await pair.get()).startswith(b"True ")


async def test_client_without_a_certificate_is_not_the_operator(pair: Pair) -> None:
    url = f"https://127.0.0.1:{pair.port}/"
    async with pair.session.get(url, ssl=False) as response:
        assert (await response.text()).startswith("False ")
    with pytest.raises(aiohttp.ClientError):
        await pair.session.get(url.replace("https", "http"))


async def test_pod_with_tls_needs_an_identity(pair: Pair) -> None:
    pair.operator.watch.identity = None
    with pytest.raises(UntrustedPeer, match=r"requires TLS, but the Secret of internalTls\.secretName is not set"):
        await pair.get()


async def test_plain_server_is_refused(pair: Pair, unused_tcp_port: int) -> None:
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
    pair.port = unused_tcp_port
    with pytest.raises(UntrustedPeer, match="does not accept TLS"):
        await pair.get()
    await runner.cleanup()


async def test_renewed_authority_takes_over_and_open_connections_go_on(pair: Pair) -> None:
    new = pair.other()
    first = await pair.get()
    assert await pair.get() == first, "the connection is kept"
    both = pair.authority.pem + new.pem
    for peer in (pair.server, pair.operator):
        peer.write({**pair.authority.issue(NAME), AUTHORITY_FILE: both})
    former = pair.operator.watch.identity
    pair.server.write({**new.issue(NAME), AUTHORITY_FILE: both})
    assert (await pair.get()).startswith(b"True ")
    pair.server.write(new.issue(NAME))
    kept = await pair.get()
    assert kept.startswith(b"True "), "an open connection outlives the authority"
    async with aiohttp.ClientSession() as pair.session:
        with pytest.raises(UntrustedPeer):
            await pair.get()
        pair.operator.write({**new.issue(NAME), AUTHORITY_FILE: both})
        assert pair.operator.watch.identity is not former
        assert (await pair.get()).startswith(b"True ")


async def test_identity_that_has_expired_says_so(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    watch = pair.server.watch
    assert watch.identity is not None
    watch.identity = replace(watch.identity, pair=replace(watch.identity.pair, expires_s=1.0))
    watch.take(watch.read())
    assert watch.problem == "tls.crt has expired at 1970-01-01T00:00:01+00:00"
    assert [getattr(record, "error", "") for record in caplog.records] == [watch.problem]
    pair.server.write(pair.authority.issue(NAME))
    assert watch.problem == ""


async def test_broken_secret_keeps_the_identity(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    before = pair.server.watch.identity
    for _ in range(2):
        pair.server.write({**pair.authority.issue(NAME), KEY_FILE: b"garbage"})
    assert pair.server.watch.identity is before
    assert "cannot be used together" in pair.server.watch.problem
    assert caplog.text.count("cannot use the Secret of internalTls.secretName") == 1
    assert (await pair.get()).startswith(b"True ")
